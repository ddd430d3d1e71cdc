"""Where the rows of tables lie: groups of rows, one after the other, in objects. Pure: it reads nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.base.ranges import ByteRange
from stoker.data.formats.port import Reads
from stoker.wire.cache_api import ObjectInfo

I64 = npt.NDArray[np.int64]
GAP_BYTES = 128 * 1024
"""Two parts that lie no further apart are read as one: a request costs about as much as so many bytes."""


class Group(NamedTuple):
    """Rows that are decoded together (a Parquet row group, an Arrow record batch), and the bytes they lie in."""

    rows: int
    spans: Sequence[ByteRange]
    """Of the wanted columns, sorted and apart from each other."""


class Scanned(NamedTuple):
    """What was found in one object."""

    columns: tuple[str, ...]
    groups: Sequence[Group]
    heads: Sequence[ByteRange]
    """What must be read, beside a group's own bytes, to decode it: a footer, a schema, dictionaries."""
    features: dict[str, Any]
    """Columns as Hugging Face `datasets` describes them; empty where it did not write the object."""


class Place(NamedTuple):
    """Which of its object's groups one is, and the bytes it lies in."""

    within: int
    spans: list[ByteRange]


class Wanted(NamedTuple):
    """Some of the records that were asked for: those of one group."""

    group: int
    positions: I64
    """Where they belong in the answer."""
    offsets: I64
    """Which rows of the group they are."""


@dataclass(frozen=True)
class TableIndex:
    """All groups of a dataset that have rows, in the order of its records."""

    objects: tuple[ObjectInfo, ...]
    heads: tuple[tuple[ByteRange, ...], ...]
    columns: tuple[str, ...]
    features: dict[str, Any]
    owners: I64
    """Which object each group lies in, and"""
    within: I64
    """which of the object's groups it is."""
    rows: I64
    firsts: I64
    """The number of each group's first record."""
    spans: I64
    """The bytes `[spans[i, 0], spans[i, 1])` are a part of one group,"""
    ends: I64
    """which has those parts from the end of the group before it to its own."""

    @property
    def records(self) -> int:
        return int(self.firsts[-1] + self.rows[-1]) if len(self.rows) else 0

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(info.key for info in self.objects)

    def fingerprint(self) -> str:
        """Of names, sizes and numbers of rows; not of versions, which a mere copy of the data changes."""
        digest = hashlib.sha256()
        for info in self.objects:
            digest.update(b"%b\0%d\0" % (info.key.encode(), info.size_bytes))
        digest.update(self.owners.tobytes() + self.rows.tobytes())
        return digest.hexdigest()[:16]

    def place(self, group: int) -> Place:
        first = int(self.ends[group - 1]) if group else 0
        spans = [ByteRange(start, stop) for start, stop in self.spans[first : self.ends[group]].tolist()]
        return Place(int(self.within[group]), spans)

    def cut(self, groups: Sequence[int], parts: int, size_bytes: int) -> list[list[int]]:
        """Those groups, in order, in about so many parts, of at most so many bytes each; a group that is larger is a
        part by itself."""
        sizes = [sum(span.size_bytes for span in self.place(group).spans) for group in groups]
        size_bytes = min(size_bytes, -(-sum(sizes) // parts))
        cut: list[list[int]] = []
        left_bytes = 0
        for group, group_bytes in zip(groups, sizes, strict=True):
            if not cut or group_bytes > left_bytes:
                cut.append([])
                left_bytes = size_bytes
            cut[-1].append(group)
            left_bytes -= group_bytes
        return cut

    def split(self, numbers: Sequence[int] | I64) -> list[Wanted]:
        """Those records, by groups in ascending order. Raises IndexError."""
        wanted = checked_numbers(numbers, self.records)
        groups = self._groups_of(wanted)
        order = np.argsort(groups, kind="stable")
        cuts = np.flatnonzero(np.diff(groups[order])) + 1
        found = []
        for positions in np.split(order, cuts) if len(order) else []:
            group = int(groups[positions[0]])
            found.append(Wanted(group, positions, wanted[positions] - self.firsts[group]))
        return found

    def reads(self, numbers: I64) -> Reads:
        """What those records are read from. Raises IndexError."""
        groups = self._groups_of(checked_numbers(numbers, self.records))
        before = np.concatenate(([0], self.ends[:-1]))[groups]
        starts, stops = self.spans[before, 0], self.spans[self.ends[groups] - 1, 1]
        return Reads(self.keys, self.owners[groups], starts, stops)

    def _groups_of(self, numbers: I64) -> I64:
        return np.searchsorted(self.firsts, numbers, side="right") - 1


def build_index(objects: Sequence[ObjectInfo], scanned: Sequence[Scanned]) -> TableIndex:
    """Put together what was found in each object."""
    flat = [
        (owner, within, group)
        for owner, found in enumerate(scanned)
        for within, group in enumerate(found.groups)
        if group.rows > 0
    ]
    rows = np.array([group.rows for _, _, group in flat], np.int64)
    first = scanned[0] if scanned else Scanned((), (), (), {})
    return TableIndex(
        objects=tuple(objects),
        heads=tuple(tuple(found.heads) for found in scanned),
        columns=first.columns,
        features=first.features,
        owners=np.array([owner for owner, _, _ in flat], np.int64),
        within=np.array([within for _, within, _ in flat], np.int64),
        rows=rows,
        firsts=np.cumsum(rows) - rows,
        spans=np.array([span for _, _, group in flat for span in group.spans], np.int64).reshape(-1, 2),
        ends=np.cumsum([len(group.spans) for _, _, group in flat], dtype=np.int64),
    )


def checked_numbers(numbers: Sequence[int] | I64, records: int) -> I64:
    """Record numbers as an array. Raises IndexError for one that does not exist."""
    wanted = np.asarray(numbers, np.int64)
    if len(wanted) and (wanted.min() < 0 or wanted.max() >= records):
        wrong = wanted[(wanted < 0) | (wanted >= records)][0]
        raise IndexError(f"there is no record {wrong}: they are numbered from 0 to {records - 1}")
    return wanted


def coalesced(spans: Sequence[ByteRange], gap_bytes: int = GAP_BYTES) -> list[ByteRange]:
    """The same bytes, and small gaps, in fewer ranges; sorted."""
    return list(_coalesce(sorted(spans), gap_bytes))


def _coalesce(spans: list[ByteRange], gap_bytes: int) -> Iterator[ByteRange]:
    current: ByteRange | None = None
    for span in spans:
        if current is not None and span.start <= current.stop + gap_bytes:
            current = ByteRange(current.start, max(current.stop, span.stop))
            continue
        if current is not None:
            yield current
        current = span
    if current is not None:
        yield current
