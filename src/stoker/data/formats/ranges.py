"""Formats whose records are ranges of bytes of objects: what they have in common."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from stoker.cache.client.client import ByteRange
from stoker.data.formats.port import Reads
from stoker.data.formats.source import Source
from stoker.data.framing.scan import Malformed, Scan, Spans
from stoker.data.index_build import Part, Selected, opened_index
from stoker.data.record_index import Listing, RecordIndex, StringTable
from stoker.errors import (
    BadRecord,
    ConfigError,
    DatasetChanged,
    ObjectChanged,
    ObjectNotFound,
    StokerError,
)

COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4", ".z")

GROUP_BYTES = 64 * 1024 * 1024
"""Objects that are larger are several groups, so that a few groups are little beside a cache."""
_LOOKED_AT = 1 << 20


class RangeFormat(ABC):
    """A format of which an index is built. Subclasses are frozen dataclasses whose fields are the options."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    @property
    def options(self) -> dict[str, Any]:
        """All that changes where records are found."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    def open(self, source: Source) -> RangeRecords:
        """The records under a URL; the index is built if there is none. Raises EmptyDataset, ConfigError,
        CacheError."""
        return RangeRecords(source, self, opened_index(source, self))

    def select(self, url: str, listing: Listing, read: Callable[[int], bytes]) -> Selected:
        """The objects that have records: those with the format's suffixes; where there are none, all."""
        numbers, compressed = [], []
        for number, key in enumerate(listing.keys):
            name = key.lower()
            if name.endswith(self.suffixes):
                numbers.append(number)
            elif name.endswith(COMPRESSED):
                compressed.append(key)
        for key in compressed:
            stem = key.lower().replace(".tgz", ".tar.gz").rpartition(".")[0]
            if not numbers or stem.endswith(self.suffixes):
                raise ConfigError(
                    f"{key!r} of {url!r} is compressed as a whole, so that its records cannot be read at random: "
                    "decompress it at the origin, or pack its records anew without compression"
                )
        return Selected([Part(number) for number in numbers or range(len(listing.keys))])

    @abstractmethod
    def scan(self, size_bytes: int, part: Part, spans: Spans) -> Scan:
        """Find the records of one object."""

    @abstractmethod
    def sample(self, record: bytes, common: str) -> Any:
        """What a record's bytes are. Raises Malformed."""


class RangeRecords:
    """The records of an index."""

    def __init__(self, source: Source, form: RangeFormat, index: RecordIndex) -> None:
        self.format = form
        self.index = index
        self._source = source

    @property
    def fingerprint(self) -> str:
        """Changes when the set of records does, or their order."""
        return self.index.fingerprint

    @property
    def keys(self) -> StringTable:
        """Of the objects that have records."""
        return self.index.listing.keys

    @property
    def damage(self) -> list[BadRecord]:
        """Where records could not be found."""
        return [
            BadRecord(
                f"object {self.keys[one.object]!r} of {self._source.url!r} cannot be read from byte {one.offset} on: "
                f"{one.why}"
            )
            for one in self.index.damage
        ]

    def __len__(self) -> int:
        return len(self.index)

    def groups(self) -> npt.NDArray[np.int64]:
        """The number of the first record of each object, ascending from 0; of a large object, of each part of it."""
        return self._groups

    def reads(self, numbers: npt.NDArray[np.int64]) -> Reads:
        """Which bytes those records are read from."""
        columns = self.index.columns
        starts = np.asarray(columns.starts[numbers])
        stops = starts + columns.sizes[numbers]
        return Reads(self.keys, columns.objects[numbers].astype(np.int64), starts, stops)

    def read(self, numbers: Sequence[int]) -> list[Any | BadRecord]:
        """Samples in the order of `numbers`. Raises DatasetChanged, CacheError."""
        reads = self.reads(np.asarray(numbers, np.int64))
        objects = reads.objects.tolist()
        listing = self.index.listing
        indexed = {
            number: (listing.keys[number], listing.versions[number] or None) for number in set(objects)
        }
        wanted = []
        for number, start, stop in zip(objects, reads.starts.tolist(), reads.stops.tolist(), strict=True):
            key, version = indexed[number]
            wanted.append(ByteRange(key, start, stop, version))
        # Ranges of another version would be read without an error, but be no records.
        bodies = self._source.client.read_ranges(self._source.bucket, wanted, errors="return")
        found: list[Any | BadRecord] = []
        for record, number, part, body in zip(numbers, objects, wanted, bodies, strict=True):
            if isinstance(body, ObjectChanged | ObjectNotFound):
                self._source.refresh()  # or the next start would be given the same old list
                raise DatasetChanged(self._changed(part.key)) from body
            if isinstance(body, StokerError):
                raise body
            try:
                if len(body) != part.stop - part.start:
                    raise Malformed(f"only {len(body)} bytes of it are there")
                found.append(self.format.sample(body, self.index.common(number)))
            except Malformed as error:
                found.append(self._bad(record, part, error))
        return found

    @functools.cached_property
    def _groups(self) -> npt.NDArray[np.int64]:
        columns, found = self.index.columns, [np.zeros(min(1, len(self)), np.int64)]
        for low in range(0, len(self), _LOOKED_AT):
            some = slice(max(0, low - 1), low + _LOOKED_AT)
            parts = columns.starts[some] // GROUP_BYTES
            is_first = (np.diff(columns.objects[some]) != 0) | (np.diff(parts) != 0)
            found.append(np.flatnonzero(is_first) + some.start + 1)
        return np.concatenate(found)

    def _changed(self, key: str) -> str:
        return (
            f"{key!r} of {self._source.url!r} was changed or removed after the records in it were found: put back what "
            "was there, or start the run again, which finds the records anew"
        )

    def _bad(self, record: int, part: ByteRange, error: Malformed) -> BadRecord:
        return BadRecord(
            f"record {record} of {self._source.url!r} (bytes {part.start} to {part.stop} of {part.key!r}) is damaged: "
            f"{error} (at byte {part.start + error.offset})"
        )
