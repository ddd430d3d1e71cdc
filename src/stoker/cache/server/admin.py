"""The server's own routes: status, health, lists, buckets, refresh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from stoker.cache.origin.open import without_query
from stoker.cache.server.added import AddedBuckets
from stoker.cache.server.buckets import Bucket, check_origin
from stoker.cache.server.engine import Engine
from stoker.cache.server.keeping import Keeping
from stoker.cache.server.orders import Orders
from stoker.cache.server.port import Answer, Request, hops_of, is_refreshing, origin_of
from stoker.cache.server.summaries import Summaries
from stoker.errors import AccessDenied, ConfigError, ObjectNotFound
from stoker.wire.cache_api import (
    HELD_BLOCKS_MAX,
    JSON,
    LIST_LIMIT_MAX,
    LOAD_KEYS_MAX,
    MSGPACK,
    BucketAdded,
    BucketSpec,
    BucketStatus,
    CacheStatus,
    Evicted,
    HeldAnswer,
    HeldQuery,
    LoadAnswer,
    LoadRequest,
    ObjectPage,
    ObjectStat,
    Pins,
    PrefixStatus,
    Refreshed,
)
from stoker.wire.cache_orders import Announced, Announcement, OrdersStatus
from stoker.wire.http import check_key, split_target

REPLICAS_MAX = 100
_PART_BYTES = 256 * 1024


class HitFigures(NamedTuple):
    """What the front has answered of one bucket."""

    hits: int = 0
    size_bytes: int = 0


class FrontHits:
    """What the front has answered since the start, which it tells only once."""

    def __init__(self, take: Callable[[], dict[int, tuple[int, int]]]) -> None:
        self._take = take
        self._sums: dict[int, HitFigures] = {}

    def of(self, bucket: int) -> HitFigures:
        """Of the bucket with that number in the index."""
        for number, (hits, size_bytes) in self._take().items():
            known = self._sums.get(number, HitFigures())
            self._sums[number] = HitFigures(known.hits + hits, known.size_bytes + size_bytes)
        return self._sums.get(bucket, HitFigures())


class Admin:
    """Answers for one engine. `uptime_s` and `notes` are asked for each status."""

    def __init__(
        self,
        engine: Engine,
        hits: FrontHits,
        keeping: Keeping,
        added: AddedBuckets,
        summaries: Summaries,
        orders: Orders,
        version: str,
        uptime_s: Callable[[], float],
        notes: Callable[[], list[str]],
    ) -> None:
        self._engine = engine
        self._hits = hits
        self._keeping = keeping
        self._added = added
        self._summaries = summaries
        self._orders = orders
        self._version = version
        self._uptime_s = uptime_s
        self._notes = notes

    async def answer(self, request: Request, answer: Answer) -> None:
        _, path, query = split_target(request.target)
        route, _, name = path.partition("/")
        match request.method, route:
            case "GET" | "HEAD", "health":
                _reply(request, answer, {"status": "ok"})
            case "GET", "status":
                await self._engine.settle()
                _reply(request, answer, self.status(request))
            case "GET", "list":
                _reply(request, answer, await self._list(request, name, query))
            case "GET", "stat":
                _reply(request, answer, await self._stat(request, name, begins="begins" in query))
            case "GET", "fleet":
                is_trusting = request.principal.is_unrestricted
                added = self._added.specs if is_trusting and hops_of(request) else {}
                status = self._engine.fleet.status(is_trusting=is_trusting, added=added)
                _reply(request, answer, replace(status, summaries=self._summaries.status()))
            case "GET", "summary":
                await self._summary(request, answer)
            case "POST", "held":
                _reply(request, answer, self._held(request, name))
            case "POST", "fetch":
                _reply(request, answer, await self._fetch(request, name))
            case "POST", "load":
                _reply(request, answer, await self._load(request, name))
            case "POST", "evict":
                _reply(request, answer, await self._evict(request, name, query.get("prefix", "")))
            case "PUT" | "DELETE", "pin":
                _reply(request, answer, await self._pin(request, name, query.get("prefix", "")))
            case "POST" | "GET" | "DELETE", "orders":
                _reply(request, answer, await self._order(request, name, query))
            case "POST", "refresh":
                _reply(request, answer, await self._refresh(request, name, query.get("prefix", "")))
            case "PUT", "buckets":
                _needs_all(request)
                spec = msgspec.json.decode(request.body, type=BucketSpec)
                if "check" in query:
                    self._added.check(name, spec)
                    is_new, said = False, BucketAdded(spec)
                elif hops_of(request):
                    is_new, said = self._added.add(name, spec), BucketAdded(spec)
                else:
                    is_new, said = await self._added.add_everywhere(name, spec)
                _reply(request, answer, said, 201 if is_new else 200)
            case _:
                raise ObjectNotFound(f"there is no {request.method} /-/{path}")

    def status(self, request: Request) -> CacheStatus:
        """Figures of the buckets that the asker may read."""
        engine, store = self._engine, self._engine.store
        figures = store.index.figures()
        rows = []
        for name, bucket in sorted(engine.buckets.items()):
            if request.principal.may_read(name):
                held = figures.get(bucket.number)
                rows.append(self._row(bucket, *((0, 0) if held is None else (held.size_bytes, held.pieces))))
        problem = store.problem
        # They tell of other buckets, their origins and folders.
        notes = [*self._notes(), *([] if problem is None else [problem])]
        return CacheStatus(
            version=self._version,
            state="ok" if problem is None else "pass-through",
            uptime_s=round(self._uptime_s(), 3),
            capacity_bytes=store.room.limit_bytes,
            held_bytes=store.room.used_bytes,
            held_blocks=sum(held.pieces for held in figures.values()),
            hits=sum(row.hits for row in rows),
            misses=sum(row.misses for row in rows),
            hit_bytes=sum(row.hit_bytes for row in rows),
            origin_bytes=sum(row.origin_bytes for row in rows),
            origin_requests=sum(row.origin_requests for row in rows),
            buckets=rows,
            local_hits=sum(row.local_hits for row in rows),
            notes=notes if request.principal.is_unrestricted else [],
            fleet=None if engine.fleet.is_single else engine.fleet.status(),
        )

    def _row(self, bucket: Bucket, held_bytes: int, held_blocks: int) -> BucketStatus:
        room, lots = self._engine.store.room, self._engine.store.holdings.lots[bucket.number].lots
        counters, spec = bucket.origin.counters, bucket.spec
        front = self._hits.of(bucket.number)
        prefixes = [
            PrefixStatus(lot.prefix, room.used_by(lot.number), lot.quota_bytes, lot.is_pinned)
            for lot in lots
            if lot.prefix and (lot.quota_bytes or lot.is_pinned)
        ]
        return BucketStatus(
            name=bucket.name, origin=without_query(spec.origin_url), policy=spec.policy,
            held_bytes=held_bytes, held_blocks=held_blocks,
            hits=bucket.hits + front.hits, misses=bucket.misses,
            hit_bytes=bucket.hit_bytes + front.size_bytes, origin_bytes=counters.bytes_read,
            origin_requests=counters.requests, local_hits=bucket.local_hits,
            origin_state=bucket.origin.state, origin_retries=bucket.origin.retries,
            origin_hedges=bucket.origin.hedges, peer_bytes=bucket.peer_bytes,
            used_bytes=room.used_by_bucket(bucket.name), quota_bytes=spec.quota_bytes,
            max_replicas=spec.max_replicas, ttl_s=spec.ttl_s, prefixes=prefixes,
            pins=[prefix.prefix for prefix in prefixes if prefix.pinned],
        )  # fmt: skip

    async def _list(self, request: Request, name: str, query: dict[str, str]) -> ObjectPage:
        bucket = self._bucket(request, name)
        text = query.get("limit", "1000")
        is_number = len(text) < 10 and text.isascii() and text.isdigit()
        if not is_number or not 1 <= int(text) <= LIST_LIMIT_MAX:
            raise ConfigError(f"limit must be 1 to {LIST_LIMIT_MAX}, not {text!r}")
        return await self._engine.metadata.page(
            bucket, query.get("prefix", ""), query.get("after"), int(text), hops_of(request)
        )

    async def _stat(self, request: Request, path: str, *, begins: bool) -> ObjectStat:
        name, _, key = path.partition("/")
        bucket = self._bucket(request, name)
        metadata = self._engine.metadata
        known = await metadata.locate(
            bucket, key, hops_of(request), is_refreshing=is_refreshing(request), begins=begins
        )
        return metadata.stat_of(known)

    def _bucket(self, request: Request, name: str) -> Bucket:
        """Raises AccessDenied, ObjectNotFound, AnotherOrigin."""
        bucket = self._engine.bucket(_readable(request, name))
        check_origin(bucket, origin_of(request))
        return bucket

    def _held(self, request: Request, name: str) -> HeldAnswer:
        bucket = self._bucket(request, name)
        query = _blocks(request)
        holds = self._engine.store.holds
        return HeldAnswer([holds(bucket.number, *block) for block in query.blocks])

    async def _summary(self, request: Request, answer: Answer) -> None:
        _needs_all(request)
        data = memoryview(self._summaries.encoded())
        answer.start(200, [("Content-Type", "application/octet-stream")], len(data))
        for first in range(0, len(data), _PART_BYTES):
            answer.data(data[first : first + _PART_BYTES])
            await answer.drain()
        answer.finish()

    async def _fetch(self, request: Request, name: str) -> HeldAnswer:
        bucket = self._bucket(request, name)
        query = _blocks(request)
        return await self._keeping.fetch(bucket, query.blocks, query.age_s)

    async def _load(self, request: Request, name: str) -> LoadAnswer:
        bucket = self._engine.bucket(_readable(request, name))
        wanted = msgspec.msgpack.decode(request.body, type=LoadRequest)
        if len(wanted.keys) > LOAD_KEYS_MAX:
            raise ConfigError(f"at most {LOAD_KEYS_MAX} keys are loaded at once, not {len(wanted.keys)}")
        if not 0 <= wanted.replicas <= REPLICAS_MAX:
            raise ConfigError(f"replicas must be 0 to {REPLICAS_MAX}, not {wanted.replicas}")
        for key in wanted.keys:
            check_key(key)
        return LoadAnswer(await self._keeping.load(bucket, wanted.keys, wanted.replicas, wanted.age_s))

    async def _order(self, request: Request, name: str, query: dict[str, str]) -> Announced | OrdersStatus:
        bucket = self._engine.bucket(_readable(request, name))
        token = None if request.principal.is_unrestricted else request.principal.name
        if request.method == "GET":
            return self._orders.status(bucket, token)
        if request.method == "DELETE":
            if "owned" in query:
                _needs_all(request)
            return self._orders.withdraw(bucket, query.get("stream", ""), token, is_owned="owned" in query)
        said = msgspec.msgpack.decode(request.body, type=Announcement)
        if said.placed:
            _needs_all(request)
        return await self._orders.announce(bucket, said, token)

    async def _evict(self, request: Request, name: str, prefix: str) -> Evicted:
        _needs_all(request)
        bucket = self._engine.bucket(name)
        evicted = await self._keeping.evict(bucket, prefix)
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
        _needs_all(request)
        is_pinned = request.method == "PUT"
        pins = self._keeping.pin(self._engine.bucket(name), prefix, is_pinned=is_pinned)
        if hops_of(request):
            return pins
        _, missed = await self._engine.fleet.ask_all(
            lambda url: self._engine.fleet.peers.pin(url, name, prefix, is_pinned=is_pinned)
        )
        return Pins(pins.prefixes, missed)

    async def _refresh(self, request: Request, name: str, prefix: str) -> Refreshed:
        """Here, and on all other servers of the fleet."""
        bucket = self._engine.bucket(_readable(request, name))
        dropped = await self._engine.metadata.refresh(bucket, prefix)
        if hops_of(request):
            return Refreshed(dropped)
        fleet = self._engine.fleet
        return Refreshed(dropped, await fleet.refresh_all(bucket.name, prefix))


def _readable(request: Request, name: str) -> str:
    if not request.principal.may_read(name):
        raise AccessDenied(f"this token may not read the bucket {name!r}")
    return name


def _blocks(request: Request) -> HeldQuery:
    """Raises ConfigError."""
    query = msgspec.msgpack.decode(request.body, type=HeldQuery)
    if len(query.blocks) > HELD_BLOCKS_MAX:
        raise ConfigError(
            f"at most {HELD_BLOCKS_MAX} blocks are asked about at once, not {len(query.blocks)}"
        )
    for key, _, _ in query.blocks:
        check_key(key)
    return query


def _needs_all(request: Request) -> None:
    if not request.principal.is_unrestricted:
        raise AccessDenied("this needs a token that opens every bucket")


def _reply(request: Request, answer: Answer, value: Any, status: int = 200) -> None:
    kind = MSGPACK if request.header(b"accept") == MSGPACK else JSON
    body = msgspec.msgpack.encode(value) if kind == MSGPACK else msgspec.json.encode(value)
    answer.start(status, [("Content-Type", kind)], len(body))
    answer.data(body)
    answer.finish()
