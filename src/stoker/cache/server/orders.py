"""The announced orders of all buckets: who reads what, and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from stoker.cache.catalog import Catalog
from stoker.cache.coming import ComingReads, Stream
from stoker.cache.server.announced import Part, Reader, blocks_touched, items_at, name_of, part_of
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
READS_MAX = 32_000_000
"""Of all streams together, counted by the blocks that they touch; they take some 40 bytes each."""
READ_ITEMS_MAX = 1_000_000
"""Of one announcement."""
KEYS_MAX = 32_000_000
STREAMS_MAX = 4096
_UPKEEP_EVERY_S = 1.0


class Orders:
    """Lives on one event loop. Sorting goes on in threads; of one bucket one announcement is taken in at a time."""

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self._engine = engine
        self._now = now
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

    async def announce(self, bucket: Bucket, said: Announcement) -> Announced:
        """Take in what was announced, as far as it joins on to what is known. Raises ConfigError."""
        part = part_of(said)
        async with self._locks.setdefault(bucket.number, asyncio.Lock()):
            reader = self._reader(bucket, said)
            if reader.stream.plan > said.plan:
                return self._told(reader)
            reader.until = self._now() + said.lease_s
            catalog = self._catalogs.setdefault((bucket.number, reader.catalog), Catalog())
            await self._take_keys(bucket, catalog, said)
            if part is not None and part.joins(reader.stream.stop, len(catalog)) and self._is_room(part):
                await self._take_reads(reader, catalog, part)
            reader.advance(said.cursor, said.asked, self._now())
        self._hand_on(reader)
        self.prefetching.wake()
        return self._told(reader)

    def withdraw(self, bucket: Bucket, stream: str, *, is_owned: bool = False) -> Announced:
        """A stream goes on no more; `is_owned`: it is what another server has handed on of it."""
        reader = self._readers.get(name_of(bucket, stream, is_owned=is_owned))
        if reader is None:
            return Announced(0, 0)
        said = self._told(reader)
        self._remove(reader)
        return said

    def status(self, bucket: Bucket) -> OrdersStatus:
        """All streams of a bucket."""
        return OrdersStatus(
            [
                StreamStatus(
                    reader.label, reader.stream.group, reader.stream.plan, reader.stream.cursor,
                    reader.stream.stop, reader.stream.read_s, *self._fetched(reader), bool(reader.placed),
                    self.prefetching.core.ahead(name, reader.stream),
                )
                for name, reader in self._readers.items()
                if reader.bucket is bucket
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
        return reader.reads(self._catalogs[reader.bucket.number, reader.catalog], start, stop)

    def fetched(self, name: str, size_bytes: int) -> None:
        """A read was fetched before it was asked for."""
        reader = self._readers.get(name)
        if reader is not None:
            reader.prefetched += 1
            reader.prefetched_bytes += size_bytes

    # -- announcements -------------------------------------------------------------------------------------------

    def _reader(self, bucket: Bucket, said: Announcement) -> Reader:
        """The stream's, begun anew where the plan is a new one, or what is handed on is placed anew."""
        name = name_of(bucket, said.stream, is_owned=bool(said.placed))
        reader = self._readers.get(name)
        if reader is not None:
            is_same = reader.stream.plan == said.plan and reader.placed == said.placed
            if is_same or reader.stream.plan > said.plan:
                return reader
        if reader is None and len(self._readers) >= STREAMS_MAX:
            raise ConfigError(f"{STREAMS_MAX} streams are announced already: withdraw those that have ended")
        read_s = said.read_s or (1e-3 if reader is None else reader.stream.read_s)
        stream = Stream(said.group or name, said.plan, read_s=read_s, now=self._now())
        catalog = f"{said.placed}{said.catalog or f'/{said.stream}'}"
        made = Reader(
            name, said.stream, bucket, stream, catalog, self._now() + said.lease_s, said.lease_s, said.at_owners,
            said.placed,
        )  # fmt: skip
        if reader is not None:
            made.prefetched, made.prefetched_bytes = reader.prefetched, reader.prefetched_bytes
        self._readers[name] = made
        if reader is not None:
            self._forget_catalog(reader)
        if made.is_fetched_ahead:
            self._streams = {**self._streams, name: stream}
        if made.is_here:
            held = self._engine.store.holdings
            coming = held.coming.get(bucket.number) or ComingReads()
            coming.put(name, stream)
            held.set_coming(held.lots[bucket.number], coming)
        self._set_reach(made)
        return made

    def _set_reach(self, reader: Reader) -> None:
        """In a fleet each server keeps what it owns, for all, and of the rest what is read here soon: a second copy of
        that takes the place of the only one of something else."""
        if not reader.placed and not self._engine.fleet.is_alone:
            reader.stream.reach = 2 * self.prefetching.core.window_reads(len(self._streams))
        else:
            reader.stream.reach = None

    def _hand_on(self, reader: Reader) -> None:
        if not reader.placed:
            catalog = self._catalogs[reader.bucket.number, reader.catalog]
            self._handing_on.follow(reader, catalog)

    async def _take_keys(self, bucket: Bucket, catalog: Catalog, said: Announcement) -> None:
        known = len(catalog) - said.first_key
        if not 0 <= known < len(said.keys):
            return
        if sum(map(len, self._catalogs.values())) + len(said.keys) > KEYS_MAX:
            raise ConfigError(f"more than {KEYS_MAX} objects are announced: announce fewer at a time")
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

    def _is_room(self, part: Part) -> bool:
        known = sum(
            reader.stream.size if reader.is_here else sum(len(part.numbers) for part in reader.parts)
            for reader in self._readers.values()
        )
        return known + len(part.numbers) <= READS_MAX

    def _told(self, reader: Reader) -> Announced:
        catalog = self._catalogs.get((reader.bucket.number, reader.catalog), ())
        return Announced(len(catalog), reader.stream.stop, reader.stream.plan, *self._fetched(reader))

    def _fetched(self, reader: Reader) -> tuple[int, int]:
        """How many reads of a stream were fetched ahead, and of how many bytes, with those that owners have."""
        reads, size_bytes = self._handing_on.fetched(reader.name) if reader.at_owners else (0, 0)
        return reader.prefetched + reads, reader.prefetched_bytes + size_bytes

    def _remove(self, reader: Reader) -> None:
        del self._readers[reader.name]
        self._streams = {name: stream for name, stream in self._streams.items() if name != reader.name}
        held, number = self._engine.store.holdings, reader.bucket.number
        coming = held.coming.get(number)
        if coming is not None and reader.is_here:
            coming.remove(reader.name)
            if not coming:
                held.set_coming(held.lots[number], None)
        self._handing_on.end(reader.name)
        self._forget_catalog(reader)

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
