"""Hands on to the owners, in a fleet, what is announced to this server: to each what is read of what it owns.

Nobody waits for it, and whatever fails here costs speed and nothing else: each message is one that may come twice, and
each answer says from where to go on. What was handed on is forgotten there if the reader is not heard of here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import xxhash
from msgspec.structs import replace

from stoker.cache.catalog import Catalog
from stoker.cache.maglev import Member, Placement
from stoker.cache.route import FleetView
from stoker.cache.server.announced import Part, Reader
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.sharing import Share, Sharing
from stoker.errors import CacheUnavailable, StokerError
from stoker.wire.cache_orders import Announced, Announcement

log = logging.getLogger("stoker.cache")
CHUNK = 4096
"""Keys in one message, and those that are placed at a time."""
EVERY_S = 0.02
CURSOR_EVERY_S = 0.1
"""So often owners that fetch ahead are told how far the reader is, in a small fleet."""
CURSOR_EVERY_S_MAX = 1.0
"""And the others; all of them where there is much to tell."""
MEMBERS_FEW = 8
PAIRS_A_SECOND = 2000
"""So many streams are told of to one owner each in a second, at most."""
RETRY_S = 5.0
REFUSED_S = 30.0
COPIES_MAX = 4
_DIVISIONS_KEPT = 4

Announce = Callable[[Bucket, Announcement], Awaitable[Announced]]


@dataclass(slots=True)
class _Told:
    """What one owner knows of a stream."""

    known: Announced = field(default_factory=lambda: Announced(0, 0))
    news: int = 0
    sent_at: float = -1e9
    not_before: float = -1e9


@dataclass(slots=True)
class _Handed:
    """A stream that is handed on. `news` counts what was heard of the reader."""

    reader: Reader
    catalog: Catalog
    news: int = 0
    placed: str = ""
    sharing: Sharing | None = None
    told: dict[str, _Told] = field(default_factory=dict)
    quiet: tuple[int, tuple[Member, ...] | None] = (0, None)
    """With what news, and in which fleet, there was nothing more to tell."""
    divided: dict[tuple[int, int], dict[str, Share]] = field(default_factory=dict)
    dividing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take_back(self, start: int) -> None:
        """What is read from there on is said anew."""
        self.divided = {}
        for told in self.told.values():
            if told.known.stop > start:
                told.known = replace(told.known, stop=start)


class HandingOn:
    """Lives on one event loop. `announce` and `withdraw` are this server's own."""

    def __init__(
        self,
        engine: Engine,
        announce: Announce,
        withdraw: Callable[..., Announced],
        now: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._announce = announce
        self._withdraw = withdraw
        self._now = now
        self._handed: dict[str, _Handed] = {}
        self._placements: dict[tuple[Member, ...], Placement] = {}
        self._sharings: WeakValueDictionary[tuple[int, str], Sharing] = WeakValueDictionary()
        """By catalog and placement: streams that share a catalog share it."""
        self._members: tuple[tuple[Member, ...] | None, str] = (None, "")
        """Those of the fleet, and what says in short who they are."""
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def follow(self, reader: Reader, catalog: Catalog, taken_back_to: int | None = None) -> None:
        """There is news of a stream that was announced to this server; `taken_back_to`: what had been said of what is
        read from there on is no more true."""
        handed = self._handed.get(reader.name)
        if handed is None or handed.reader is not reader:
            # What the owners know of the plan before is replaced by what they are told of the new one.
            handed = self._handed[reader.name] = _Handed(reader, catalog)
        handed.catalog = catalog
        handed.news += 1
        if taken_back_to is not None:
            handed.take_back(taken_back_to)
        self._news.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def end(self, name: str, *, is_withdrawn: bool) -> None:
        """A stream goes on no more. One that is not heard of any more may be heard of at another server: the owners
        find out by themselves."""
        handed = self._handed.pop(name, None)
        if handed is not None and is_withdrawn and handed.told:
            self._withdraw_soon(handed.reader, list(handed.told))

    def fetched(self, name: str) -> tuple[int, int]:
        """What the owners have fetched ahead of a stream: reads, and bytes."""
        handed = self._handed.get(name)
        told = [] if handed is None else [one.known for one in handed.told.values()]
        return sum(known.prefetched for known in told), sum(known.prefetched_bytes for known in told)

    async def close(self) -> None:
        """Hand on nothing more."""
        tasks = [*self._ending, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        has_more = False
        while True:
            if not has_more:
                try:
                    async with asyncio.timeout(CURSOR_EVERY_S_MAX):
                        await self._news.wait()
                except TimeoutError:
                    pass
            self._news.clear()
            has_more = False
            for handed in list(self._handed.values()):
                is_quiet = handed.quiet == (handed.news, self._members[0])
                if not self._is_current(handed) or (is_quiet and self._members[0] is self._view.members):
                    continue
                try:
                    has_more |= await self._hand_on(handed)
                except Exception:
                    # A defect here must not end it for all streams.
                    log.exception("what is announced cannot be handed on to the owners")
                    handed.told = {name: _Told(not_before=self._now() + REFUSED_S) for name in handed.told}
            await asyncio.sleep(EVERY_S)

    async def _hand_on(self, handed: _Handed) -> bool:
        """Tell each owner the next of what it does not know; whether there is more to tell."""
        reader, fleet = handed.reader, self._engine.fleet
        if not reader.parts or (fleet.is_alone and not reader.at_owners):
            return False
        sharing = await self._place(handed)
        if len(sharing) < len(handed.catalog):
            stop = min(len(handed.catalog), len(sharing) + CHUNK)
            await self._engine.store.holdings.run(_learn, sharing, handed.catalog, stop)
            if stop < len(handed.catalog):
                return True
        down = fleet.view.down()
        names = [name for name in sharing.members if name not in down and self._is_due(handed, sharing, name)]
        if not names and all(self._is_told(handed, sharing, name) for name in sharing.members):
            handed.quiet = handed.news, self._members[0]
            return False
        told = await asyncio.gather(*(self._tell(handed, sharing, name) for name in names))
        return any(told)

    def _is_current(self, handed: _Handed) -> bool:
        return self._handed.get(handed.reader.name) is handed

    @property
    def _view(self) -> FleetView:
        return self._engine.fleet.view

    @staticmethod
    def _lacks(handed: _Handed, sharing: Sharing, name: str) -> bool:
        """Whether an owner does not know all that there is."""
        known = handed.told[name].known
        return known.keys < len(sharing.catalog(name)) or known.stop < handed.reader.stream.stop

    def _is_told(self, handed: _Handed, sharing: Sharing, name: str) -> bool:
        return handed.told[name].news == handed.news and not self._lacks(handed, sharing, name)

    def _is_due(self, handed: _Handed, sharing: Sharing, name: str) -> bool:
        """Whether there is anything to tell an owner now."""
        told, now, fleet = handed.told[name], self._now(), self._engine.fleet
        if now < told.not_before or (name != fleet.me.name and fleet.url(name) is None):
            return False
        if self._lacks(handed, sharing, name):
            return True
        few = len(sharing.members) <= MEMBERS_FEW
        every_s = CURSOR_EVERY_S if few and handed.reader.at_owners else CURSOR_EVERY_S_MAX
        every_s = max(every_s, len(self._handed) * len(sharing.members) / PAIRS_A_SECOND)
        return told.news < handed.news and now >= told.sent_at + every_s

    async def _place(self, handed: _Handed) -> Sharing:
        """Who owns what now. Where that is another than before, all is told anew."""
        fleet, bucket = self._engine.fleet, handed.reader.bucket
        members = fleet.view.members or (Member(fleet.me.name),)
        copies = min(COPIES_MAX, max(1, bucket.spec.max_replicas))
        by_block = any(part.spans is not None for part in handed.reader.parts)
        if self._members[0] is not fleet.view.members:
            self._members = fleet.view.members, xxhash.xxh64_hexdigest(repr(members))
        placed = f"{self._members[1]}-{copies}{'b' if by_block else ''}/"
        if handed.sharing is None or handed.placed != placed:
            if members not in self._placements:
                self._placements = {members: await self._engine.store.holdings.run(Placement, members)}
            which = id(handed.catalog), placed
            sharing = self._sharings.get(which)
            if sharing is None:
                size = self._engine.block_size_bytes
                sharing = Sharing(self._placements[members], bucket.name, copies, size, by_block=by_block)
                self._sharings[which] = sharing
            handed.sharing = sharing
            handed.placed, handed.divided = placed, {}
            handed.told = {name: _Told() for name in handed.sharing.members}
        return handed.sharing

    async def _tell(self, handed: _Handed, sharing: Sharing, name: str) -> bool:
        """Whether there is more to tell an owner, after the next thing was."""
        told, fleet, now = handed.told[name], self._engine.fleet, self._now()
        said = await self._message(handed, sharing, name)
        url = fleet.url(name)
        if not self._is_current(handed) or (url is None and name != fleet.me.name):
            return False
        news, bucket = handed.news, handed.reader.bucket
        before = told.known
        try:
            if name == fleet.me.name:
                told.known = await self._announce(bucket, said)
            else:
                assert url is not None
                told.known = await fleet.peers.announce(url, bucket.name, said)
        except CacheUnavailable as error:
            fleet.lost(name, error)
            told.not_before = now + RETRY_S
            return False
        except StokerError as error:
            log.info("%s takes no announcements: %s", name, error)
            told.not_before = now + REFUSED_S
            return False
        if handed.reader.name not in self._handed:
            self._withdraw_soon(handed.reader, [name])  # it ended while the owner was told of it
            return False
        told.news, told.sent_at = news, now
        if told.known.plan > said.plan:
            told.not_before = now + REFUSED_S  # another server tells it of a newer one
            return False
        if said.count and told.known.stop <= before.stop:
            told.not_before = now + RETRY_S  # it has no room for more
            return False
        return self._lacks(handed, sharing, name)

    async def _message(self, handed: _Handed, sharing: Sharing, name: str) -> Announcement:
        """The next thing to tell an owner."""
        reader, told = handed.reader, handed.told[name]
        stream, known = reader.stream, told.known
        common: dict[str, Any] = {
            "stream": reader.label, "plan": stream.plan, "group": stream.group,
            "catalog": reader.catalog,
            "cursor": stream.cursor, "asked": stream.asked, "read_s": stream.read_s, "lease_s": reader.lease_s,
            "at_owners": reader.at_owners, "placed": handed.placed,
        }  # fmt: skip
        catalog = sharing.catalog(name)
        if known.keys < len(catalog):
            numbers = catalog[known.keys : known.keys + CHUNK]
            keys = await self._engine.store.holdings.run(_keys, handed.catalog, numbers)
            return Announcement(first_key=known.keys, keys=keys, **common)
        if known.stop < stream.stop:
            part = next((part for part in reader.parts if part.stop > known.stop), None)
            if part is not None and known.stop < part.start:
                # What was read before is not known any more, and need not be.
                count = part.start - known.stop
                return Announcement(start=known.stop, count=count, round=part.round, **common)
            if part is not None:
                part = part.between(known.stop, part.stop)
                share = (await self._divide(handed, sharing, part)).get(name)
                return Announcement(**_reads(part, share), **common)
        return Announcement(**common)

    async def _divide(self, handed: _Handed, sharing: Sharing, part: Part) -> dict[str, Share]:
        which = (part.start, part.stop)
        async with handed.dividing:
            found = handed.divided.get(which)
            if found is None:
                found = await self._engine.store.holdings.run(
                    sharing.divide, part.numbers, part.spans, handed.catalog.key
                )
                handed.divided[which] = found
                while len(handed.divided) > _DIVISIONS_KEPT:
                    handed.divided.pop(next(iter(handed.divided)))
        return found

    def _withdraw_soon(self, reader: Reader, names: list[str]) -> None:
        ending = asyncio.get_running_loop().create_task(self._withdraw_at(reader, names))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _withdraw_at(self, reader: Reader, names: list[str]) -> None:
        """Whoever cannot be told now forgets it by itself."""
        fleet = self._engine.fleet
        for name in names:
            url = fleet.url(name)
            if name == fleet.me.name:
                self._withdraw(reader.bucket, reader.label, is_owned=True)
            elif url is not None and name not in fleet.view.down():
                try:
                    await fleet.peers.withdraw(url, reader.bucket.name, reader.label)
                except StokerError as error:
                    log.debug("%s keeps an order until its lease has ended: %s", name, error)


def _learn(sharing: Sharing, catalog: Catalog, stop: int) -> None:
    """In a thread: to find names and to place them takes a while."""
    sharing.learn(_keys(catalog, range(len(sharing), stop)))


def _keys(catalog: Catalog, numbers: Iterable[int]) -> list[str]:
    return [catalog.key(int(number)) for number in numbers]


def _reads(part: Part, share: Share | None) -> dict[str, Any]:
    """What an owner is told of a part: what of it is read of what it owns."""
    said: dict[str, Any] = {"start": part.start, "count": part.stop - part.start, "round": part.round}
    if share is None:
        return said
    offsets = part.positions[share.places] - part.start
    said |= {"reads": share.numbers.astype("<u4").tobytes(), "offsets": offsets.astype("<u4").tobytes()}
    if part.spans is not None:
        said["spans"] = np.ascontiguousarray(part.spans[share.places], dtype="<u8").tobytes()
    return said
