"""The announced orders of all buckets: who reads what, and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stoker.cache.catalog import Catalog
from stoker.cache.coming import ComingReads, Stream, items_of
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.prefetching import Prefetching, ToRead
from stoker.errors import ConfigError
from stoker.wire.cache_orders import (
    ORDER_KEYS_MAX,
    ORDER_READS_MAX,
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

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(slots=True)
class _Part:
    """Consecutive reads: the numbers of their objects, and their bytes if they are parts of objects."""

    start: int
    numbers: I64
    spans: U64 | None

    @property
    def stop(self) -> int:
        return self.start + len(self.numbers)


@dataclass(slots=True)
class _Reader:
    """A stream that was announced."""

    name: str
    bucket: Bucket
    stream: Stream
    catalog: str
    until: float
    lease_s: float
    parts: list[_Part] = field(default_factory=list)
    prefetched: int = 0
    prefetched_bytes: int = 0


class Orders:
    """Lives on one event loop. Sorting goes on in threads; of one bucket one announcement is taken in at a time."""

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self._engine = engine
        self._now = now
        self._readers: dict[str, _Reader] = {}
        self._streams: dict[str, Stream] = {}
        self._catalogs: dict[tuple[int, str], Catalog] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self.prefetching = Prefetching(engine, self)
        self._upkeep: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Forget from now on who is not heard of any more."""
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_order())

    async def stop(self) -> None:
        """Fetch nothing more ahead."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        await self.prefetching.close()

    # -- what operators' routes ask ------------------------------------------------------------------------------

    async def announce(self, bucket: Bucket, said: Announcement) -> Announced:
        """Take in what was announced, as far as it joins on to what is known. Raises ConfigError."""
        _check(said)
        async with self._locks.setdefault(bucket.number, asyncio.Lock()):
            reader = self._reader(bucket, said)
            if reader.stream.plan > said.plan:
                return self._told(reader)
            reader.until = self._now() + said.lease_s
            catalog = self._catalogs.setdefault((bucket.number, reader.catalog), Catalog())
            await self._take_keys(bucket, catalog, said)
            numbers = np.frombuffer(said.reads, dtype="<u4").astype(np.int64)
            is_known = not len(numbers) or int(numbers.max()) < len(catalog)
            if is_known and len(numbers) and said.start <= reader.stream.stop and self._is_room(len(numbers)):
                await self._take_reads(reader, catalog, numbers, said)
            reader.stream.advance(said.cursor, self._now(), said.asked)
            reader.parts = [part for part in reader.parts if part.stop > reader.stream.cursor]
        self.prefetching.wake()
        return self._told(reader)

    def withdraw(self, bucket: Bucket, stream: str) -> Announced:
        """A stream goes on no more."""
        reader = self._readers.get(_name(bucket, stream))
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
                    name.partition("/")[2], reader.stream.group, reader.stream.plan, reader.stream.cursor,
                    reader.stream.stop, reader.stream.read_s, reader.prefetched, reader.prefetched_bytes,
                    self.prefetching.core.ahead(name, reader.stream),
                )
                for name, reader in self._readers.items()
                if reader.bucket is bucket
            ]
        )  # fmt: skip

    # -- what prefetching asks -----------------------------------------------------------------------------------

    def streams(self) -> Mapping[str, Stream]:
        """All, by names of their own."""
        return self._streams

    def bucket_of(self, name: str) -> Bucket:
        """Whose stream it is. Raises KeyError."""
        return self._readers[name].bucket

    def reads(self, name: str, start: int, stop: int) -> Sequence[ToRead]:
        """What is read at these positions; those that are done may be left out at the front."""
        reader = self._readers[name]
        catalog = self._catalogs[reader.bucket.number, reader.catalog]
        found: list[ToRead] = []
        for part in reader.parts:
            for position in range(max(start, part.start), min(stop, part.stop)):
                at = position - part.start
                key = catalog.key(int(part.numbers[at]))
                if part.spans is None:
                    found.append(ToRead(key))
                else:
                    found.append(ToRead(key, int(part.spans[at, 0]), int(part.spans[at, 1])))
        return found

    def fetched(self, name: str, size_bytes: int) -> None:
        """A read was fetched before it was asked for."""
        reader = self._readers.get(name)
        if reader is not None:
            reader.prefetched += 1
            reader.prefetched_bytes += size_bytes

    # -- announcements -------------------------------------------------------------------------------------------

    def _reader(self, bucket: Bucket, said: Announcement) -> _Reader:
        """The stream's, begun anew where the plan is a new one."""
        name = _name(bucket, said.stream)
        reader = self._readers.get(name)
        if reader is not None and reader.stream.plan >= said.plan:
            return reader
        if reader is None and len(self._readers) >= STREAMS_MAX:
            raise ConfigError(f"{STREAMS_MAX} streams are announced already: withdraw those that have ended")
        read_s = said.read_s or (1e-3 if reader is None else reader.stream.read_s)
        stream = Stream(said.group or name, said.plan, read_s=read_s, now=self._now())
        catalog = said.catalog or f"/{said.stream}"
        made = _Reader(name, bucket, stream, catalog, self._now() + said.lease_s, said.lease_s)
        if reader is not None:
            made.prefetched, made.prefetched_bytes = reader.prefetched, reader.prefetched_bytes
        self._readers[name] = made
        if reader is not None:
            self._forget_catalog(reader)
        self._streams = {**self._streams, name: stream}
        held = self._engine.store.holdings
        coming = held.coming.get(bucket.number) or ComingReads()
        coming.put(name, stream)
        held.set_coming(held.lots[bucket.number], coming)
        return made

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

    async def _take_reads(self, reader: _Reader, catalog: Catalog, numbers: I64, said: Announcement) -> None:
        spans = None
        size = self._engine.block_size_bytes
        if said.spans:
            spans = np.frombuffer(said.spans, dtype="<u8").reshape(-1, 2)
            touched = int(((spans[:, 1] - spans[:, 0]) // np.uint64(size)).sum()) + 2 * len(spans)
            if touched > READ_ITEMS_MAX:
                raise ConfigError(
                    f"these reads touch {touched} blocks, more than {READ_ITEMS_MAX}: announce fewer"
                )

        def work() -> None:
            items, positions = _items(catalog.ids(numbers), spans, said.start, size)
            reader.stream.announce(said.start, len(numbers), items, positions, said.round)

        await self._engine.store.holdings.run(work)
        before = [
            _Part(part.start, part.numbers[: said.start - part.start],
                  None if part.spans is None else part.spans[: said.start - part.start])
            for part in reader.parts if part.start < said.start
        ]  # fmt: skip
        reader.parts = [*before, _Part(said.start, numbers, spans)]
        self.prefetching.core.back(reader.name, said.start)

    def _is_room(self, reads: int) -> bool:
        return sum(reader.stream.size for reader in self._readers.values()) + reads <= READS_MAX

    def _told(self, reader: _Reader) -> Announced:
        catalog = self._catalogs.get((reader.bucket.number, reader.catalog), ())
        return Announced(
            len(catalog), reader.stream.stop, reader.stream.plan, reader.prefetched, reader.prefetched_bytes
        )

    def _remove(self, reader: _Reader) -> None:
        del self._readers[reader.name]
        self._streams = {name: stream for name, stream in self._streams.items() if name != reader.name}
        held, number = self._engine.store.holdings, reader.bucket.number
        coming = held.coming.get(number)
        if coming is not None:
            coming.remove(reader.name)
            if not coming:
                held.set_coming(held.lots[number], None)
        self._forget_catalog(reader)

    def _forget_catalog(self, reader: _Reader) -> None:
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
                self.prefetching.wake()
            except Exception:
                # A defect here must not end the upkeep: the next round may not meet it.
                log.exception("announced orders cannot be kept")


def _name(bucket: Bucket, stream: str) -> str:
    return f"{bucket.number}/{stream}"


def _check(said: Announcement) -> None:
    """Raises ConfigError."""
    if len(said.keys) > ORDER_KEYS_MAX or len(said.reads) > 4 * ORDER_READS_MAX:
        raise ConfigError(
            f"at most {ORDER_KEYS_MAX} keys and {ORDER_READS_MAX} reads are announced at once, not "
            f"{len(said.keys)} and {len(said.reads) // 4}"
        )
    if len(said.reads) % 4 or len(said.spans) not in (0, 4 * len(said.reads)):
        raise ConfigError("reads are 4 bytes each and spans 16, as many of both")
    if said.spans:
        spans = np.frombuffer(said.spans, dtype="<u8").reshape(-1, 2)
        if bool((spans[:, 0] > spans[:, 1]).any()) or int(spans.max()) >= 2**53:
            raise ConfigError("a span ends before it begins, or is beyond any object")


def _items(ids: U64, spans: U64 | None, start: int, block_size_bytes: int) -> tuple[U64, I64]:
    """What is read at which position."""
    positions = np.arange(start, start + len(ids), dtype=np.int64)
    if spans is None:
        return ids, positions
    first = (spans[:, 0] // block_size_bytes).astype(np.int64)
    last = (np.maximum(spans[:, 1], spans[:, 0] + np.uint64(1)) - np.uint64(1)) // np.uint64(block_size_bytes)
    counts = last.astype(np.int64) - first + 1
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = np.repeat(first, counts) + offsets
    return items_of(np.repeat(ids, counts), blocks), np.repeat(positions, counts)
