"""Formats whose records are ranges of bytes of objects: what they have in common."""

from __future__ import annotations

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
from stoker.data.versions import Versions, changed
from stoker.errors import BadRecord, ConfigError, ObjectChanged, ObjectNotFound

COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4", ".z")


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
        self._versions = Versions(source, index.listing)

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
        self._versions.confirm(objects)
        places = list(zip(objects, reads.starts.tolist(), reads.stops.tolist(), strict=True))
        keys = {number: self.keys[number] for number in set(objects)}
        wanted = [ByteRange(keys[number], start, stop) for number, start, stop in places if stop > start]
        try:
            bodies = iter(self._source.client.read_ranges(self._source.bucket, wanted))
        except (ObjectChanged, ObjectNotFound) as error:
            raise changed(self._source.url, " or ".join(sorted(set(keys.values()))[:3])) from error
        found: list[Any | BadRecord] = []
        for record, (number, start, stop) in zip(numbers, places, strict=True):
            body = next(bodies) if stop > start else b""
            try:
                if len(body) != stop - start:
                    raise Malformed(f"only {len(body)} bytes of it are there")
                found.append(self.format.sample(body, self.index.common(number)))
            except Malformed as error:
                self._versions.confirm_now(number)
                found.append(self._bad(record, keys[number], start, stop, error))
        return found

    def _bad(self, record: int, key: str, start: int, stop: int, error: Malformed) -> BadRecord:
        return BadRecord(
            f"record {record} of {self._source.url!r} (bytes {start} to {stop} of {key!r}) is damaged: {error} "
            f"(at byte {start + error.offset})"
        )
