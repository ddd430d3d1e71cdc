"""Names of objects by number, in little memory. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


class Catalog:
    """Objects of one bucket: their keys and ids. Grows at its end, and is never changed."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []
        self._stops: list[npt.NDArray[np.int64]] = []
        self._firsts: list[int] = []
        self._count = 0
        self._ids: U64 = np.empty(0, dtype=np.uint64)
        """With room at its end: copied once for each time that it doubles."""

    def __len__(self) -> int:
        return self._count

    def extend(self, keys: Sequence[str], ids: U64) -> None:
        """The next keys, with their ids."""
        encoded = [key.encode() for key in keys]
        self._firsts.append(len(self))
        self._texts.append(b"".join(encoded))
        self._stops.append(np.cumsum([len(key) for key in encoded]))
        if self._count + len(ids) > len(self._ids):
            grown = np.empty(max(2 * len(self._ids), self._count + len(ids)), dtype=np.uint64)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        self._ids[self._count : self._count + len(ids)] = ids
        self._count += len(ids)

    def ids(self, numbers: npt.NDArray[np.int64]) -> U64:
        """The ids of objects. Raises IndexError for one that is not known."""
        return self._ids[: self._count][numbers]

    def key(self, number: int) -> str:
        """Raises IndexError."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = bisect_right(self._firsts, number) - 1
        at = number - self._firsts[part]
        stops = self._stops[part]
        start = int(stops[at - 1]) if at else 0
        return self._texts[part][start : int(stops[at])].decode()
