"""Where the records of a dataset are: columns of numbers, and texts in one piece, so that a million take little.

What was saved is mapped into memory, so that all processes of a node share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from stoker.data.index_file import BadIndexFile, open_columns, save_columns
from stoker.errors import DatasetChanged

_U32_MAX = 2**32 - 1
_AT_ONCE = 16_384
"""So many texts are Python's at once."""


class StringTable(Sequence[str]):
    """Texts without NUL, each followed by one, in one piece; and where each ends."""

    def __init__(self, blob: npt.NDArray[np.uint8], ends: npt.NDArray[Any]) -> None:
        self.blob = blob
        self.ends = ends
        self._view = blob.data

    @classmethod
    def of(cls, texts: Iterable[str]) -> StringTable:
        """A table of these; they are not kept."""
        rest = iter(texts)
        return cls.joined([_packed(some) for some in iter(lambda: list(islice(rest, _AT_ONCE)), [])])

    @classmethod
    def joined(cls, tables: Sequence[StringTable]) -> StringTable:
        """The texts of several tables, one after the other."""
        if len(tables) == 1:
            return tables[0]
        blob = np.concatenate([np.empty(0, np.uint8), *(table.blob for table in tables)])
        kind = np.uint32 if len(blob) <= _U32_MAX else np.int64
        ends, first, start = np.empty(sum(map(len, tables)), kind), 0, 0
        for table in tables:
            ends[first : first + len(table)] = table.ends + kind(start)
            first, start = first + len(table), start + len(table.blob)
        return cls(blob, ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step == 1:
                return list(self._texts(start, stop))
            return [self[at] for at in range(start, stop, step)]
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} texts, none is number {place}")
        start = int(self.ends[place - 1]) if place else 0
        return str(self._view[start : int(self.ends[place]) - 1], "utf-8")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _AT_ONCE):
            yield from self._texts(first, min(len(self), first + _AT_ONCE))

    def _texts(self, first: int, stop: int) -> Iterator[str]:
        start = int(self.ends[first - 1]) if first else 0
        for end in self.ends[first:stop].tolist():
            yield str(self._view[start : end - 1], "utf-8")
            start = end

    def some(self, places: Sequence[int]) -> StringTable:
        """A table of some of them; itself if those are all, in their order."""
        wanted = np.asarray(places, np.int64)
        if len(wanted) == len(self) and bool((wanted == np.arange(len(self))).all()):
            return self
        return StringTable.joined(
            [self._copied(wanted[first : first + _AT_ONCE]) for first in range(0, len(wanted), _AT_ONCE)]
        )

    def _copied(self, places: npt.NDArray[np.int64]) -> StringTable:
        starts = np.where(places > 0, self.ends[np.maximum(places - 1, 0)], 0).astype(np.int64)
        sizes = self.ends[places].astype(np.int64) - starts
        ends = np.cumsum(sizes)
        at = np.arange(int(sizes.sum())) + np.repeat(starts - (ends - sizes), sizes)
        return StringTable(self.blob[at], ends.astype(np.uint32))

    def __reduce__(self) -> tuple[Any, ...]:
        return StringTable, (np.array(self.blob), np.array(self.ends))


def _packed(texts: list[str]) -> StringTable:
    """A table of a few."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([len(text) + 1 for text in encoded], dtype=np.uint32)
    return StringTable(np.frombuffer(b"\0".join([*encoded, b""]), np.uint8), ends)


class Listing(NamedTuple):
    """The objects of a dataset, sorted by key."""

    keys: StringTable
    versions: StringTable
    sizes: npt.NDArray[np.int64]


class Damage(NamedTuple):
    """An object that no record could be found in from a byte on: what is behind that is not in the index."""

    object: int
    offset: int
    why: str


class Columns(NamedTuple):
    """The records, in order: bytes `[start, start + size)` of an object."""

    objects: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint32]


class RecordIndex:
    """Which objects there are, and where in them which record is.

    `commons`: what all records of an object have in common (the header of a CSV file), each said once;
    `common_of`: which of them is that of each object.
    """

    def __init__(
        self,
        listing: Listing,
        columns: Columns,
        commons: Sequence[str],
        common_of: npt.NDArray[np.uint32],
        damage: Sequence[Damage],
        fingerprint: str = "",
    ) -> None:
        self.listing = listing
        self.columns = columns
        self.commons = list(commons)
        self.common_of = common_of
        self.damage = list(damage)
        self.fingerprint = fingerprint or self._digest()
        self.path: Path | None = None
        """The file that it is mapped from."""

    def __len__(self) -> int:
        return len(self.columns.starts)

    @property
    def size_bytes(self) -> int:
        """What all of it takes, in memory or in its file."""
        listing = self.listing
        parts = (*self.columns, self.common_of, listing.sizes)
        tables = (listing.keys, listing.versions)
        return sum(part.nbytes for part in parts) + sum(t.blob.nbytes + t.ends.nbytes for t in tables)

    def common(self, number: int) -> str:
        """What the records of an object have in common."""
        return self.commons[int(self.common_of[number])]

    def save(self, path: Path) -> RecordIndex:
        """Write it to a file, which is there as a whole or not at all, and return it as mapped from there. Raises
        OSError."""
        listing = self.listing
        said = {
            "commons": self.commons,
            "damage": [list(damage) for damage in self.damage],
            "fingerprint": self.fingerprint,
        }
        arrays: dict[str, npt.NDArray[Any]] = {
            "keys": listing.keys.blob,
            "key_ends": listing.keys.ends,
            "versions": listing.versions.blob,
            "version_ends": listing.versions.ends,
            "object_sizes": listing.sizes,
            "common_of": self.common_of,
            **self.columns._asdict(),
        }
        save_columns(path, said, arrays)
        return RecordIndex.open(path)

    @classmethod
    def open(cls, path: Path) -> RecordIndex:
        """What was saved. Raises OSError, BadIndexFile."""
        said, arrays = open_columns(path)
        try:
            listing = Listing(
                StringTable(arrays["keys"], arrays["key_ends"]),
                StringTable(arrays["versions"], arrays["version_ends"]),
                arrays["object_sizes"],
            )
            index = cls(
                listing,
                Columns(arrays["objects"], arrays["starts"], arrays["sizes"]),
                said["commons"],
                arrays["common_of"],
                [Damage(*damage) for damage in said["damage"]],
                said["fingerprint"],
            )
        except (KeyError, TypeError) as error:
            raise BadIndexFile(f"{path} lacks {error}") from None
        index.path = path
        return index

    def _digest(self) -> str:
        digest = hashlib.sha256(self.listing.keys.blob.tobytes())
        for column in self.columns:
            digest.update(np.ascontiguousarray(column).data.cast("B") if len(column) else b"")
        for damage in self.damage:
            digest.update(repr(tuple(damage)).encode())
        return digest.hexdigest()[:16]

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:
            return _reopened, (self.path,)
        return RecordIndex, (
            self.listing, self.columns, self.commons, self.common_of, self.damage, self.fingerprint
        )  # fmt: skip


def _reopened(path: Path) -> RecordIndex:
    try:
        return RecordIndex.open(path)
    except (OSError, BadIndexFile) as error:
        raise DatasetChanged(
            f"the index of the dataset that this process was handed is not there any more ({error}): the data has "
            "changed, or the cache's folder was cleared; start the run again"
        ) from None
