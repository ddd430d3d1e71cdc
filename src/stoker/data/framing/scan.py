"""What a search for records asks for and finds. It is told bytes; it reads none."""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RECORD_BYTES_MAX = 2**32 - 1
"""A record's size is kept in four bytes."""
_AHEAD_FIRST = 64 * 1024
_AHEAD_MIN = 16 * 1024
_AHEAD_MAX = 4 * 1024 * 1024
_NEAR = 256 * 1024


class Malformed(ValueError):
    """Bytes that are not what the format says. `offset`: where, in what was given to be parsed."""

    def __init__(self, why: str, offset: int = 0) -> None:
        super().__init__(why)
        self.offset = offset


class Compressed(ValueError):
    """The object is compressed as a whole: no part of it can be read alone."""


class Want(NamedTuple):
    """What is to be read next: from an offset on, at least so many bytes, or to the object's end."""

    start: int
    size_bytes: int


Scan = Generator[Want, bytes, str]
"""Asks for bytes, and is sent what begins where it asked, as much as the other side likes, but not less. Puts what it
finds into Spans. Returns what all records of the object have in common (the header of a CSV file), or nothing.
Raises Malformed, with the offset in the object, where it cannot go on; what it found before stands."""


class Spans:
    """Where records begin and end in one object."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._stops = array("q")

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, stop: int) -> None:
        """One more record, at bytes `[start, stop)`. Raises Malformed for one that is too large."""
        if stop - start > RECORD_BYTES_MAX:
            raise Malformed(f"a record of {stop - start} bytes is larger than 4 GiB", start)
        self._starts.append(start)
        self._stops.append(stop)

    def extend(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> None:
        """More records, none of them too large."""
        self._starts.frombytes(starts.astype(np.int64).tobytes())
        self._stops.frombytes(stops.astype(np.int64).tobytes())

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        return np.array(self._starts, dtype=np.int64)

    @property
    def stops(self) -> npt.NDArray[np.int64]:
        return np.array(self._stops, dtype=np.int64)


class ReadAhead:
    """How much to read where something is wanted: more and more while what is wanted lies close together, little where
    records are so long that most of it would be thrown away."""

    def __init__(self) -> None:
        self._ahead = _AHEAD_FIRST
        self._end = 0

    def stop(self, want: Want, size_bytes: int) -> int:
        """To where to read, in an object of `size_bytes`."""
        if want.start - self._end > _NEAR:
            self._ahead = max(_AHEAD_MIN, self._ahead // 2)
        elif self._end:
            self._ahead = min(_AHEAD_MAX, self._ahead * 2)
        self._end = min(size_bytes, want.start + max(self._ahead, want.size_bytes))
        return self._end
