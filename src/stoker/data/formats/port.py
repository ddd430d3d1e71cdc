"""What a record format gives: records by number, and which bytes each is read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stoker.errors import BadRecord


class Reads(NamedTuple):
    """What some records are read from, in their order: record `i` from bytes `[starts[i], stops[i])` of the object
    `keys[objects[i]]` of a bucket."""

    keys: Sequence[str]
    """Of all objects of the dataset; never copied."""
    objects: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


class Records(Protocol):
    """The records of one dataset, numbered from 0. Pickled, it can be read in any process."""

    @property
    def fingerprint(self) -> str:
        """Changes when the set of records does, or their order."""

    def __len__(self) -> int: ...

    def read(self, numbers: Sequence[int]) -> list[Any | BadRecord]:
        """Samples in the order of `numbers`, or what is wrong with single ones. Raises CacheError, OriginError."""

    def reads(self, numbers: npt.NDArray[np.int64]) -> Reads | None:
        """Which bytes those records are read from; None if they do not come through the cache."""
