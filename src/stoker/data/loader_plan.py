"""Which records each step of a pass reads: known in full before the first is read. PURE.

A pass is a loader's way from its position to the end of an epoch, in one world. The loader and its processes work the
same plan out for themselves, so that they need to tell each other no more than a step's number.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from stoker.base.rng import GOLDEN_GAMMA, mix64
from stoker.data.group_order import GroupOrder, groups_of
from stoker.data.order import I64, GlobalOrder, Share, parts_of, share_of

PLANNED_AT_ONCE = 16
"""Steps whose records are worked out together: one by one they cost 0.1 ms each, so 0.01 ms."""

LOOKED_AT = 1 << 18
"""Positions that are looked at together, where those of other ranks are looked at as well."""


class Pass(NamedTuple):
    """What a plan follows from."""

    number: int
    """Of the loader's passes; what is still read for an older one is not wanted any more."""
    records: int
    """Of the dataset."""
    seed: int
    epoch: int
    shuffle: bool
    cursor: int
    """Records of the epoch that were handed out before."""
    global_batch_size: int
    rank: int
    world_size: int
    window: int = 0
    """Groups that are mixed where `shuffle` is of groups; 0: it is of all records."""
    virtual_ranks: int = 0
    """Parts of each global batch, whatever the world; 0: it is divided over the world."""

    @property
    def parts(self) -> list[Pass]:
        """The ranks as which this one reads, each of a world of virtual ranks: consecutive ones. Itself without."""
        count = self.virtual_ranks
        if not count:
            return [self]
        numbers = parts_of(self.rank, self.world_size, count)
        return [self._replace(rank=one, world_size=count, virtual_ranks=0) for one in numbers]


class Shares:
    """Which records a rank reads in the steps of a pass. `groups`: the first record of each, where a window is said.

    A global batch is the same records at any world size. Where they come from groups, it is put into the order of
    groups before it is divided, so that a rank reads few of them, and goes on reading the same ones.
    """

    def __init__(self, of: Pass, groups: I64 | None = None) -> None:
        self.of = of
        self._groups = groups
        parts = of.parts
        self._first, self._stop, self._count = parts[0].rank, parts[-1].rank + 1, parts[0].world_size
        self._parts = [Shares(part, groups) for part in parts] if of.virtual_ranks else []

    @property
    def looks_at_all(self) -> bool:
        """Whether to know one rank's share takes the whole global batch."""
        return self.of.window > 0 and self._count > 1

    def spans(self, steps: I64) -> tuple[I64, I64]:
        """The share of each step, as `share_of` says."""
        of = self.of
        begins = np.minimum(of.cursor + steps * of.global_batch_size, of.records)
        sizes = np.minimum(begins + of.global_batch_size, of.records) - begins
        return begins + sizes * self._first // self._count, begins + sizes * self._stop // self._count

    def positions(self, low: int, high: int) -> tuple[I64, I64]:
        """Positions in the epoch's order of what is read in the steps `[low, high)`, and how many are of each."""
        if self._parts and self.looks_at_all:
            return _interleaved([part.positions(low, high) for part in self._parts])
        starts, stops = self.spans(np.arange(low, high, dtype=np.int64))
        sizes = stops - starts
        offsets = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        positions = np.repeat(starts, sizes) + offsets
        order = self._order
        if self.looks_at_all and isinstance(order, GroupOrder) and len(positions):
            of = self.of
            first = of.cursor + low * of.global_batch_size
            whole = np.arange(first, min(first + (high - low) * of.global_batch_size, of.records))
            lanes = order.lanes(whole.astype(np.uint64))
            by_lane = np.lexsort((lanes, (whole - first) // of.global_batch_size))
            # In the order that they had: who divides its share further gets records of all its groups in each part.
            positions = np.sort(whole[by_lane[positions - first]])
        return positions, sizes

    def records(self, positions: I64) -> I64:
        """What is at those positions."""
        return self._order.of(positions.astype(np.uint64))

    @functools.cached_property
    def _order(self) -> GlobalOrder | GroupOrder:
        of = self.of
        if not of.window:
            return GlobalOrder(of.records, seed=of.seed, epoch=of.epoch, shuffle=of.shuffle)
        if self._groups is None:
            raise ValueError("an order of groups needs them")
        return GroupOrder(self._groups, of.records, seed=of.seed, epoch=of.epoch, window=of.window)


def _interleaved(parts: list[tuple[I64, I64]]) -> tuple[I64, I64]:
    """Of several ranks: for each step the first one's positions, then the next one's, and so on."""
    split = [np.split(positions, np.cumsum(sizes)[:-1]) for positions, sizes in parts]
    steps = [np.concatenate(step) for step in zip(*split, strict=True)]
    return np.concatenate(steps), np.array([len(step) for step in steps], dtype=np.int64)


class Plan:
    """The steps of one pass, numbered from 0. `groups` as those of `Shares`.

    With virtual ranks a step is the part of one of them; those of a global batch follow each other.
    """

    def __init__(self, of: Pass, groups: I64 | None = None) -> None:
        self.of = of
        self._parts = [_PartPlan(part, groups) for part in of.parts]
        self.parts = len(self._parts)
        """Steps of this rank in each global batch."""
        self.steps = self.parts * math.ceil((of.records - of.cursor) / of.global_batch_size)

    def start(self, step: int) -> int:
        """Where the step's global batch begins in the epoch's order."""
        return self.of.cursor + step // self.parts * self.of.global_batch_size

    def part(self, step: int) -> tuple[int, int]:
        """As which rank of how many the step is read: this one of its world, but for virtual ranks."""
        of = self._parts[step % self.parts].of
        return of.rank, of.world_size

    def begins_batch(self, step: int) -> bool:
        """Whether this rank has read nothing of the global batch before."""
        return step % self.parts == 0

    def ends_batch(self, step: int) -> bool:
        """Whether this rank reads no more of the global batch."""
        return (step + 1) % self.parts == 0

    def batches(self, steps: int) -> int:
        """How many global batches the first so many steps read whole."""
        return steps // self.parts

    def share(self, step: int) -> Share:
        """How much of the global batch is read in this step."""
        rank, world_size = self.part(step)
        return share_of(rank, world_size, self.start(step), self.of.global_batch_size, self.of.records)

    def records(self, step: int) -> list[int]:
        """Record numbers of the share; for an empty share, one record of the batch to keep in step."""
        return self._parts[step % self.parts].records(step // self.parts)

    def random_seed(self, step: int) -> int:
        """What random generators begin the step with: the same however many processes read, and after a resume."""
        of, share = self.of, self.share(step)
        start = share.start if share.records else self.start(step)
        return mix64(mix64(of.seed) ^ (of.epoch * GOLDEN_GAMMA) ^ mix64(start + 1))


class _PartPlan:
    """The records of the steps of one rank, which may be a virtual one."""

    def __init__(self, of: Pass, groups: I64 | None) -> None:
        self.of = of
        self._steps = math.ceil((of.records - of.cursor) / of.global_batch_size)
        self._shares = Shares(of, groups)
        self._at_once = PLANNED_AT_ONCE
        if self._shares.looks_at_all:
            self._at_once = max(1, min(PLANNED_AT_ONCE, LOOKED_AT // of.global_batch_size))
        self._planned: tuple[int, list[list[int]]] = (-1, [])

    def records(self, step: int) -> list[int]:
        first = step - step % self._at_once
        if self._planned[0] != first:
            last = min(first + self._at_once, self._steps)
            self._planned = first, self._records(first, last)
        return self._planned[1][step - first]

    def _records(self, low: int, high: int) -> list[list[int]]:
        of = self.of
        positions, sizes = self._shares.positions(low, high)
        parts = np.split(positions, np.cumsum(sizes)[:-1])
        starts = [of.cursor + (low + at) * of.global_batch_size for at in range(len(parts))]
        parts = [part if len(part) else np.array([start]) for part, start in zip(parts, starts, strict=True)]
        numbers = self._shares.records(np.concatenate(parts)).tolist()
        found, at = [], 0
        for part in parts:
            found.append(numbers[at : at + len(part)])
            at += len(part)
        return found


def groups_for(of: Pass, dataset: object) -> I64 | None:
    """What a pass over a dataset needs to know of groups. Raises ConfigError where the dataset has none."""
    return groups_of(dataset) if of.window else None


def expect_groups(of: Pass, dataset: object) -> None:
    """Have a dataset know how many groups a pass reads from in turn, if it wants to: a rank has its part of those that
    are mixed, and shares some at its ends."""
    expect = getattr(dataset, "expect_groups", None)
    if of.window and expect is not None:
        expect(min(of.window, -(-of.window // of.world_size) + 3))
