"""Which leased shards this process holds, how much of each its training loop has, and what counts as read.

All leases of a worker are held here, in the training process, whoever reads the records.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from stoker.errors import ConfigError, JobError
from stoker.train.shards import DynamicShards, LeasedShard
from stoker.train.shards_leave import hand_back


class Held:
    """A leased shard. Its records are read in their order, so how many says which."""

    def __init__(self, shard: LeasedShard) -> None:
        self.shard = shard
        self.counted = shard.read
        """Records that are committed."""
        self.given = shard.read
        """Records that the training loop has, with those."""
        self.is_drained = False
        """All of its records are with the loop, or on their way to it."""

    @property
    def is_given(self) -> bool:
        return self.given == len(self.shard)


class Desk:
    """For several threads: those that lease for loader processes, and the training loop's.

    At least once: a shard is done as soon as its records are all with the loop and the loop has asked for more
    (`settle`). Exactly once: what the loop has counts at `commit`; leases are held until then.
    """

    def __init__(self, open_source: Callable[[], DynamicShards], *, exactly_once: bool) -> None:
        self._open_source = open_source
        self._exactly_once = exactly_once
        self._lock = threading.Lock()
        self._held: dict[int, Held] = {}
        self._again: deque[Held] = deque()
        """Those of a loop before, of which records are left."""
        self._source: DynamicShards | None = None
        self._failure: BaseException | None = None
        self.turn = 0
        """Number of the loop under way."""

    @property
    def source(self) -> DynamicShards:
        """The master's side of it."""
        if self._source is None:
            self._source = self._open_source()
        return self._source

    # -- a loop -------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """A loop begins, and with it the one before has ended; returns its number."""
        self.settle()
        with self._lock:
            self.turn += 1
            self._failure = None
            held = list(self._held.values())
            if not self._exactly_once:
                self._held.clear()
            for one in held:
                one.is_drained = one.is_given
            self._again = deque(one for one in held if self._exactly_once and not one.is_given)
            turn = self.turn
        if not self._exactly_once:
            for one in held:
                one.shard.give_back()
        return turn

    def next(self, turn: int, finished: int | None = None, *, is_empty: bool = False) -> Held | None:
        """Another shard for one reader, once there is one; None when there will be none, or the loop is over.

        `finished`: number of the one that it has read to the end; `is_empty`: no record in it was good.
        """
        with self._lock:
            if turn != self.turn:
                return None
            if finished is not None and (done := self._held.get(finished)) is not None:
                done.is_drained = True
                if is_empty:
                    done.given = len(done.shard)
            if self._again:
                return self._again.popleft()
            drained = [number for number, one in self._held.items() if one.is_drained]
        shard = self.source.lease(drained)
        if shard is None:
            return None
        with self._lock:
            if turn == self.turn:
                held = self._held[shard.number] = Held(shard)
                return held
        shard.give_back()
        return None

    def give(self, given: Iterable[tuple[int, int]]) -> None:
        """The loop gets records: numbers of shards, and how many of each it has with them."""
        with self._lock:
            for number, records in given:
                if number in self._held:
                    self._held[number].given = records

    def settle(self) -> None:
        """The loop asks for more: what it had is used."""
        if self._exactly_once:
            return
        with self._lock:
            done = [one for one in self._held.values() if one.is_given]
            for one in done:
                del self._held[one.shard.number]
        for one in done:
            one.shard.done()

    def leave(self, frame: FrameType | None = None, consumer: int = 0) -> None:
        """The loop ends early, in `frame`: see `hand_back`. What is to be committed stays here."""
        with self._lock:
            self.turn += 1
            held = [] if self._exactly_once else list(self._held.values())
            if held:
                self._held.clear()
        held.sort(key=lambda one: one.given == one.shard.read)
        untouched = sum(one.given == one.shard.read for one in held)
        if held:
            shards = [one.shard for one in held]
            hand_back(shards, frame, consumer, self.source.session, untouched)

    def fail(self, number: int, reason: str) -> None:
        """A shard cannot be read."""
        with self._lock:
            held = self._held.pop(number, None)
        if held is not None:
            held.shard.fail(reason)

    def break_off(self, failure: BaseException) -> None:
        """Nothing more can be leased, for this reason."""
        with self._lock:
            self._failure = self._failure or failure

    def check(self) -> None:
        """Raises that."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- what counts --------------------------------------------------------------------------------------

    def commit(self) -> dict[str, Any]:
        """What the loop has counts from now on; the dataset's progress over all workers. Raises JobError where another
        worker reads it: then it does not count."""
        if not self._exactly_once:
            raise ConfigError(
                "there is nothing to commit: each shard counts when its records are used; make the dataset with "
                "exactly_once=True to have records count at commits"
            )
        with self._lock:
            given = [(one, one.given) for one in self._held.values() if one.given > one.counted]
        try:
            state = self.source.commit((one.shard, records) for one, records in given)
        except JobError:
            self.forget()
            raise
        with self._lock:
            for one, records in given:
                one.counted = records
                if records == len(one.shard):
                    del self._held[one.shard.number]
                    one.shard.is_open = False
        return state

    def roll_back(self) -> None:
        """What is not committed is to be read again, by the next loop; the one under way is over."""
        with self._lock:
            self.turn += 1
            for one in self._held.values():
                one.given = one.counted

    def forget(self) -> None:
        """Nothing is held any more: the progress was put back, or the leases are over."""
        with self._lock:
            self.turn += 1
            self._held.clear()
            self._again.clear()
