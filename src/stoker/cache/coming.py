"""Which reads are to come: the orders that jobs announce, and when each thing is read next. Pure.

A *stream* is one reader's coming reads, in order; a position in it is a read. What is read is an *item*: a number that
stands for an object, or for one block of it. Streams of a job's ranks are one *group*.

Belady's rule (1966) gives up what is read latest. Within a *round*, in which nothing is read twice (an epoch), a place
in the cache can give one hit, whatever lies there: which of the items of a round leaves makes no difference, and moving
them about costs writes for nothing. So where all reads of a bucket are one group's, an item counts as due at the end of
the round in which it is read next. Shuffled epochs are then kept as `uniform` would (the optimum: that part of the
dataset that fits), and what the next round does not read leaves first.

What is looked up may be while another thread announces: all state is replaced as a whole.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker.base.rng import GOLDEN_GAMMA

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
NEVER = int(np.iinfo(np.int64).max)
_GAMMA = np.uint64(GOLDEN_GAMMA)
_KINDS = 16
_PACE_SHARE = 0.25
_PACE_S_MAX = 3600.0


def items_of(ids: U64, blocks: I64) -> U64:
    """The items of blocks of the objects with these ids; block -1: of whole objects."""
    numbers = (blocks + 1).astype(np.uint64)
    return ids ^ (numbers * _GAMMA)


class _Run:
    """Some consecutive reads, by item and position."""

    __slots__ = ("items", "positions", "start", "stop")

    def __init__(self, items: U64, positions: I64, start: int, stop: int) -> None:
        order = np.lexsort((positions, items))
        self.items = items[order]
        self.positions = positions[order]
        self.start = start
        self.stop = stop

    def next_of(self, items: U64, cursor: int) -> I64:
        """The first position from `cursor` on at which each is read; NEVER if at none."""
        low = np.searchsorted(self.items, items)
        stop = high = np.searchsorted(self.items, items, side="right")
        while (is_open := low < high).any():
            middle = (low + high) // 2
            is_before = is_open & (self.positions[np.minimum(middle, len(self.positions) - 1)] < cursor)
            low, high = np.where(is_before, middle + 1, low), np.where(is_open & ~is_before, middle, high)
        found = np.full(len(items), NEVER, dtype=np.int64)
        is_due = low < stop
        found[is_due] = self.positions[low[is_due]]
        return found

    def without(self, before: int, after: int) -> _Run:
        """Only its reads of `[before, after)`."""
        is_in = (self.positions >= before) & (self.positions < after)
        start, stop = max(self.start, before), min(self.stop, after)
        return _Run(self.items[is_in], self.positions[is_in], start, stop)


class Stream:
    """One reader's coming reads. `plan`: what is announced under a higher number replaces all of a lower one."""

    def __init__(self, group: str, plan: int, *, read_s: float, now: float) -> None:
        self.group = group
        self.plan = plan
        self.cursor = 0
        self.asked = 0
        """What is before it is asked for by now, if not read."""
        self.reach: int | None = None
        """What is read so many reads after those that are asked for counts for nothing; None: all counts."""
        self.read_s = read_s
        """Seconds a read takes, as was said at first and is seen since."""
        self.stop = 0
        """The position after the last that is known."""
        self._runs: list[_Run] = []
        self._rounds: list[tuple[int, int]] = []
        self._moved_at = now

    @property
    def size(self) -> int:
        """How many items of reads are kept."""
        return sum(len(run.items) for run in self._runs)

    @property
    def share(self) -> float:
        """At which part of the positions that are known anything is read here."""
        kept = sum(run.stop - run.start for run in self._runs)
        return min(1.0, self.size / kept) if kept else 1.0

    @property
    def has_rounds(self) -> bool:
        """Whether it is known of all reads in which round they are."""
        return bool(self._rounds)

    def announce(
        self, start: int, count: int, items: U64, positions: I64, round_number: int | None = None
    ) -> None:
        """The `count` reads from `start` on: what is read at which position, ascending. What was announced from there
        on is forgotten. Raises ValueError where some in between are not known."""
        if not 0 <= start <= self.stop:
            raise ValueError(f"reads are known up to {self.stop}, not up to {start}")
        runs, rounds = self._runs, self._rounds
        if start < self.stop:
            runs = [
                run if run.stop <= start else run.without(self.cursor, start)
                for run in runs
                if run.start < start
            ]
            rounds = [entry for entry in rounds if entry[0] < start]
        if round_number is None:
            rounds = []
        elif (start == 0 or rounds) and (not rounds or rounds[-1][1] != round_number):
            rounds = [*rounds, (start, round_number)]
        if count:
            runs = _merged([*runs, _Run(items, positions, start, start + count)])
        self._runs, self._rounds, self.stop = runs, rounds, start + count

    def advance(self, cursor: int, now: float, asked: int = 0) -> None:
        """Reads before `cursor` are done, and those before `asked` are under way."""
        self.asked = max(self.asked, min(asked, self.stop), min(cursor, self.stop))
        if cursor <= self.cursor:
            return
        pace_s = (now - self._moved_at) / (cursor - self.cursor)
        if 0 < pace_s < _PACE_S_MAX:
            self.read_s += (pace_s - self.read_s) * _PACE_SHARE
        self.cursor = min(cursor, self.stop)
        self._moved_at = now
        runs = [run for run in self._runs if run.stop > self.cursor]
        if runs and self.cursor - runs[0].start > runs[0].stop - self.cursor:
            runs[0] = runs[0].without(self.cursor, runs[0].stop)
        self._runs = runs

    def next_of(self, items: U64, start: int = 0) -> I64:
        """The position, of those from `start` on, at which each item is read next; NEVER, if that is not known."""
        found = np.full(len(items), NEVER, dtype=np.int64)
        start = max(start, self.cursor)
        for run in self._runs:
            if run.stop > start:
                is_missing = found == NEVER
                found[is_missing] = run.next_of(items[is_missing], start)
        if self.reach is not None:
            found[found >= self.asked + self.reach] = NEVER
        return found

    def round_stops(self, positions: I64) -> I64:
        """The end of the round that each position is in."""
        starts = np.array([start for start, _ in self._rounds], dtype=np.int64)
        stops = np.append(starts[1:], self.stop)
        known = positions != NEVER
        ends = positions.copy()
        ends[known] = stops[np.searchsorted(starts, positions[known], side="right") - 1]
        return ends

    def seconds_until(self, positions: I64) -> F64:
        """When these positions are read, from now on; infinite for NEVER."""
        known = positions != NEVER
        seconds = np.full(len(positions), np.inf)
        seconds[known] = np.maximum(0, positions[known] - self.cursor) * self.read_s
        return seconds

    def kind_of(self, position: int, now: float, *, in_rounds: bool) -> tuple[float, int]:
        """When a position is read, and what it has in common with those that are read about then: a number above 0."""
        due_s = (position - self.cursor) * self.read_s
        if in_rounds:
            at = bisect_right(self._rounds, position, key=lambda entry: entry[0])
            return due_s, 1 + self._rounds[at - 1][1] % _KINDS
        width_s = 2.0 ** math.ceil(math.log2(max(1e-6, (self.stop - self.cursor) * self.read_s / _KINDS)))
        return due_s, 1 + int((now + due_s) / width_s) % _KINDS


def _merged(runs: list[_Run]) -> list[_Run]:
    """Few runs of shrinking size, as in a log-structured merge tree: looking up stays cheap."""
    while len(runs) > 1 and len(runs[-1].items) * 2 >= len(runs[-2].items):
        before, last = runs[-2:]
        items = np.concatenate([before.items, last.items])
        positions = np.concatenate([before.positions, last.positions])
        runs = [*runs[:-2], _Run(items, positions, before.start, last.stop)]
    return runs


class Due(NamedTuple):
    """When items are read next, in seconds from now (infinite: nobody has said that they are), and up to when it is
    known what is read."""

    seconds: F64
    horizon_s: float


class ComingReads:
    """All streams of one bucket, by name."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def get(self, name: str) -> Stream | None:
        """A stream that was announced."""
        return self._streams.get(name)

    def put(self, name: str, stream: Stream) -> None:
        """Add a stream, or replace it."""
        self._streams = {**self._streams, name: stream}

    def as_of_now(self) -> ComingReads:
        """A copy that stays as it is."""
        kept = ComingReads()
        kept._streams = {name: copy(stream) for name, stream in self._streams.items()}
        return kept

    def remove(self, name: str) -> None:
        """A stream goes on no more."""
        self._streams = {other: stream for other, stream in self._streams.items() if other != name}

    @property
    def is_in_rounds(self) -> bool:
        """Whether all that is read is one group's, which reads nothing twice in a round."""
        streams = self._streams.values()
        return len({stream.group for stream in streams}) == 1 and all(stream.has_rounds for stream in streams)

    def kind_of(self, item: int, now: float) -> int:
        """What is read at about the same time after its next reading is of one kind, which is never 0; 0: what is not
        read again, as far as is known."""
        items = np.array([item], dtype=np.uint64)
        in_rounds = self.is_in_rounds
        kinds = []
        for stream in self._streams.values():
            first = int(stream.next_of(items)[0])
            again = NEVER if first == NEVER else int(stream.next_of(items, first + 1)[0])
            if again != NEVER:
                kinds.append(stream.kind_of(again, now, in_rounds=in_rounds))
        return min(kinds, default=(0.0, 0))[1]

    def due(self, ids: U64, blocks: I64) -> Due:
        """When each block (-1: object) is read next by any stream, itself or as a part of its object."""
        streams = list(self._streams.values())
        items = items_of(ids, blocks)
        # What is read as a whole counts for each block, and what is read of its first one for an object of one block.
        others = np.where(blocks >= 0, ids, items_of(ids, np.zeros_like(blocks)))

        in_rounds = self.is_in_rounds
        seconds = np.full(len(ids), np.inf)
        horizon_s = 0.0
        for stream in streams:
            positions = stream.next_of(items)
            positions = np.minimum(positions, stream.next_of(others))
            if in_rounds:
                positions = stream.round_stops(positions)
            seconds = np.minimum(seconds, stream.seconds_until(positions))
            horizon_s = max(horizon_s, (stream.stop - stream.cursor) * stream.read_s)
        return Due(seconds, horizon_s)
