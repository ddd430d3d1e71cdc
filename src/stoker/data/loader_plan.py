"""Which records each step of a pass reads: known in full before the first is read. PURE.

A pass is a loader's way from its position to the end of an epoch, in one world. The loader and its processes work the
same plan out for themselves, so that they need to tell each other no more than a step's number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from stoker.base.rng import GOLDEN_GAMMA, mix64
from stoker.data.order import GlobalOrder, Share, share_of

PLANNED_AT_ONCE = 16
"""Steps whose records are worked out together: one by one they cost 0.1 ms each, so 0.01 ms."""


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


class Plan:
    """The steps of one pass, numbered from 0."""

    def __init__(self, of: Pass) -> None:
        self.of = of
        self.steps = math.ceil((of.records - of.cursor) / of.global_batch_size)
        self._order = GlobalOrder(of.records, seed=of.seed, epoch=of.epoch, shuffle=of.shuffle)
        self._planned: tuple[int, list[list[int]]] = (-1, [])

    def start(self, step: int) -> int:
        """Where the step's global batch begins in the epoch's order."""
        return self.of.cursor + step * self.of.global_batch_size

    def share(self, step: int) -> Share:
        """What this rank reads of it."""
        of = self.of
        return share_of(of.rank, of.world_size, self.start(step), of.global_batch_size, of.records)

    def records(self, step: int) -> list[int]:
        """Record numbers of this rank's share; for an empty share, one record of the batch to keep in step."""
        first = step - step % PLANNED_AT_ONCE
        if self._planned[0] != first:
            last = min(first + PLANNED_AT_ONCE, self.steps)
            self._planned = first, self._records(range(first, last))
        return self._planned[1][step - first]

    def random_seed(self, step: int) -> int:
        """What random generators begin the step with: the same however many processes read, and after a resume."""
        return mix64(mix64(self.of.seed) ^ (self.of.epoch * GOLDEN_GAMMA) ^ mix64(self._span(step)[0] + 1))

    def _records(self, steps: range) -> list[list[int]]:
        spans = [self._span(step) for step in steps]
        positions = np.concatenate([np.arange(low, high, dtype=np.uint64) for low, high in spans])
        numbers = self._order.of(positions).tolist()
        found, at = [], 0
        for low, high in spans:
            found.append(numbers[at : at + high - low])
            at += high - low
        return found

    def _span(self, step: int) -> tuple[int, int]:
        share = self.share(step)
        return (share.start, share.stop) if share.records else (self.start(step), self.start(step) + 1)
