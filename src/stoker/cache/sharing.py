"""Which of the reads that are announced to one server of a fleet are of what which member owns. Pure.

Whoever owns a block keeps it for the whole fleet, and has to know when it is read next, by whomever. Whole objects are
taken to be of one block; what may be of several is announced by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.cache.maglev import Placement, block_owner_name

I64 = npt.NDArray[np.int64]
I16 = npt.NDArray[np.int16]
U64 = npt.NDArray[np.uint64]
_NOBODY = -1


class Share(NamedTuple):
    """The reads of one owner: which of those that were divided, by place, and the number of each one's object in the
    owner's catalog."""

    places: I64
    numbers: I64


class Sharing:
    """The objects of one catalog, by owner. `copies`: how many members own each. With `by_block`, what is read is of
    objects of many blocks, and every member's catalog is the whole one."""

    def __init__(
        self, placement: Placement, bucket: str, copies: int, block_size_bytes: int, *, by_block: bool
    ) -> None:
        self.members = tuple(member.name for member in placement.members if member.weight)
        self.by_block = by_block
        self._at = {name: place for place, name in enumerate(self.members)}
        self._placement = placement
        self._bucket = bucket
        self._copies = max(1, min(copies, len(self.members)))
        self._block_size_bytes = block_size_bytes
        self._owners: list[I16] = []
        self._owned: dict[str, list[I64]] = {name: [] for name in self.members}
        self._known = 0

    def __len__(self) -> int:
        return self._known

    def learn(self, keys: Sequence[str]) -> None:
        """The next objects of the catalog."""
        first, self._known = self._known, self._known + len(keys)
        if self.by_block:
            return
        owners = self._owners_of([block_owner_name(self._bucket, key, 0) for key in keys])
        self._owners.append(owners)
        for place, name in enumerate(self.members):
            mine = np.flatnonzero((owners == place).any(axis=1))
            if len(mine):
                self._owned[name].append(mine + first)

    def catalog(self, name: str) -> I64 | range:
        """The numbers of the objects that a member's catalog has, in its order."""
        if self.by_block:
            return range(self._known)
        parts = self._owned[name]
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0] if parts else np.empty(0, dtype=np.int64)

    def divide(self, numbers: I64, spans: U64 | None, key: Callable[[int], str]) -> dict[str, Share]:
        """Reads of objects that are known, by owner; `key` says what the object of a number is called."""
        if self.by_block:
            return self._divide_blocks(numbers, spans, key)
        if len(self._owners) > 1:
            self._owners = [np.concatenate(self._owners)]
        owners = self._owners[0][numbers] if self._owners else np.empty((0, self._copies), np.int16)
        found: dict[str, Share] = {}
        for place, name in enumerate(self.members):
            places = np.flatnonzero((owners == place).any(axis=1))
            if len(places):
                found[name] = Share(places, np.searchsorted(self.catalog(name), numbers[places]))
        return found

    def _divide_blocks(self, numbers: I64, spans: U64 | None, key: Callable[[int], str]) -> dict[str, Share]:
        size = np.uint64(self._block_size_bytes)
        first = last = np.zeros(len(numbers), dtype=np.int64)
        if spans is not None:
            first = (spans[:, 0] // size).astype(np.int64)
            last = ((np.maximum(spans[:, 1], spans[:, 0] + np.uint64(1)) - np.uint64(1)) // size).astype(
                np.int64
            )
        counts = last - first + 1
        reads = np.repeat(np.arange(len(numbers)), counts)
        offsets = np.arange(len(reads)) - np.repeat(np.cumsum(counts) - counts, counts)
        touched = np.stack([numbers[reads], first[reads] + offsets], axis=1)
        blocks, which = np.unique(touched, axis=0, return_inverse=True)
        names = [block_owner_name(self._bucket, key(number), block) for number, block in blocks.tolist()]
        owners = self._owners_of(names)[which.reshape(-1)]
        found: dict[str, Share] = {}
        for place, name in enumerate(self.members):
            places = np.unique(reads[(owners == place).any(axis=1)])
            if len(places):
                found[name] = Share(places, numbers[places])
        return found

    def _owners_of(self, names: Sequence[str]) -> I16:
        """The places of each one's owners among the members."""
        found = np.full((len(names), self._copies), _NOBODY, dtype=np.int16)
        if self._copies == 1:
            owners = (self._placement.owner(name) for name in names)
            found[:, 0] = [_NOBODY if owner is None else self._at[owner.name] for owner in owners]
            return found
        for row, name in enumerate(names):
            for column, owner in enumerate(self._placement.owners(name, self._copies)):
                found[row, column] = self._at[owner.name]
        return found
