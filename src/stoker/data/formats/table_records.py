"""Records that are the rows of tables in objects, whatever the kind of file (`Layout`)."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from stoker.base.ranges import ByteRange
from stoker.base.units import format_bytes
from stoker.data.attach import Served
from stoker.data.formats.port import Reads
from stoker.data.formats.source import Source
from stoker.data.formats.table_held import Held
from stoker.data.formats.table_index import I64, Place, Scanned, TableIndex, Wanted, build_index
from stoker.data.formats.table_objects import (
    THREADS,
    Objects,
    SpanFile,
    check_limits,
    choose,
    in_turn,
)
from stoker.data.formats.table_rows import Sample, damage, rows_of, samples_of
from stoker.errors import BadRecord, ConfigError, DataError, DatasetChanged, EmptyDataset
from stoker.wire.cache_api import ObjectInfo

log = logging.getLogger("stoker.data")
HELD_BYTES = 256 * 1024 * 1024
INDEX_THREADS, INDEX_TRIES = 8, 3
REQUEST_BYTES = 4 * 1024 * 1024
"""Groups are asked for together up to here."""
_FAILURE_BYTES = 1024


class Unreadable(NamedTuple):
    """Why a group cannot be decoded."""

    reason: str


class Decoded(NamedTuple):
    """A group as a table of Arrow, and how much memory it takes."""

    table: Any
    size_bytes: int


class Head(NamedTuple):
    """What is known of an object while its groups are decoded, and about how much memory it takes."""

    content: Any
    size_bytes: int


class Layout(Protocol):
    """How one kind of file holds tables. Bytes come from `objects`; pyarrow's errors are let through."""

    suffixes: Sequence[str]

    def list_objects(self, objects: Objects, listed: Sequence[ObjectInfo]) -> list[ObjectInfo] | None:
        """The objects to read, in order, where a file among them names them; else None."""

    def scan(self, objects: Objects, info: ObjectInfo, columns: Sequence[str] | None) -> Scanned:
        """What is in an object. Raises DataError for one that is no such file, or is damaged or cut off."""

    def head(self, spans: Sequence[ByteRange], parts: Sequence[bytes]) -> Head:
        """From the bytes of the `heads` that `scan` named."""

    def decode(self, head: Head, place: Place, columns: Sequence[str], file: SpanFile) -> Any:
        """A table of the group, with those columns in that order."""


class TableRecords:
    """Rows of tables, numbered in the order of the objects' keys. Nothing is read before it is needed.

    `columns`: only these, in this order. `held_bytes`: how much decoded rows each process keeps for the next batches.
    `suffixes`: other endings of names. Works in forked and spawned DataLoader workers; pickled, the index travels.

    The first use may raise EmptyDataset; ConfigError for an unknown column; DataError for an object that is damaged as
    a whole. Every use may raise DatasetChanged, for an object that was replaced after it was indexed, and CacheError.
    """

    def __init__(
        self,
        served: Served | Source,
        layout: Layout,
        *,
        columns: Sequence[str] | None = None,
        held_bytes: int = HELD_BYTES,
        suffixes: Sequence[str] | None = None,
    ) -> None:
        check_limits(held_bytes, columns)
        self._objects = Objects(served)
        self._layout = layout
        self._wanted_columns = None if columns is None else tuple(columns)
        self._suffixes = tuple(layout.suffixes if suffixes is None else suffixes)
        self._held: Held[Any] = Held(held_bytes)
        self._in_use = 0
        self._known: TableIndex | None = None

    @property
    def fingerprint(self) -> str:
        """Changes when the set of records does, or their order."""
        return self._index.fingerprint()

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the objects that have records."""
        return self._index.keys

    @property
    def objects(self) -> tuple[ObjectInfo, ...]:
        """Those objects, as they were when they were indexed."""
        return self._index.objects

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of each sample."""
        return self._wanted_columns or self._index.columns

    @property
    def features(self) -> dict[str, Any]:
        """The columns as Hugging Face `datasets` describes them (names of classes, shapes); empty where it does not."""
        return self._index.features

    def __len__(self) -> int:
        return self._index.records

    def groups(self) -> I64:
        """The number of the first record of each group of rows that are decoded together, ascending from 0."""
        return self._index.firsts

    def expect_groups(self, in_use: int) -> None:
        """Records of so many groups will be read in turn: it is said where they cannot all be kept."""
        self._in_use = min(in_use, len(self._index.firsts))
        self._held.expect(self._in_use)

    def reads(self, numbers: I64) -> Reads:
        """Which bytes those records are read from: those of their groups. Raises IndexError."""
        return self._index.reads(numbers)

    def read(self, numbers: Sequence[int]) -> list[Sample | BadRecord]:
        """Rows as dicts, in the order of `numbers`; BadRecord in place of one that cannot be decoded.

        Raises IndexError, DatasetChanged, CacheError, OriginError.
        """
        samples: list[Any] = [None] * len(numbers)
        parts: list[tuple[Wanted, Any]] = []
        used_bytes = 0
        for wanted, group in self._groups(numbers):
            if isinstance(group, Unreadable):
                self._fill(samples, [wanted], [group.reason] * len(wanted.positions))
                continue
            # Rows of several groups are made samples together, as that costs about as much as those of one. But who has
            # a part of a group has all of it in memory.
            is_like = not parts or group.table.schema.equals(parts[-1][1].schema)
            if not is_like or used_bytes > self._held.limit_bytes:
                self._convert(samples, parts)
                parts, used_bytes = [], 0
            parts.append((wanted, rows_of(group.table, wanted.offsets)))
            used_bytes += group.size_bytes
        self._convert(samples, parts)
        return samples

    def read_table(self, numbers: Sequence[int]) -> Any:
        """Those rows as one `pyarrow.Table`, in the order of `numbers`.

        Raises as `read`, and BadRecord if one cannot be decoded.
        """
        import pyarrow as pa

        parts, positions = [], []
        for wanted, group in self._groups(numbers):
            if isinstance(group, Unreadable):
                raise BadRecord(
                    _named(
                        self._index, self._objects.where, wanted.group, int(wanted.offsets[0]), group.reason
                    )
                )
            parts.append(rows_of(group.table, wanted.offsets))
            positions.append(wanted.positions)
        if not parts:
            raise ValueError("no records are asked for")
        order = np.argsort(np.concatenate(positions))
        whole = parts[0]
        if len(parts) > 1:
            # Files of one dataset may differ in types: where all values are missing, or numbers are smaller.
            whole = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
        return whole if (np.diff(order) == 1).all() else whole.take(order)

    def _convert(self, samples: list[Any], parts: Sequence[tuple[Wanted, Any]]) -> None:
        """Put the rows of some groups where they belong."""
        import pyarrow as pa

        if not parts:
            return
        whole = parts[0][1] if len(parts) == 1 else pa.concat_tables([rows for _, rows in parts])
        self._fill(samples, [wanted for wanted, _ in parts], samples_of(whole, self.features))

    def _fill(self, samples: list[Any], groups: Sequence[Wanted], found: Iterable[Any]) -> None:
        coming = iter(found)
        for wanted in groups:
            for position, offset in zip(wanted.positions.tolist(), wanted.offsets.tolist(), strict=True):
                sample = next(coming)
                if not isinstance(sample, dict):
                    reason = _named(self._index, self._objects.where, wanted.group, offset, str(sample))
                    sample = BadRecord(reason)
                samples[position] = sample

    def _groups(self, numbers: Sequence[int]) -> Iterator[tuple[Wanted, Decoded | Unreadable]]:
        """The groups of those records, each read once: those that are held first, before others take their place."""
        index = self._index
        missing = []
        for wanted in index.split(numbers):
            group = self._held.get(wanted.group)
            if group is None:
                missing.append(wanted)
            else:
                yield wanted, group
        # Groups of one object are read at once, and its head by the first of them.
        turns = {int(index.owners[wanted.group]): threading.Lock() for wanted in missing}
        requests = index.cut([wanted.group for wanted in missing], THREADS, REQUEST_BYTES)
        loaded = in_turn(lambda groups: self._load(index, groups, turns), requests)
        yield from zip(missing, itertools.chain.from_iterable(loaded), strict=True)

    def _load(
        self, index: TableIndex, groups: Sequence[int], turns: Mapping[int, threading.Lock]
    ) -> list[Decoded | Unreadable]:
        """Those groups, with one request."""
        owners = index.owners[groups].tolist()
        places = [index.place(group) for group in groups]
        asked = [(index.objects[owner], place.spans) for owner, place in zip(owners, places, strict=True)]
        came = self._objects.read_parts(asked)
        loaded: list[Decoded | Unreadable] = []
        for group, owner, place, parts in zip(groups, owners, places, came, strict=True):
            loaded.append(self._decoded(index, group, place, parts, turns[owner]))
        return loaded

    def _decoded(
        self, index: TableIndex, group: int, place: Place, parts: Sequence[bytes], turn: threading.Lock
    ) -> Decoded | Unreadable:
        owner = int(index.owners[group])
        info, columns = index.objects[owner], self.columns
        try:
            with turn:
                head = self._head(index, owner)
            named = [(span.start, part) for span, part in zip(place.spans, parts, strict=True)]
            file = SpanFile(info.size_bytes, named, lambda low, high: self._objects.read(info, low, high))
            table = self._layout.decode(head, place, columns, file)
            if table.num_rows != index.rows[group]:
                raise ValueError(f"there are {table.num_rows} rows in place of {index.rows[group]}")
        except damage() as error:
            log.warning("group %d of %r cannot be decoded: %s", place.within, info.key, error)
            failed = Unreadable(f"{type(error).__name__}: {error}")
            self._held.put(group, failed, _FAILURE_BYTES)
            return failed
        # Parts of what was read may be in use without a copy: then all of it stays.
        size_bytes = max(int(table.get_total_buffer_size()), sum(map(len, parts)) if len(parts) == 1 else 0)
        decoded = Decoded(table, size_bytes)
        self._held.put(group, decoded, size_bytes)
        if self._held.is_crowded(size_bytes):
            log.warning("%s", _crowded(self._in_use, size_bytes, self._held.limit_bytes))
        return decoded

    def _head(self, index: TableIndex, owner: int) -> Head:
        known: Head | None = self._held.get(("head", owner))
        if known is None:
            spans = index.heads[owner]
            known = self._layout.head(spans, self._objects.read_spans(index.objects[owner], spans))
            self._held.put(("head", owner), known, known.size_bytes)
        return known

    @property
    def _index(self) -> TableIndex:
        for attempt in range(1, INDEX_TRIES + 1):
            if self._known is not None:
                break
            try:
                self._known = self._build()
            except DatasetChanged as error:
                # The list of objects is older than they are: by now the next one is new.
                if attempt == INDEX_TRIES:
                    raise
                log.info("%r is not what its list says: %s", self._objects.where, error)
        assert self._known is not None
        return self._known

    def _build(self) -> TableIndex:
        objects, layout, columns = self._objects, self._layout, self._wanted_columns
        listed = objects.listed()
        chosen = layout.list_objects(objects, listed)
        if chosen is None:
            chosen = choose(objects, listed, self._suffixes)
        coming = in_turn(lambda info: layout.scan(objects, info, columns), chosen, INDEX_THREADS)
        scanned = list(objects.watched(chosen, coming))
        for info, found in zip(chosen, scanned, strict=True):
            _check_columns(chosen[0], scanned[0], info, found, columns)
        index = build_index(chosen, scanned)
        if not index.records:
            raise EmptyDataset(f"the {len(chosen)} objects under {objects.where!r} have no rows")
        return index


def _named(index: TableIndex, where: str, group: int, offset: int, reason: str) -> str:
    info = index.objects[int(index.owners[group])]
    return (
        f"record {int(index.firsts[group]) + offset} (row {offset} of group {int(index.within[group])} of "
        f"{info.key!r} of {where!r}) cannot be decoded: {reason}"
    )


def _crowded(in_use: int, size_bytes: int, limit_bytes: int) -> str:
    fits = max(1, limit_bytes // size_bytes)
    return (
        f"{in_use} groups of rows are mixed at a time, of which held_bytes={limit_bytes} has room for about {fits} "
        f"decoded, so that each is decoded many times: make shuffle_window smaller, or give the dataset "
        f"held_bytes={in_use * size_bytes} ({format_bytes(in_use * size_bytes)} in each process that reads)"
    )


def _check_columns(
    first: ObjectInfo, expected: Scanned, info: ObjectInfo, found: Scanned, columns: Sequence[str] | None
) -> None:
    if len(set(found.columns)) < len(found.columns):
        raise DataError(
            f"{info.key!r} has several columns of one name: {', '.join(map(repr, found.columns))}"
        )
    for name in columns or ():
        if name not in found.columns:
            raise ConfigError(
                f"there is no column {name!r} in {info.key!r}: it has {', '.join(map(repr, found.columns))}"
            )
    if columns is None and sorted(found.columns) != sorted(expected.columns):
        odd = sorted(set(found.columns) ^ set(expected.columns))
        raise DataError(
            f"{info.key!r} has other columns than {first.key!r} ({', '.join(map(repr, odd))}): name those that all "
            "objects have with columns=[…], or keep the others under another prefix"
        )


def needs_pyarrow(what: str, extra: str = "parquet") -> None:
    """Raises ConfigError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{what} need pyarrow, which is not installed: pip install 'stoker[{extra}]'"
        ) from error
