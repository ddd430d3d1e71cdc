"""What one rank reads of a dataset from a step on, over this epoch and those after it. PURE.

Its positions go on from one epoch to the next: as long as nothing changes, what was said of them stays true.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stoker.data.loader_plan import LOOKED_AT, Pass, Shares
from stoker.data.order import I64


class Chunk(NamedTuple):
    """Consecutive reads of one epoch: the position of the first, and the records, in their order."""

    start: int
    epoch: int
    records: I64


class ComingRecords:
    """The reads of a pass and of those that follow it in the same world. `groups` as those of `Shares`."""

    def __init__(self, of: Pass, groups: I64 | None = None) -> None:
        self._groups = groups
        self._passes = [of]
        self._starts = [0]
        self._stops = [self._count(of)]
        self._shares: dict[int, Shares] = {}

    @property
    def of(self) -> Pass:
        """The pass under way."""
        return self._passes[0]

    def goes_on_with(self, of: Pass) -> bool:
        """Whether a pass is the one that comes next."""
        return of == self.of._replace(number=of.number, epoch=self.of.epoch + 1, cursor=0)

    def go_on(self) -> None:
        """The first pass has ended."""
        if len(self._passes) < 2:
            self.add()
        self._shares.pop(self._passes[0].epoch, None)
        del self._passes[0], self._starts[0], self._stops[0]

    def add(self) -> None:
        """One pass more is to be told of."""
        last = self._passes[-1]
        of = last._replace(epoch=last.epoch + 1, cursor=0)
        self._starts.append(self._stops[-1])
        self._stops.append(self._stops[-1] + self._count(of))
        self._passes.append(of)

    @property
    def start(self) -> int:
        """The position of the pass's first read."""
        return self._starts[0]

    @property
    def stop(self) -> int:
        """The position after the last read of all passes that are told of."""
        return self._stops[-1]

    @property
    def passes(self) -> int:
        """How many are told of."""
        return len(self._passes)

    def read_by(self, step: int) -> int:
        """The position after what the first pass's steps before this one read."""
        return self._starts[0] + self._before(self._passes[0], step)

    def chunk(self, start: int, count: int) -> Chunk:
        """At most `count` reads from a position on; fewer where an epoch ends, or to find them takes long.

        Raises IndexError beyond the last.
        """
        at = next((i for i, stop in enumerate(self._stops) if start < stop), None)
        if at is None or start < self._starts[0]:
            raise IndexError(start)
        of, first = self._passes[at], start - self._starts[at]
        last = min(first + count, self._stops[at] - self._starts[at])
        low, high = self._step_of(of, first), self._step_of(of, last - 1) + 1
        shares = self._shares.get(of.epoch)
        if shares is None:
            shares = self._shares[of.epoch] = Shares(of, self._groups)
        if shares.looks_at_all:
            high = min(high, low + max(1, LOOKED_AT // of.global_batch_size))
            last = min(last, self._before(of, high))
        positions, _ = shares.positions(low, high)
        skipped = first - self._before(of, low)
        return Chunk(start, of.epoch, shares.records(positions[skipped : skipped + last - first]))

    def _before(self, of: Pass, step: int) -> int:
        """How many records the rank reads before a step."""
        whole, rest = divmod(of.records - of.cursor, of.global_batch_size)
        starts, stops = Shares(of).spans(np.array([0, whole], dtype=np.int64))
        sizes = stops - starts
        if step <= whole:
            return step * int(sizes[0]) if whole else 0
        return whole * int(sizes[0] if whole else 0) + (int(sizes[1]) if rest else 0)

    def _count(self, of: Pass) -> int:
        return self._before(of, of.records // of.global_batch_size + 2)

    def _step_of(self, of: Pass, read: int) -> int:
        """The step in which the rank's read number `read` of a pass is."""
        one = self._before(of, 1)
        whole = (of.records - of.cursor) // of.global_batch_size
        return min(read // one, whole) if one else whole
