"""What is remembered of each worker's calls, so that a call that comes twice does its work once. PURE.

After Lee et al., "Implementing Linearizability at Large Scale and Low Latency" (RIFL, SOSP 2015): a client numbers its
calls upwards, and the server remembers which numbers are answered. Here as intervals: a worker that waits in one call
and goes on with others costs one interval, not a list of answers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from stoker.wire.shards import LeaseShard

INTERVALS_MAX = 32
REFUSED_MAX = 32


class NumberSet:
    """A set of numbers that grows mostly at its upper end, held as intervals."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in intervals:
            self._firsts.append(first)
            self._lasts.append(last)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __len__(self) -> int:
        """How many intervals."""
        return len(self._firsts)

    def intervals(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._firsts, self._lasts, strict=True))

    def add(self, number: int) -> None:
        firsts, lasts = self._firsts, self._lasts
        at = bisect_right(firsts, number)
        if at and number <= lasts[at - 1]:
            return
        touches_left = at > 0 and lasts[at - 1] == number - 1
        touches_right = at < len(firsts) and firsts[at] == number + 1
        if touches_left and touches_right:
            lasts[at - 1] = lasts[at]
            del firsts[at], lasts[at]
        elif touches_left:
            lasts[at - 1] = number
        elif touches_right:
            firsts[at] = number
        else:
            firsts.insert(at, number)
            lasts.insert(at, number)

    def shrink(self, keep_out: Iterable[int]) -> None:
        """Close the oldest gaps that hold none of the numbers `keep_out` until few intervals are left."""
        outside = sorted(keep_out)
        at = 1
        while len(self) > INTERVALS_MAX and at < len(self):
            place = bisect_right(outside, self._lasts[at - 1])
            if place < len(outside) and outside[place] < self._firsts[at]:
                at += 1
                continue
            self._lasts[at - 1] = self._lasts[at]
            del self._firsts[at], self._lasts[at]


class WorkerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker's answered calls, as they are kept."""

    answered: tuple[tuple[int, int], ...]
    refused: tuple[int, ...] = ()


class WorkerCalls:
    """One worker's calls: those that hold a shard, those that wait for one, those that are over."""

    __slots__ = ("_handed_at", "answered", "leases", "refused", "waiting")

    def __init__(self, record: WorkerRecord | None = None) -> None:
        self.leases: dict[int, tuple[str, int]] = {}
        """Lease calls whose shard the worker holds: dataset and shard number."""
        self.waiting: dict[int, str] = {}
        """Lease calls that wait: dataset."""
        self._handed_at: dict[str, int] = {}
        """By dataset: of its newest list of shards that are with its loop."""
        self.answered = NumberSet(record.answered if record is not None else ())
        """Calls whose work is done. A lease call is among them once its shard has been reported on."""
        self.refused: list[int] = list(record.refused) if record is not None else []
        """Of those, the newest reports that were not accepted."""

    @property
    def open(self) -> int:
        """Lease calls that hold a shard or wait for one."""
        return len(self.leases) + len(self.waiting)

    def handed(self, call: LeaseShard) -> tuple[int, ...] | None:
        """The shards that are with its loop, by this call; None if a newer one has said so before."""
        if call.handed_at < self._handed_at.get(call.dataset, 0):
            return None
        self._handed_at[call.dataset] = call.handed_at
        return call.handed

    def are_done(self, leases: Iterable[int]) -> None:
        """The shards of these lease calls are committed to their ends."""
        for lease in leases:
            del self.leases[lease]
            self.answered.add(lease)

    def is_over(self, number: int, *, accepted: bool = True) -> None:
        """A call has done its work and is answered."""
        self.answered.add(number)
        if not accepted:
            self.refused = [*self.refused[1 - REFUSED_MAX :], number]
        if len(self.answered) > INTERVALS_MAX:
            self.answered.shrink((*self.leases, *self.waiting))

    def record(self) -> WorkerRecord:
        return WorkerRecord(answered=self.answered.intervals(), refused=tuple(self.refused))
