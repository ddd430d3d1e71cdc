"""Who reads what: a pure function of (seed, epoch, cursor, world). PURE.

The *global order* of an epoch is a permutation of the record numbers `0 … n-1` that can be asked for at any
position without building it: a balanced Feistel network over the smallest even-width power of two that holds
n, with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It needs no memory,
and never changes between versions of NumPy or machines.

A step divides the *global batch* `[cursor, cursor + B)` of that order over the world of that step, so B is the
same at every world size and every record of the epoch is read exactly once whatever dies or joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.base.rng import GOLDEN_GAMMA, MASK64, mix64

ROUNDS = 4
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


class Share(NamedTuple):
    """Positions `[start, stop)` of the global order that one rank reads in one step."""

    start: int
    stop: int
    batch_records: int
    """Records of the whole global batch."""

    @property
    def records(self) -> int:
        return self.stop - self.start


class GlobalOrder:
    """The order of one epoch.

    `records`: how many there are. With `shuffle=False` the order is 0, 1, 2, …
    """

    def __init__(self, records: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        if records < 0:
            raise ValueError(f"records must not be negative, got {records}")
        self.records = records
        self.shuffle = shuffle
        half_bits = max(1, (max(records - 1, 1).bit_length() + 1) // 2)
        self._half = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        base = mix64(mix64(seed) ^ (epoch * GOLDEN_GAMMA))
        self._keys = [np.uint64(mix64(base + r + 1)) for r in range(ROUNDS)]

    def at(self, start: int, stop: int) -> I64:
        """Record numbers (int64) at the positions `[start, stop)`. Raises ValueError outside the epoch."""
        if not 0 <= start <= stop <= self.records:
            raise ValueError(f"positions [{start}, {stop}) are outside an epoch of {self.records} records")
        return self.of(np.arange(start, stop, dtype=np.uint64))

    def of(self, positions: U64) -> I64:
        """Record numbers (int64) at any positions of the epoch; several at once cost hardly more than one."""
        if not self.shuffle or self.records < 2:
            return positions.astype(np.int64)
        values = self._permute(positions)
        outside = values >= self.records
        while outside.any():
            values[outside] = self._permute(values[outside])
            outside = values >= self.records
        return values.astype(np.int64)

    def _permute(self, values: U64) -> U64:
        return _rounds(values, self._half, self._mask, self._keys)


def scattered(values: U64, sizes: I64, seeds: U64) -> U64:
    """Each value in a permutation of its own: of the numbers below `sizes[i]`, made of `seeds[i]`. One and the same
    permutation as often as size and seed are the same."""
    bits = np.frexp(np.maximum(sizes - 1, 1))[1]  # as of int.bit_length
    half = ((bits + 1) // 2).astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [seeds + np.uint64((r + 1) * GOLDEN_GAMMA & MASK64) for r in range(ROUNDS)]
    limits = sizes.astype(np.uint64)
    found = _rounds(values, half, mask, keys)
    outside = np.flatnonzero(found >= limits)
    while len(outside):
        some = [key[outside] for key in keys]
        found[outside] = _rounds(found[outside], half[outside], mask[outside], some)
        outside = outside[found[outside] >= limits[outside]]
    return found


def seeds_of(seed: int, epoch: int, numbers: U64) -> U64:
    """Seeds of so many permutations of one epoch."""
    base = np.uint64(mix64(mix64(seed) ^ (epoch * GOLDEN_GAMMA)))
    return _mix(_mix(numbers + np.uint64(GOLDEN_GAMMA)) ^ base)


def _rounds(
    values: U64, half: U64 | np.uint64, mask: U64 | np.uint64, keys: Sequence[U64 | np.uint64]
) -> U64:
    """The network, with one key and size for all values or one for each."""
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(values: U64) -> U64:
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLY_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLY_2
    return values ^ (values >> np.uint64(31))


def parts_of(rank: int, world_size: int, virtual_ranks: int) -> range:
    """Which of the virtual ranks a rank stands for: consecutive ones."""
    return range(rank * virtual_ranks // world_size, (rank + 1) * virtual_ranks // world_size)


def share_of(rank: int, world_size: int, cursor: int, global_batch_size: int, records: int) -> Share:
    """What `rank` reads of the global batch that begins at `cursor`.

    The last batch of an epoch is smaller. Shares differ by one record at most and may be empty. Raises
    ValueError for a rank outside the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    stop = min(cursor + global_batch_size, records)
    size = max(0, stop - cursor)
    return Share(
        start=cursor + size * rank // world_size,
        stop=cursor + size * (rank + 1) // world_size,
        batch_records=size,
    )
