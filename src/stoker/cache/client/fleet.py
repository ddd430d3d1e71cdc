"""A client that knows who owns what in a fleet, and asks there: no byte travels twice.

Its view of the fleet may be stale: every server answers every request. Who cannot be reached is left out for a while,
and another is asked.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from stoker.cache.client.asked import (
    Asked,
    ByteRange,
    Item,
    Parts,
    check_range,
    cut_at_owners,
    joined,
    raise_first,
)
from stoker.cache.client.client import CacheClient, Part
from stoker.cache.client.looking import LookingClient
from stoker.cache.client.waited import waited
from stoker.cache.maglev import Member, Placement, block_owner_name
from stoker.errors import CacheUnavailable, ObjectChanged, StokerError
from stoker.settings import ClientTlsFiles
from stoker.wire.cache_api import FleetStatus, ObjectPage, ObjectStat

T = TypeVar("T")
VIEW_S = 5.0
DOWN_S = 3.0
_THREADS = 8
_BATCH_TRIES = 3
_CHANGES_MAX = 3
_BLOCKS_FEW = 64


class FleetClient(CacheClient):
    """As CacheClient, for the servers at these endpoints (`http://HOST:PORT`) and all that are in a fleet with them."""

    def __init__(
        self,
        endpoints: Sequence[str],
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        tls: ClientTlsFiles | None = None,
    ) -> None:
        super().__init__(endpoints[0], token, timeout_s=timeout_s, short_circuit=False, tls=tls)
        self._tls = tls
        self._given = tuple(endpoints)
        self._token = token
        self._patience_s = timeout_s
        self._clients: dict[str, CacheClient] = {}
        self._urls: dict[str, str] = {}
        self._members: tuple[Member, ...] = ()
        self._down: dict[str, float] = {}
        self._placed: tuple[tuple[Member, ...], frozenset[str], Placement] = ((), frozenset(), Placement(()))
        self._block_size_bytes = 0
        self._viewed_at = -1e9
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def read(
        self, bucket: str, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> bytes:
        if start < 0 or (stop is not None and stop < start):
            raise ValueError(f"bytes [{start}, {stop}) are not a range")
        if stop == start:
            return b""
        self._look()
        size = self._block_size_bytes
        first_stop = (start // size + 1) * size
        if stop is not None:
            first_stop = min(first_stop, stop)
        part = self.part(bucket, key, start, first_stop, version=version)
        end = part.size_bytes if stop is None else min(stop, part.size_bytes)
        if first_stop >= end:
            return part.data
        bounds = [(at, min(at + size, end)) for at in range(first_stop, end, size)]

        def read(bound: tuple[int, int]) -> bytes:
            return self.part(bucket, key, bound[0], bound[1], version=part.version).data

        return b"".join([part.data, *self._threads().map(read, bounds)])

    def part(self, bucket: str, key: str, start: int, stop: int, *, version: str | None = None) -> Part:
        self._look()
        name = block_owner_name(bucket, key, start // self._block_size_bytes)
        return self._ask(name, lambda client: client.part(bucket, key, start, stop, version=version))

    def _items(self, bucket: str, asked: Asked, *, is_raising: bool, views: bool) -> list[Item]:
        if not isinstance(asked, Parts):
            items = self._gather(bucket, asked, [(asked.key(i), 0) for i in range(len(asked))], views=views)
        else:
            items = self._parts(bucket, asked.ranges, views=views)
        if is_raising:
            raise_first(items)
        return items

    def _parts(self, bucket: str, ranges: Sequence[ByteRange], *, views: bool) -> list[Item]:
        """Each part from the owners of its blocks. One that has several is asked for in pieces, of one version."""
        self._look()
        found: dict[int, Item] = {}
        for attempt in range(_CHANGES_MAX):
            left = [position for position in range(len(ranges)) if position not in found]
            known: dict[str, ObjectStat | None] = {}
            cut = [self._cut(bucket, ranges[position], known) for position in left]
            pieces = Parts([piece for some in cut for piece in some])
            blocks = [(piece.key, piece.start // self._block_size_bytes) for piece in pieces.ranges]
            came = iter(self._gather(bucket, pieces, blocks, views=views))
            for position, some in zip(left, cut, strict=True):
                item = joined([next(came) for _ in some], views=views)
                # Who wants no version in particular may have the one that it changed to.
                was_pinned = ranges[position].version is None and some[0].version is not None
                if not (was_pinned and isinstance(item, ObjectChanged)) or attempt == _CHANGES_MAX - 1:
                    found[position] = item
            if len(found) == len(ranges):
                break
        return [found[position] for position in range(len(ranges))]

    def _cut(self, bucket: str, part: ByteRange, known: dict[str, ObjectStat | None]) -> list[ByteRange]:
        """A part in as many pieces as different servers are to be asked for, and then with a version."""
        check_range(part.start, part.stop)
        size = self._block_size_bytes

        def owner(block: int) -> str:
            return self._owner(bucket, part.key, block)

        blocks = (part.stop - 1) // size - part.start // size + 1
        if len(self._members) < 2 or blocks < 2:
            return [part]
        if blocks <= _BLOCKS_FEW and len(cut_at_owners(part, size, owner)) == 1:
            return [part]
        if part.key not in known:
            try:
                known[part.key] = self.known(bucket, part.key)
            except StokerError:
                known[part.key] = None  # whoever is asked for the part says what is wrong
        stat = known[part.key]
        if stat is None or stat.is_absent or part.start >= stat.size_bytes:
            return [part]
        pieces = cut_at_owners(part._replace(stop=min(part.stop, stat.size_bytes)), size, owner)
        if len(pieces) == 1 or part.version is not None:
            return pieces
        return [piece._replace(version=stat.version) for piece in pieces]

    def _owner(self, bucket: str, key: str, block: int) -> str:
        return next(self._owners(block_owner_name(bucket, key, block)))

    def _gather(
        self, bucket: str, asked: Asked, blocks: Sequence[tuple[str, int]], *, views: bool
    ) -> list[Item]:
        """Each thing from the owner of its block, or from another server where that cannot be reached."""
        found: dict[int, Item] = {}
        for attempt in range(_BATCH_TRIES):
            self._look()
            owners: dict[tuple[str, int], str] = {}
            groups: dict[str, list[int]] = defaultdict(list)
            for position, block in enumerate(blocks):
                if position not in found:
                    if block not in owners:
                        owners[block] = self._owner(bucket, *block)
                    groups[owners[block]].append(position)
            self._read_groups(bucket, asked, groups, found, is_last=attempt == _BATCH_TRIES - 1, views=views)
            if len(found) == len(asked):
                break
        return [found[position] for position in range(len(asked))]

    def _of_key(self, bucket: str, key: str, question: Callable[[LookingClient], T]) -> T:
        return self._ask(block_owner_name(bucket, key, 0), question)

    def list_page(
        self, bucket: str, prefix: str, after: str | None, limit: int, delimiter: str = ""
    ) -> ObjectPage:
        name = block_owner_name(bucket, prefix, 0)
        return self._ask(name, lambda client: client.list_page(bucket, prefix, after, limit, delimiter))

    def close(self) -> None:
        super().close()
        for client in self._clients.values():
            client.close()
        if self._pool is not None and self._pool[0] == os.getpid():
            self._pool[1].shutdown()
        self._pool = None

    def __reduce__(self) -> tuple[Callable[..., FleetClient], tuple[object, ...]]:
        return _again, (self._given, self._token, self._patience_s, self._tls)

    def call(self, method: str, target: str, kind: type[T], body: bytes | None = None) -> T:
        """The answer of the same server each time, as long as it can be reached."""
        return self._ask(target, lambda client: client.call(method, target, kind, body))

    def _call(self, method: str, target: str, kind: type[T], body: bytes | None = None) -> T:
        return self._ask("", lambda client: client.call(method, target, kind, body))

    def servers(self) -> Sequence[CacheClient]:
        self._look()
        return [self._at(url) for url in self._urls.values()]

    def _read_groups(
        self,
        bucket: str,
        asked: Asked,
        groups: dict[str, list[int]],
        found: dict[int, Item],
        *,
        is_last: bool,
        views: bool,
    ) -> None:
        """One batch from each server at once. What one that cannot be reached was to give is left out, but at last."""

        def read(url: str, positions: list[int]) -> float:
            missed_s = waited().missed_s
            try:
                part = asked.some(positions)
                items = self._at(url)._items(bucket, part, is_raising=False, views=views)
            except CacheUnavailable:
                self._lost(url)
                if is_last:
                    raise
            else:
                came = zip(positions, items, strict=True)
                found.update(one for one in came if is_last or not isinstance(one[1], CacheUnavailable))
            return waited().missed_s - missed_s

        if len(groups) == 1:
            ((url, positions),) = groups.items()
            read(url, positions)
            return
        coming = [self._threads().submit(read, *group) for group in groups.items()]
        # They wait beside each other, and who asked waits as long as the last.
        waited().missed_s += max((done.result() for done in coming), default=0.0)

    def _ask(self, name: str, question: Callable[[CacheClient], T]) -> T:
        """What the owner of a name says, or another server where that cannot be reached. Raises what they say."""
        self._look()
        last: CacheUnavailable | None = None
        for url in self._owners(name):
            try:
                return question(self._at(url))
            except CacheUnavailable as error:
                self._lost(url)
                last = error
        assert last is not None
        raise last

    def _owners(self, name: str) -> Iterator[str]:
        """Whom to ask, one after the other: the owner, the others, and those that were told at first."""
        tried = set()
        down = frozenset(url for url, until in list(self._down.items()) if until > time.monotonic())
        placement = self._placed_without(down)
        for member in placement.owners(name, len(placement.members)) if name else placement.members:
            url = self._urls.get(member.name)
            if url is not None and url not in tried:
                tried.add(url)
                yield url
        for url in (*self._urls.values(), *self._given):
            if url not in tried:
                tried.add(url)
                yield url

    def _placed_without(self, down: frozenset[str]) -> Placement:
        members, (placed, without, placement) = self._members, self._placed
        if (placed, without) != (members, down):
            away = [member.name for member in members if self._urls.get(member.name) in down]
            placement = Placement(members).without(away) if away else Placement(members)
            self._placed = members, down, placement  # at once: other threads read it
        return placement

    def _look(self) -> None:
        """Have the fleet told, if it was not lately. Raises CacheUnavailable if nobody answers, and nobody ever has."""
        now = time.monotonic()
        if now - self._viewed_at < VIEW_S:
            return
        last: CacheUnavailable | None = None
        for url in dict.fromkeys((*self._urls.values(), *self._given)):
            if self._down.get(url, 0.0) > now and len(self._urls) > 1:
                continue
            try:
                status = self._at(url).fleet()
            except CacheUnavailable as error:
                self._lost(url)
                last = error
                continue
            self._take(status, url)
            return
        if not self._members and last is not None:
            raise last
        self._viewed_at = now  # those who were known stay known

    def _take(self, status: FleetStatus, url: str) -> None:
        now = time.monotonic()
        members = status.members
        if len(members) < 2:
            # One that is alone may not know under which address it was reached.
            self._urls = {status.name: url}
            self._members = (Member(status.name),)
        else:
            self._urls = {member.name: member.url for member in members}
            self._members = tuple(Member(m.name, m.weight, m.zone) for m in members)
        self._block_size_bytes = status.block_size_bytes
        for name in status.down:
            if name in self._urls:
                url = self._urls[name]
                self._down[url] = max(self._down.get(url, 0.0), now + DOWN_S)
        self._forget_former()
        self._viewed_at = now  # at last: other threads need all of it

    def _forget_former(self) -> None:
        """Let go of those that are members no more. Who is being asked is held by who asks, and its connections are
        closed when nobody does any more."""
        kept = {*self._urls.values(), *self._given}
        for url in [url for url in list(self._clients) if url not in kept]:
            self._clients.pop(url, None)
        for url in [url for url in list(self._down) if url not in kept]:
            self._down.pop(url, None)

    def _lost(self, url: str) -> None:
        self._down[url] = time.monotonic() + DOWN_S
        self._viewed_at = -1e9

    def _at(self, url: str) -> CacheClient:
        client = self._clients.get(url)
        if client is None:
            made = CacheClient(
                url, self._token, timeout_s=self._patience_s, short_circuit=False, tls=self._tls
            )
            client = self._clients.setdefault(url, made)
        return client

    def _threads(self) -> ThreadPoolExecutor:
        """Of this process: a fork has none of its parent's."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(_THREADS, "stoker-cache-client")
        return self._pool[1]


def open_client(
    endpoint: str, token: str | None = None, *, timeout_s: float = 30.0, tls: ClientTlsFiles | None = None
) -> CacheClient:
    """A client of one server, or of a fleet where `endpoint` names several, with commas in between."""
    endpoints = [part.strip() for part in endpoint.split(",") if part.strip()]
    if len(endpoints) > 1:
        return FleetClient(endpoints, token, timeout_s=timeout_s, tls=tls)
    return CacheClient(endpoint, token, timeout_s=timeout_s, tls=tls)


def _again(
    endpoints: Sequence[str], token: str | None, timeout_s: float, tls: ClientTlsFiles | None
) -> FleetClient:
    return FleetClient(endpoints, token, timeout_s=timeout_s, tls=tls)
