"""What was announced of one stream, as a server keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.cache.catalog import Catalog
from stoker.cache.coming import Stream, items_of
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.prefetching import ToRead
from stoker.errors import ConfigError
from stoker.wire.cache_orders import ORDER_COUNT_MAX, ORDER_KEYS_MAX, ORDER_READS_MAX, Announcement

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Part(NamedTuple):
    """Reads at the positions `[start, stop)`: the positions of those that are known here, the numbers of their objects,
    and their bytes if they are parts of objects."""

    start: int
    stop: int
    positions: I64
    numbers: I64
    spans: U64 | None
    round: int | None = None

    def joins(self, stop: int, objects: int) -> bool:
        """Whether it goes on from what is known up to `stop`, and is of a catalog with so many objects."""
        return self.start <= stop and (not len(self.numbers) or int(self.numbers.max()) < objects)

    def between(self, start: int, stop: int) -> Part:
        """Only what is read at these positions."""
        low, high = np.searchsorted(self.positions, [start, stop])
        spans = None if self.spans is None else self.spans[low:high]
        return Part(
            max(start, self.start), min(stop, self.stop), self.positions[low:high], self.numbers[low:high],
            spans, self.round,
        )  # fmt: skip


@dataclass(slots=True)
class Reader:
    """A stream that was announced. `placed`: it is what another server has handed on of one, by this placement.
    `token`: of whose part of the room it takes; None: of nobody's."""

    name: str
    label: str
    bucket: Bucket
    stream: Stream
    catalog: str
    until: float
    lease_s: float
    at_owners: bool
    placed: str
    token: str | None = None
    parts: list[Part] = field(default_factory=list)
    prefetched: int = 0
    prefetched_bytes: int = 0

    @property
    def is_here(self) -> bool:
        """Whether what is read is read of this server, or owned by it: it is to be here when it is read."""
        return bool(self.placed) or not self.at_owners

    @property
    def is_fetched_ahead(self) -> bool:
        """Whether this server fetches what is read: an owner does not where the server that the reader asks does."""
        return self.at_owners == bool(self.placed)

    def add(self, part: Part) -> None:
        """What was announced from its start on is forgotten."""
        before = [
            known if known.stop <= part.start else known.between(known.start, part.start)
            for known in self.parts
            if known.start < part.start
        ]
        self.parts = [*before, part]

    def advance(self, cursor: int, asked: int, now: float) -> None:
        """Reads before `cursor` are done, and those before `asked` are under way."""
        self.stream.advance(cursor, now, asked)
        self.parts = [part for part in self.parts if part.stop > self.stream.cursor]

    def reads(self, catalog: Catalog, start: int, stop: int) -> Sequence[ToRead]:
        """What is read at these positions, as far as it is kept."""
        return list(self._reads(catalog, start, stop))

    def _reads(self, catalog: Catalog, start: int, stop: int) -> Iterator[ToRead]:
        for part in self.parts:
            if part.stop <= start or part.start >= stop:
                continue
            some = part.between(start, stop)
            for at, (position, number) in enumerate(
                zip(some.positions.tolist(), some.numbers.tolist(), strict=True)
            ):
                first, last = (0, None) if some.spans is None else some.spans[at].tolist()
                yield ToRead(position, catalog.key(number), first, last, bool(self.placed))


def label_of(name: str, token: str | None) -> str:
    """What a stream or a catalog is called among those of all tokens."""
    return name if token is None else f"{token}:{name}"


def name_of(bucket: Bucket, stream: str, *, is_owned: bool) -> str:
    """By which a server tells streams apart."""
    return f"{bucket.number}{'=' if is_owned else '/'}{stream}"


def part_of(said: Announcement) -> Part | None:
    """The reads that are announced; None if none are. Raises ConfigError for what cannot be."""
    if len(said.keys) > ORDER_KEYS_MAX or len(said.reads) > 4 * ORDER_READS_MAX:
        raise ConfigError(
            f"at most {ORDER_KEYS_MAX} keys and {ORDER_READS_MAX} reads are announced at once, not "
            f"{len(said.keys)} and {len(said.reads) // 4}"
        )
    if len(said.reads) % 4 or len(said.spans) not in (0, 4 * len(said.reads)):
        raise ConfigError("reads are 4 bytes each and spans 16, as many of both")
    spans = None
    if said.spans:
        spans = np.frombuffer(said.spans, dtype="<u8").reshape(-1, 2)
        if bool((spans[:, 0] > spans[:, 1]).any()) or int(spans.max()) >= 2**53:
            raise ConfigError("a span ends before it begins, or is beyond any object")
    numbers = np.frombuffer(said.reads, dtype="<u4").astype(np.int64)
    count = said.count or len(numbers)
    offsets = _offsets(said, len(numbers), count)
    if not count:
        return None
    return Part(said.start, said.start + count, said.start + offsets, numbers, spans, said.round)


def _offsets(said: Announcement, reads: int, count: int) -> I64:
    """Raises ConfigError."""
    if len(said.offsets) not in (0, len(said.reads)) or count > ORDER_COUNT_MAX:
        raise ConfigError(
            f"offsets are 4 bytes each, as many as reads, of at most {ORDER_COUNT_MAX} positions"
        )
    if not said.offsets:
        if count != reads and reads:
            raise ConfigError(f"{reads} reads are not at {count} positions one after the other: say at which")
        return np.arange(reads, dtype=np.int64)
    offsets = np.frombuffer(said.offsets, dtype="<u4").astype(np.int64)
    if bool((np.diff(offsets) <= 0).any()) or int(offsets[-1]) >= count:
        raise ConfigError(f"offsets do not ascend, or go beyond the {count} positions that are announced")
    return offsets


def blocks_touched(part: Part, block_size_bytes: int) -> int:
    """About how many blocks are read."""
    if part.spans is None:
        return len(part.numbers)
    sizes = part.spans[:, 1] - part.spans[:, 0]
    return int((sizes // np.uint64(block_size_bytes)).sum()) + 2 * len(part.spans)


def items_at(part: Part, ids: U64, block_size_bytes: int) -> tuple[U64, I64]:
    """What is read, of objects with these ids, at which position."""
    if part.spans is None:
        return ids, part.positions
    size = np.uint64(block_size_bytes)
    first = (part.spans[:, 0] // size).astype(np.int64)
    last = (np.maximum(part.spans[:, 1], part.spans[:, 0] + np.uint64(1)) - np.uint64(1)) // size
    counts = last.astype(np.int64) - first + 1
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = np.repeat(first, counts) + offsets
    return items_of(np.repeat(ids, counts), blocks), np.repeat(part.positions, counts)
