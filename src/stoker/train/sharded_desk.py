"""Which leased shards this process holds, how much of each its training loop has, and what counts as read.

All leases of a worker are held here, in the training process, whoever reads the records.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

from stoker.errors import ConfigError, JobError, StokerError
from stoker.train.member_link import WorldChanged
from stoker.train.shards import DynamicShards, LeasedShard
from stoker.train.shards_leave import Departure, departure, finish, hand_back

log = logging.getLogger("stoker.train")


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


class Left(NamedTuple):
    """A loop has ended."""

    turn: int
    how: Departure | None
    """None: it came to its end, and what it had is used."""


class Section:
    """A lock. Whoever lets go of it sees to what has come meanwhile: the garbage collector ends loops anywhere, also
    in a thread that holds this lock, and must not wait for it."""

    def __init__(self, see_to: Callable[[Left], Callable[[], None] | None]) -> None:
        self._lock = threading.Lock()
        self._left: deque[Left] = deque()
        self._see_to = see_to

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._left:
            self._work_off()

    def put(self, left: Left) -> None:
        """Have it seen to under the lock, at once if that is free. Never waits for it."""
        self._left.append(left)
        self._work_off()

    def _work_off(self) -> None:
        # Who finds the lock taken may go: who has it looks here when letting go of it.
        while self._left and self._lock.acquire(blocking=False):
            try:
                rest = self._see_to(self._left.popleft()) if self._left else None
            finally:
                self._lock.release()
            if rest is not None:
                rest()


class Desk:
    """For several threads: those that lease for loader processes, and the training loop's.

    At least once: a shard is done as soon as its records are all with the loop and the loop has asked for more
    (`settle`). Exactly once: what the loop has counts at `commit`; leases are held until then.
    """

    def __init__(self, open_source: Callable[[], DynamicShards], *, exactly_once: bool) -> None:
        self._open_source = open_source
        self._exactly_once = exactly_once
        self._lock = Section(self._end)
        self._held: dict[int, Held] = {}
        self._again: deque[Held] = deque()
        """Those of a loop before, of which records are left."""
        self._source: DynamicShards | None = None
        self._failure: BaseException | None = None
        self._lost = ""
        """Why what was read since the last commit cannot be committed."""
        self._is_left = False
        """The last loop ended early, and none has begun since."""
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
        DynamicShards.go_on()
        self.settle()
        with self._lock:
            self.turn += 1
            self._failure, self._is_left = None, False
            held = list(self._held.values())
            if not self._exactly_once:
                self._held.clear()
            for one in held:
                one.is_drained = one.is_given
            self._again = deque(one for one in held if self._exactly_once and not one.is_given)
            turn = self.turn
        if not self._exactly_once and (failure := self._report(held, LeasedShard.give_back)) is not None:
            raise failure
        return turn

    def next(
        self, turn: int, finished: int | None = None, *, is_empty: bool = False, is_ahead: bool = False
    ) -> Held | None:
        """Another shard for one reader, once there is one; None when there will be none, or the loop is over.

        `finished`: number of the one that it has read to the end; `is_empty`: no record in it was good; `is_ahead`: a
        loader process asks.
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
            handed_at = time.monotonic_ns()
        shard = self.source.lease(drained, handed_at=handed_at, is_ahead=is_ahead)
        if shard is None:
            return None
        with self._lock:
            if turn == self.turn:
                if shard.number in self._held:
                    # What was read under the lease before, by whatever process, is given out once more.
                    self._lost = (
                        f"this worker's lease of shard {shard.number} was over, and its records are read once more; if "
                        "it took longer than lease_timeout_s, raise that or commit more often"
                    )
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

    def settle(self, turn: int | None = None) -> None:
        """The loop asks for more: what it had is used."""
        if self._exactly_once:
            return
        with self._lock:
            done = self._take_used() if turn in (None, self.turn) else []
        if (failure := self._report(done, LeasedShard.done)) is not None:
            raise failure

    def leave(
        self, turn: int, frame: FrameType | None = None, consumer: int = 0, *, has_ended: bool = False
    ) -> None:
        """A loop ends in `frame`, early, or `has_ended` and that is where its last batch may have been used: see
        `hand_back`. What is to be committed stays here. May be called by the garbage collector.
        """
        if turn != self.turn or self._source is None:
            return
        how = departure(frame, consumer, self._source.session)
        self._lock.put(Left(turn, None if has_ended and how.failure is None else how))

    def fail(self, number: int, reason: str, turn: int) -> None:
        """A shard cannot be read."""
        with self._lock:
            held = self._held.pop(number, None) if turn == self.turn else None
            if held is not None and held.given > held.counted:
                self._lost = f"shard {number} could not be read to its end"
        if held is not None:
            held.shard.fail(reason)

    def break_off(self, failure: BaseException, turn: int) -> None:
        """Nothing more can be leased for that loop, for this reason."""
        with self._lock:
            if turn in (-1, self.turn):
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
            lost = self._lost
            given = [(one, one.given) for one in self._held.values() if one.given > one.counted]
        try:
            if lost:
                raise JobError(
                    f"what was read of {self.source.name!r} since the last commit does not count: {lost}"
                )
            state = self.source.commit((one.shard, records) for one, records in given)
        except JobError:
            self.forget()
            raise
        with self._lock:
            for one, records in given:
                one.counted = records
                if records == len(one.shard) and self._held.get(one.shard.number) is one:
                    del self._held[one.shard.number]
                    one.shard.is_open = False
            unread = self._take_unread() if self._is_left else []
        hand_back([one.shard for one in unread], Departure(None, None))
        return state

    def roll_back(self) -> None:
        """What is not committed is to be read again, by the next loop; the one under way is over."""
        with self._lock:
            self.turn += 1
            self._lost = ""
            for one in self._held.values():
                one.given = one.counted
                one.is_drained = False

    def forget(self) -> None:
        """Nothing is held any more: the progress is put back, or leases are over. Others may have what was held."""
        with self._lock:
            self.turn += 1
            self._lost = ""
            held = list(self._held.values())
            self._held.clear()
            self._again.clear()
        failure = self._report(held, LeasedShard.give_back)
        if isinstance(failure, StokerError):
            log.warning("shards of %s could not be handed back: %s", self.source.name, failure)

    # -- helpers ------------------------------------------------------------------------------------------

    def _take_used(self) -> list[Held]:
        return self._take(one for one in self._held.values() if one.is_given)

    def _take_unread(self) -> list[Held]:
        """Those of which all that the loop has is committed: the rest may be read by others."""
        return self._take(one for one in self._held.values() if one.given == one.counted)

    def _take(self, some: Iterable[Held]) -> list[Held]:
        taken = list(some)
        for one in taken:
            del self._held[one.shard.number]
        return taken

    def _end(self, left: Left) -> Callable[[], None] | None:
        """A loop has ended; returns what is to be done without the lock."""
        if left.turn != self.turn:
            return None
        if left.how is None:
            used = [] if self._exactly_once else self._take_used()
            return lambda: finish([one.shard for one in used])
        self.turn += 1
        self._is_left = True
        # Of what is to be committed nothing leaves, and what is only leased ahead is for others at once.
        held = self._take_unread() if self._exactly_once else self._take(self._held.values())
        held.sort(key=lambda one: one.given == one.shard.read)
        untouched = sum(one.given == one.shard.read for one in held)
        how = left.how
        return lambda: hand_back([one.shard for one in held], how, untouched)

    def _report(
        self, held: Iterable[Held], report: Callable[[LeasedShard], object]
    ) -> WorldChanged | StokerError | None:
        """Report on each of them, whatever becomes of the others; returns the first error. What another exception
        leaves over stays here."""
        left, failure = deque(held), None
        try:
            while left:
                one = left.popleft()
                try:
                    report(one.shard)
                except (WorldChanged, StokerError) as error:
                    failure = failure or error
        finally:
            if left:
                with self._lock:
                    self._held = {one.shard.number: one for one in left} | self._held
        return failure
