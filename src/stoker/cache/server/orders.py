"""The announced orders of all buckets: who reads what, and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stoker.cache.catalog import Catalog
from stoker.cache.coming import ComingReads, Stream
from stoker.cache.server.announced import Part, Reader, blocks_touched, items_at, label_of, name_of, part_of
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.handing_on import HandingOn
from stoker.cache.server.prefetching import Prefetching, ToRead
from stoker.errors import ConfigError
from stoker.wire.cache_orders import (
    Announced,
    Announcement,
    OrdersStatus,
    StreamStatus,
)
from stoker.wire.http import check_key

log = logging.getLogger("stoker.cache")
READ_ITEMS_MAX = 1_000_000
"""Of one announcement."""
_UPKEEP_EVERY_S = 1.0


class Allowance(NamedTuple):
    """How much may be announced, by all together. Reads are counted by the blocks that they touch; they take some 40
    bytes each. One token that does not open everything may announce `token_share` of it."""

    reads: int = 32_000_000
    keys: int = 32_000_000
    streams: int = 4096
    token_share: float = 0.5


ALLOWANCE = Allowance()


class Orders:
    """Lives on one event loop. Sorting goes on in threads; of one bucket one announcement is taken in at a time."""

    def __init__(self, engine: Engine, now: Callable[[], float], allowance: Allowance = ALLOWANCE) -> None:
        self._engine = engine
        self._now = now
        self._allowance = allowance
        self._readers: dict[str, Reader] = {}
        self._streams: dict[str, Stream] = {}
        """Those of which this server fetches ahead what is read."""
        self._catalogs: dict[tuple[int, str], Catalog] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self.prefetching = Prefetching(engine, self)
        self._handing_on = HandingOn(engine, self.announce, self.withdraw, now)
        self._upkeep: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Forget from now on who is not heard of any more."""
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_order())

    async def stop(self) -> None:
        """Fetch nothing more ahead."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        await self._handing_on.close()
        await self.prefetching.close()

    # -- what operators' routes ask ------------------------------------------------------------------------------

    async def announce(self, bucket: Bucket, said: Announcement, token: str | None = None) -> Announced:
        """Take in what was announced, as far as it joins on to what is known and there is room for it. `token`: whose
        part of the room that is; None: it may take all. Raises ConfigError."""
        part = part_of(said)
        async with self._locks.setdefault(bucket.number, asyncio.Lock()):
            reader = self._reader(bucket, said, token)
            if reader.stream.plan > said.plan:
                return self._told(reader)
            reader.until = self._now() + said.lease_s
            catalog = self._catalogs.setdefault((bucket.number, reader.catalog), Catalog())
            before = reader.stream.stop
            await self._take_keys(bucket, catalog, said, token)
            if (
                part is not None
                and part.joins(reader.stream.stop, len(catalog))
                and self._is_room(part, token)
            ):
                await self._take_reads(reader, catalog, part)
            reader.advance(said.cursor, said.asked, self._now())
        is_taken_back = part is not None and part.start < before
        self._hand_on(reader, said.start if is_taken_back else None)
        self.prefetching.wake_soon()
        return self._told(reader)

    def withdraw(
        self, bucket: Bucket, stream: str, token: str | None = None, *, is_owned: bool = False
    ) -> Announced:
        """A stream goes on no more; `is_owned`: it is what another server has handed on of it."""
        reader = self._readers.get(name_of(bucket, label_of(stream, token), is_owned=is_owned))
        if reader is None:
            return Announced(0, 0)
        said = self._told(reader)
        self._remove(reader, is_withdrawn=True)
        return said

    def status(self, bucket: Bucket, token: str | None = None) -> OrdersStatus:
        """All streams of a bucket; with a token, its own."""
        return OrdersStatus(
            [
                StreamStatus(
                    reader.label, reader.stream.group, reader.stream.plan, reader.stream.cursor,
                    reader.stream.stop, reader.stream.read_s, *self._fetched(reader), bool(reader.placed),
                    self.prefetching.core.ahead(name, reader.stream),
                )
                for name, reader in self._readers.items()
                if reader.bucket is bucket and token in (None, reader.token)
            ]
        )  # fmt: skip

    # -- what prefetching asks -----------------------------------------------------------------------------------

    def streams(self) -> Mapping[str, Stream]:
        """Those of which what is read is fetched here, by names of their own."""
        return self._streams

    def bucket_of(self, name: str) -> Bucket:
        """Whose stream it is. Raises KeyError."""
        return self._readers[name].bucket

    def reads(self, name: str, start: int, stop: int) -> Sequence[ToRead]:
        """What is read at these positions, as far as it is known here; those that are done may be left out."""
        reader = self._readers[name]
        self._set_reach(reader)  # before it is fetched: what is beyond it may be given up again at once
        return reader.reads(self._catalogs[reader.bucket.number, reader.catalog], start, stop)

    def fetched(self, name: str, size_bytes: int) -> None:
        """A read was fetched before it was asked for."""
        reader = self._readers.get(name)
        if reader is not None:
            reader.prefetched += 1
            reader.prefetched_bytes += size_bytes
            reader.bucket.prefetched_reads += 1
            reader.bucket.prefetched_bytes += size_bytes

    # -- announcements -------------------------------------------------------------------------------------------

    def _reader(self, bucket: Bucket, said: Announcement, token: str | None) -> Reader:
        """The stream's, begun anew where the plan is a new one, or what is handed on is placed anew."""
        label = label_of(said.stream, token)
        name = name_of(bucket, label, is_owned=bool(said.placed))
        reader = self._readers.get(name)
        if reader is not None:
            is_same = reader.stream.plan == said.plan and reader.placed == said.placed
            if is_same or reader.stream.plan > said.plan:
                return reader
        if reader is None:
            self._check_room("streams", 1, self._allowance.streams, len, token)
        read_s = said.read_s or (1e-3 if reader is None else reader.stream.read_s)
        stream = Stream(said.group or name, said.plan, read_s=read_s, now=self._now())
        # What tokens of different tenants call the same is not the same.
        catalog = f"{said.placed}{label_of(said.catalog, token) if said.catalog else f'/{label}'}"
        made = Reader(
            name, label, bucket, stream, catalog, self._now() + said.lease_s, said.lease_s, said.at_owners,
            said.placed, token,
        )  # fmt: skip
        if reader is not None:
            made.prefetched, made.prefetched_bytes = reader.prefetched, reader.prefetched_bytes
        self._readers[name] = made
        if reader is not None:
            self._forget_catalog(reader)
        self._streams = {other: one for other, one in self._streams.items() if other != name}
        if made.is_fetched_ahead:
            self._streams[name] = stream
        if made.is_here:
            held = self._engine.store.holdings
            coming = held.coming.get(bucket.number) or ComingReads()
            coming.put(name, stream)
            held.set_coming(held.lots[bucket.number], coming)
        elif reader is not None:
            self._forget_coming(reader)
        self._set_reach(made)
        return made

    def _set_reach(self, reader: Reader) -> None:
        """In a fleet each server keeps what it owns, for all, and of the rest what is read here soon: a second copy of
        that takes the place of the only one of something else."""
        if not reader.placed and not self._engine.fleet.is_alone:
            reader.stream.reach = 2 * self.prefetching.core.window_reads(len(self._streams))
        else:
            reader.stream.reach = None

    def _hand_on(self, reader: Reader, taken_back_to: int | None) -> None:
        is_known = self._readers.get(reader.name) is reader  # it may have been withdrawn meanwhile
        if is_known and not reader.placed:
            catalog = self._catalogs[reader.bucket.number, reader.catalog]
            self._handing_on.follow(reader, catalog, taken_back_to)

    def _check_room(
        self, what: str, more: int, most: int, count: Callable[[list[Reader]], int], token: str | None
    ) -> None:
        """Raises ConfigError where too much would be announced, by all or by this token."""
        readers = list(self._readers.values())
        if count(readers) + more > most:
            raise ConfigError(f"more than {most} {what} are announced: withdraw streams that have ended")
        share = int(most * self._allowance.token_share)
        if token is not None and count([one for one in readers if one.token == token]) + more > share:
            raise ConfigError(
                f"more than {share} {what} are announced by {token}: withdraw streams that have ended, or use a token "
                "that opens all buckets, which may announce more"
            )

    async def _take_keys(
        self, bucket: Bucket, catalog: Catalog, said: Announcement, token: str | None
    ) -> None:
        known = len(catalog) - said.first_key
        if not 0 <= known < len(said.keys):
            return
        self._check_room("objects", len(said.keys), self._allowance.keys, self._keys_of, token)
        keys = said.keys[known:]
        for key in keys:
            check_key(key)
        ids = await self._engine.store.holdings.run(self._engine.store.index.ids, bucket.number, keys)
        catalog.extend(keys, np.frombuffer(ids, dtype=np.uint64))

    async def _take_reads(self, reader: Reader, catalog: Catalog, part: Part) -> None:
        size = self._engine.block_size_bytes
        touched = blocks_touched(part, size)
        if touched > READ_ITEMS_MAX:
            raise ConfigError(
                f"these reads touch {touched} blocks, more than {READ_ITEMS_MAX}: announce fewer"
            )

        def work() -> None:
            items, positions = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
            if reader.is_here:
                items, positions = items_at(part, catalog.ids(part.numbers), size)
            reader.stream.announce(part.start, part.stop - part.start, items, positions, part.round)

        await self._engine.store.holdings.run(work)
        reader.add(part)
        self.prefetching.core.back(reader.name, part.start)

    def _is_room(self, part: Part, token: str | None) -> bool:
        """Reads for which there is none are said again later: as others are done, it comes."""
        most, readers = self._allowance.reads, self._readers.values()
        own = [reader for reader in readers if reader.token == token]
        if token is not None and _reads_of(own) + len(part.numbers) > most * self._allowance.token_share:
            return False
        return _reads_of(readers) + len(part.numbers) <= most

    def _keys_of(self, readers: list[Reader]) -> int:
        used = {(reader.bucket.number, reader.catalog) for reader in readers}
        return sum(len(self._catalogs[name]) for name in used if name in self._catalogs)

    def _told(self, reader: Reader) -> Announced:
        catalog = self._catalogs.get((reader.bucket.number, reader.catalog), ())
        return Announced(len(catalog), reader.stream.stop, reader.stream.plan, *self._fetched(reader))

    def _fetched(self, reader: Reader) -> tuple[int, int]:
        """How many reads of a stream were fetched ahead, and of how many bytes, with those that owners have."""
        reads, size_bytes = self._handing_on.fetched(reader.name) if reader.at_owners else (0, 0)
        return reader.prefetched + reads, reader.prefetched_bytes + size_bytes

    def _remove(self, reader: Reader, *, is_withdrawn: bool = False) -> None:
        del self._readers[reader.name]
        self._streams = {name: stream for name, stream in self._streams.items() if name != reader.name}
        self._forget_coming(reader)
        self._handing_on.end(reader.name, is_withdrawn=is_withdrawn)
        self._forget_catalog(reader)

    def _forget_coming(self, reader: Reader) -> None:
        held, number = self._engine.store.holdings, reader.bucket.number
        coming = held.coming.get(number)
        if coming is not None:
            coming.remove(reader.name)
            if not coming:
                held.set_coming(held.lots[number], None)

    def _forget_catalog(self, reader: Reader) -> None:
        """If it was the last that used it."""
        number = reader.bucket.number
        if not any((r.bucket.number, r.catalog) == (number, reader.catalog) for r in self._readers.values()):
            self._catalogs.pop((number, reader.catalog), None)

    async def _keep_order(self) -> None:
        while True:
            await asyncio.sleep(_UPKEEP_EVERY_S)
            now = self._now()
            try:
                for reader in [reader for reader in self._readers.values() if reader.until < now]:
                    self._remove(reader)
                for reader in self._readers.values():
                    self._set_reach(reader)
                self.prefetching.wake()
            except Exception:
                # A defect here must not end the upkeep: the next round may not meet it.
                log.exception("announced orders cannot be kept")


def _reads_of(readers: Iterable[Reader]) -> int:
    return sum(
        reader.stream.size if reader.is_here else sum(len(part.numbers) for part in reader.parts)
        for reader in readers
    )
