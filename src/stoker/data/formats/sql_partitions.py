"""Partitions of a table by ranges of its key: each has the same number of rows, but the last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.data.formats.sql_selection import Selection
from stoker.data.formats.table_index import I64
from stoker.errors import ConfigError, EmptyDataset

if TYPE_CHECKING:
    from sqlalchemy import Connection

Keys = Callable[[int], Sequence[Any]]
RANGE_RECORDS_MIN = 8


@dataclass(frozen=True)
class Partitions:
    """Record `n` is row `n % rows` of partition `n // rows`, in the order of keys."""

    starts: tuple[Any, ...]
    """The first key of each."""
    last: Any
    """The last key of all."""
    rows: int
    records: int

    def size(self, partition: int) -> int:
        return min(self.rows, self.records - partition * self.rows)

    def stop(self, partition: int) -> Any | None:
        """The key at which the next one begins; None of the last."""
        return self.starts[partition + 1] if partition + 1 < len(self.starts) else None

    def is_dense(self, partition: int) -> bool:
        """Whether its keys are consecutive integers, so that none need to be asked for."""
        start, stop = self.starts[partition], self.stop(partition)
        if stop is None and isinstance(self.last, int):
            stop = self.last + 1
        if not isinstance(start, int) or not isinstance(stop, int):
            return False
        return stop - start == self.size(partition)

    def firsts(self) -> I64:
        return np.arange(len(self.starts), dtype=np.int64) * self.rows

    def fingerprint(self, *names: str) -> str:
        digest = hashlib.sha256("\0".join(names).encode())
        digest.update(repr((self.starts, self.last, self.rows, self.records)).encode())
        return digest.hexdigest()[:16]


def find_partitions(
    connection: Connection, selection: Selection, rows: int, *, is_unique: bool
) -> Partitions:
    """Go along the key, from each boundary to the next: one pass over its index, and one key back for each.

    Raises EmptyDataset; ConfigError for a key that is missing or doubled somewhere.
    """
    missing, doubled = connection.execute(selection.flaws(is_unique=is_unique)).one()
    if missing or doubled:
        what = f"{missing} rows have none" if missing else f"{doubled} rows have one that another row has"
        raise ConfigError(f"the key {selection.key.name!r} does not name every row: {what}")
    found = connection.execute(selection.at(None, 0)).first()
    if found is None:
        raise EmptyDataset("there are no rows in what was asked of the database")
    starts = []
    while found is not None:
        starts.append(found[0])
        found = connection.execute(selection.at(starts[-1], rows)).first()
    count, last = connection.execute(selection.tail(starts[-1])).one()
    return Partitions(tuple(starts), last, rows, (len(starts) - 1) * rows + count)


@dataclass(frozen=True)
class Span:
    """Rows that are asked for by the range of their keys; `keys` are all that must come back."""

    keys: Sequence[Any]


@dataclass(frozen=True)
class Plan:
    """How some records are read: ranges of keys, and single keys."""

    spans: tuple[Span, ...]
    singles: tuple[Any, ...]
    key_of: dict[int, Any]
    """The key of each record."""


def plan_reads(partitions: Partitions, numbers: I64, keys_of: Keys) -> Plan:
    """A range of keys where at least every second row of it is wanted, else single keys."""
    spans: list[Span] = []
    singles: list[Any] = []
    key_of: dict[int, Any] = {}
    unique = np.unique(numbers)
    owners = unique // partitions.rows
    for wanted in np.split(unique, np.flatnonzero(np.diff(owners)) + 1) if len(unique) else []:
        partition = int(wanted[0]) // partitions.rows
        offsets = (wanted - partition * partitions.rows).tolist()
        keys = keys_of(partition)
        key_of.update((number, keys[offset]) for number, offset in zip(wanted.tolist(), offsets, strict=True))
        low, high = offsets[0], offsets[-1] + 1
        if len(offsets) >= RANGE_RECORDS_MIN and 2 * len(offsets) >= high - low:
            spans.append(Span(keys[low:high]))
        else:
            singles += [keys[offset] for offset in offsets]
    return Plan(tuple(spans), tuple(singles), key_of)
