"""The server's own routes: status, health, lists, buckets, refresh."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from stoker.cache.server.added import AddedBuckets
from stoker.cache.server.allowed import (
    check_may_administer,
    check_may_do_all,
    check_may_list,
    check_may_order,
    check_may_read,
)
from stoker.cache.server.blobs.part import Blobs
from stoker.cache.server.buckets import Bucket, check_origin
from stoker.cache.server.engine import Engine
from stoker.cache.server.folders import folders_page
from stoker.cache.server.keeping import Keeping
from stoker.cache.server.observing import Observed
from stoker.cache.server.openapi import document
from stoker.cache.server.orders import Orders
from stoker.cache.server.port import (
    Answer,
    Request,
    WrongMethod,
    hops_of,
    is_refreshing,
    origin_of,
    sites_asked,
)
from stoker.cache.server.statuses import Statuses, is_for
from stoker.cache.server.summaries import Summaries
from stoker.errors import ConfigError, ObjectNotFound
from stoker.wire.cache_api import (
    HELD_BLOCKS_MAX,
    JSON,
    LIST_LIMIT_MAX,
    LOAD_KEYS_MAX,
    MSGPACK,
    BucketAdded,
    BucketRemoved,
    BucketSpec,
    Evicted,
    HeldAnswer,
    HeldObject,
    HeldQuery,
    LoadAnswer,
    LoadRequest,
    ObjectPage,
    ObjectStat,
    Pins,
    Refreshed,
    Sites,
)
from stoker.wire.cache_orders import Announced, Announcement, OrdersStatus
from stoker.wire.cache_routes import METHODS
from stoker.wire.http import check_key, split_target

_T = TypeVar("_T")
REPLICAS_MAX = 100
_PART_BYTES = 256 * 1024


class Admin:
    """Answers for one engine."""

    def __init__(
        self,
        engine: Engine,
        blobs: Blobs,
        keeping: Keeping,
        added: AddedBuckets,
        summaries: Summaries,
        orders: Orders,
        observed: Observed,
        statuses: Statuses,
    ) -> None:
        self._engine = engine
        self._blobs = blobs
        self._keeping = keeping
        self._added = added
        self._summaries = summaries
        self._orders = orders
        self._observed = observed
        self._statuses = statuses

    async def answer(self, request: Request, answer: Answer) -> None:
        """Raises WrongMethod, and what the routes raise."""
        _, path, query = split_target(request.target)
        route, _, name = path.partition("/")
        allowed = METHODS.get(route)
        if allowed is None:
            raise ObjectNotFound(f"there is no /-/{path}")
        if request.method not in allowed:
            raise WrongMethod(request.method, allowed)
        match request.method, route:
            case "GET" | "HEAD", "health":
                self._observed.health(request, answer)
            case "GET" | "HEAD", "ready":
                self._observed.ready(request, answer)
            case "GET", "metrics":
                self._observed.figures(request, answer)
            case "GET", "openapi.json":
                send_json(answer, document(self._statuses.version))
            case "GET", "status":
                await self._engine.settle()
                _reply(request, answer, self._statuses.told(request.principal))
            case "GET", "list":
                _reply(request, answer, await self._list(request, name, query))
            case "GET", "stat":
                _reply(request, answer, await self._stat(request, name, begins="begins" in query))
            case "GET", "fleet":
                is_trusting = request.principal.is_unrestricted
                status = self._engine.fleet.status(is_trusting=is_trusting)
                if is_trusting and hops_of(request):
                    status = replace(status, added=self._added.specs, removed=self._added.removed)
                _reply(request, answer, replace(status, summaries=self._summaries.status()))
            case "GET", "sites":
                origin = self._readable(request, name, []).origin
                _reply(request, answer, Sites(await origin.sites(sites_asked(request))))
            case "GET", "summary":
                await self._summary(request, answer)
            case "POST", "held":
                _reply(request, answer, self._held(request, name))
            case "POST", "fetch":
                _reply(request, answer, await self._fetch(request, name))
            case "POST", "load":
                _reply(request, answer, await self._load(request, name, begins="begin" in query))
            case "GET", "loaded":
                _reply(request, answer, await self._loaded(request, name))
            case "POST", "evict":
                _reply(request, answer, await self._evict(request, name, query.get("prefix", "")))
            case "PUT" | "DELETE", "pin":
                _reply(request, answer, await self._pin(request, name, query.get("prefix", "")))
            case "POST" | "GET" | "DELETE", "orders":
                _reply(request, answer, await self._order(request, name, query))
            case "POST", "refresh":
                _reply(request, answer, await self._refresh(request, name, query.get("prefix", "")))
            case "PUT", "buckets":
                check_may_do_all(request.principal)
                spec = msgspec.json.decode(request.body, type=BucketSpec)
                if "check" in query:
                    self._added.check(name, spec)
                    is_new, said = False, BucketAdded(spec)
                elif hops_of(request):
                    is_new, said = self._added.add(name, spec), BucketAdded(spec)
                else:
                    is_new, said = await self._added.add_everywhere(name, spec)
                _reply(request, answer, said, 201 if is_new else 200)
            case "DELETE", "buckets":
                check_may_do_all(request.principal)
                _reply(request, answer, self._remove_bucket(name, query.get("at_ms", "")))
            case _:
                raise ObjectNotFound(f"there is no {request.method} /-/{path}")

    def _remove_bucket(self, name: str, text: str) -> BucketRemoved:
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise ConfigError(f"at_ms must say when the bucket was removed, not {text!r}")
        self._added.removed_elsewhere(name, int(text))
        return BucketRemoved()

    async def _list(self, request: Request, name: str, query: dict[str, str]) -> ObjectPage:
        check_may_list(request.principal, name, query.get("prefix", ""))
        blobs = self._blobs.buckets.get(name)
        text = query.get("limit", "1000")
        is_number = len(text) < 10 and text.isascii() and text.isdigit()
        if not is_number or not 1 <= int(text) <= LIST_LIMIT_MAX:
            raise ConfigError(f"limit must be 1 to {LIST_LIMIT_MAX}, not {text!r}")
        which = query.get("prefix", ""), query.get("after"), int(text)
        hops = hops_of(request)
        delimiter = query.get("delimiter", "")
        if blobs is not None:
            ask = partial(self._blobs.keeping.page, blobs, hops=hops)
        else:
            ask = partial(self._engine.metadata.page, self._bucket(request, name), hops=hops)
            if delimiter:
                page = await ask(*which, delimiter=delimiter)
                if page.folders is not None:
                    return page
        return await (folders_page(ask, delimiter, *which) if delimiter else ask(*which))

    async def _stat(self, request: Request, path: str, *, begins: bool) -> ObjectStat:
        name, _, key = path.partition("/")
        bucket = self._readable(request, name, [key])
        metadata = self._engine.metadata
        known = await metadata.locate(
            bucket, key, hops_of(request), is_refreshing=is_refreshing(request), begins=begins
        )
        return metadata.stat_of(known)

    def _bucket(self, request: Request, name: str) -> Bucket:
        """Raises ObjectNotFound, AnotherOrigin."""
        bucket = self._engine.bucket(name)
        check_origin(bucket, origin_of(request))
        return bucket

    def _readable(self, request: Request, name: str, keys: Iterable[str]) -> Bucket:
        """Raises AccessDenied, ObjectNotFound, AnotherOrigin."""
        check_may_read(request.principal, name, keys)
        return self._bucket(request, name)

    def _held(self, request: Request, name: str) -> HeldAnswer:
        query = _blocks(request)
        bucket = self._readable(request, name, _keys(query))
        holds = self._engine.store.holds
        return HeldAnswer([holds(bucket.number, *block) for block in query.blocks])

    async def _summary(self, request: Request, answer: Answer) -> None:
        check_may_do_all(request.principal)
        data = memoryview(self._summaries.encoded())
        answer.start(200, [("Content-Type", "application/octet-stream")], len(data))
        for first in range(0, len(data), _PART_BYTES):
            answer.data(data[first : first + _PART_BYTES])
            await answer.drain()
        answer.finish()

    async def _fetch(self, request: Request, name: str) -> HeldAnswer:
        query = _blocks(request)
        bucket = self._readable(request, name, _keys(query))
        return await self._keeping.fetch(bucket, query.blocks, query.age_s)

    async def _loaded(self, request: Request, path: str) -> HeldObject:
        name, _, key = path.partition("/")
        return await self._keeping.held(self._readable(request, name, [key]), key, hops_of(request))

    async def _load(self, request: Request, name: str, *, begins: bool) -> LoadAnswer:
        wanted = _said(request, LoadRequest)
        if len(wanted.keys) > LOAD_KEYS_MAX:
            raise ConfigError(f"at most {LOAD_KEYS_MAX} keys are loaded at once, not {len(wanted.keys)}")
        if not 0 <= wanted.replicas <= REPLICAS_MAX:
            raise ConfigError(f"replicas must be 0 to {REPLICAS_MAX}, not {wanted.replicas}")
        for key in wanted.keys:
            check_key(key)
        check_may_read(request.principal, name, wanted.keys)
        bucket = self._engine.bucket(name)
        if begins:
            return LoadAnswer(self._keeping.begin_load(bucket, wanted.keys, wanted.replicas))
        return LoadAnswer(await self._keeping.load(bucket, wanted.keys, wanted.replicas, wanted.age_s))

    async def _order(self, request: Request, name: str, query: dict[str, str]) -> Announced | OrdersStatus:
        check_may_order(request.principal, name)
        bucket = self._engine.bucket(name)
        token = None if request.principal.is_unrestricted else request.principal.name
        if request.method == "GET":
            return self._orders.status(bucket, token)
        if request.method == "DELETE":
            if "owned" in query:
                check_may_do_all(request.principal)
            return self._orders.withdraw(bucket, query.get("stream", ""), token, is_owned="owned" in query)
        said = _said(request, Announcement)
        check_may_read(request.principal, name, said.keys)
        if said.placed:
            check_may_do_all(request.principal)
        return await self._orders.announce(bucket, said, token)

    async def _evict(self, request: Request, name: str, prefix: str) -> Evicted:
        check_may_administer(request.principal, name, prefix)
        blobs = self._blobs.buckets.get(name)
        if blobs is not None:
            evicted = await self._blobs.keeping.evict(blobs, prefix)
        else:
            evicted = await self._keeping.evict(self._engine.bucket(name), prefix)
        if hops_of(request):
            return evicted
        others, missed = await self._engine.fleet.ask_all(
            lambda url: self._engine.fleet.peers.evict(url, name, prefix)
        )
        return Evicted(
            evicted.blocks + sum(other.blocks for other in others),
            evicted.size_bytes + sum(other.size_bytes for other in others),
            missed,
        )

    async def _pin(self, request: Request, name: str, prefix: str) -> Pins:
        check_may_administer(request.principal, name, prefix)
        is_pinned = request.method == "PUT"
        pins = self._keeping.pin(self._engine.bucket(name), prefix, is_pinned=is_pinned)
        if hops_of(request):
            return pins
        _, missed = await self._engine.fleet.ask_all(
            lambda url: self._engine.fleet.peers.pin(url, name, prefix, is_pinned=is_pinned)
        )
        return Pins([one for one in pins.prefixes if is_for(request.principal, name, one)], missed)

    async def _refresh(self, request: Request, name: str, prefix: str) -> Refreshed:
        """Here, and on all other servers of the fleet."""
        check_may_read(request.principal, name, [prefix])
        bucket = self._engine.bucket(name)
        dropped = await self._engine.metadata.refresh(bucket, prefix)
        if hops_of(request):
            return Refreshed(dropped)
        fleet = self._engine.fleet
        return Refreshed(dropped, await fleet.refresh_all(bucket.name, prefix))


def _blocks(request: Request) -> HeldQuery:
    """Raises ConfigError."""
    query = _said(request, HeldQuery)
    if len(query.blocks) > HELD_BLOCKS_MAX:
        raise ConfigError(
            f"at most {HELD_BLOCKS_MAX} blocks are asked about at once, not {len(query.blocks)}"
        )
    for key, _, _ in query.blocks:
        check_key(key)
    return query


def _said(request: Request, kind: type[_T]) -> _T:
    """The message in a body. Raises msgspec.DecodeError."""
    if (request.header(b"content-type") or "").partition(";")[0].strip().lower() == JSON:
        return msgspec.json.decode(request.body, type=kind)
    return msgspec.msgpack.decode(request.body, type=kind)


def send_json(answer: Answer, body: bytes) -> None:
    """An answer that is JSON already."""
    answer.start(200, [("Content-Type", JSON)], len(body))
    answer.data(body)
    answer.finish()


def _keys(query: HeldQuery) -> list[str]:
    return [key for key, _, _ in query.blocks]


def _reply(request: Request, answer: Answer, value: Any, status: int = 200) -> None:
    kind = MSGPACK if request.header(b"accept") == MSGPACK else JSON
    body = msgspec.msgpack.encode(value) if kind == MSGPACK else msgspec.json.encode(value)
    answer.start(status, [("Content-Type", kind)], len(body))
    answer.data(body)
    answer.finish()
