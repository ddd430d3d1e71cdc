"""Carries out what a mount's core decides, as `daemon.py` does with its threads, but in a seeded order; and dies.

Each thread does its effects one after the other, and all go on at any time. What is remembered is written at once, in
the order in which it was decided.
"""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from stoker.base.rng import Rng
from stoker.cache.mount import answers
from stoker.cache.mount.core import MountCore
from stoker.cache.mount.questions import (
    Agreed,
    Ask,
    CloseBacking,
    CloseOtherBackings,
    Effect,
    Question,
    Remember,
    Reply,
    Tell,
)
from stoker.cache.mount.records import records, whole_bytes
from stoker.cache.mount.requests import Interrupt, Request, parse
from stoker.cache.mount.signals import Signals
from stoker.cache.mount.state import MountSettings
from stoker.cache.mount.waiting import Failed
from tests.mount.kernel import FakeKernel
from tests.mount.source import FakeSource

TICK_S = 0.25
FAILURES = (errno.EIO, errno.EACCES)


class Died(Exception):
    """The daemon, in the middle of something."""


@dataclass(slots=True)
class _Job:
    number: int
    question: Question
    due: float
    answer: object = None
    is_found: bool = False


class Driver:
    """One mount's daemons, one after the other. `death_chance`: at each step; `failure_chance`: of an answer."""

    def __init__(self, kernel: FakeKernel, source: FakeSource, settings: MountSettings, rng: Rng) -> None:
        self.kernel = kernel
        self.source = source
        self.settings = settings
        self.rng = rng
        self.now = 100.0
        self.log = bytearray()
        self.deaths = 0
        self.death_chance = 0.0
        self.failure_chance = 0.0
        self.late_chance = 0.0
        self.delay_s = 0.01
        self.answered: Counter[str] = Counter()
        self.on_decided: Callable[[], None] = lambda: None
        self.core = MountCore(settings)
        self.signals = Signals(kernel.is_ending)
        self._ticked = self.now
        self._main: deque[Effect] = deque()
        self._threads: list[deque[Effect]] = []
        self._jobs: list[_Job] = []
        self._tells: deque[tuple[int, deque[bytes]]] = deque()
        self.begin()

    # -- a daemon's life -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Another daemon goes on."""
        self.core = MountCore(self.settings)
        self.signals = Signals(self.kernel.is_ending)  # each request is a thread's of its own
        whole = whole_bytes(self.log)
        del self.log[whole:]
        self.core.restore(records(bytes(self.log)))
        wall_ns = 1_600_000_000_000_000_000 + (self.deaths << 30)  # which goes on
        self._decide(self.core.begin(wall_ns, self.now), self._main)
        while self._main:  # before anything is read
            self._carry_out(self._main.popleft())
        if self.core.is_taken_over:
            self.kernel.now = self.now
            self.kernel.write(answers.send_again())

    def die(self) -> None:
        """Killed: what is written stays written."""
        self.deaths += 1
        self._main.clear()
        self._threads.clear()
        self._jobs.clear()
        self._tells.clear()
        while True:
            try:
                self.begin()
                return
            except Died:
                self.deaths += 1

    def rewrite_log(self) -> None:
        """As when it has become too long."""
        self.log = bytearray(b"".join(self.core.snapshot()))

    def run(self, steps: int) -> bool:
        """Go on for so many steps; False: there was nothing left to do."""
        for _ in range(steps):
            try:
                if not self.step():
                    return False
                if self.death_chance and self.rng.chance(self.death_chance):
                    raise Died
            except Died:
                self.die()
        return True

    def settle(self, steps: int = 100_000) -> None:
        """Go on until there is nothing to do."""
        assert not self.run(steps), "the daemon does not come to rest"

    # -- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One thing that can be done now, or time goes by until one can."""
        if self.now >= self._ticked + TICK_S:
            self._ticked = self.now
            thread: deque[Effect] = deque()
            self._decide(self.core.tick(self.now) + self._interrupted(), thread)
            self._threads.append(thread)
        can = self._possible()
        if not can:
            due = [job.due for job in self._jobs]
            if not due and not self._tells:
                return False
            self.now = max(self.now, min([*due, self._ticked + TICK_S]))
            self.kernel.now = self.now
            return True
        self.now += 0.001
        self.kernel.now = self.now
        self.rng.choice(can)()
        return True

    def _possible(self) -> list[Callable[[], None]]:
        can: list[Callable[[], None]] = []
        if self._main or self.kernel.has_requests:
            can.append(self._go_on_reading)
        self._threads = [one for one in self._threads if one]
        if self._threads:
            can.append(self._go_on_answering)
        if any(job.due <= self.now for job in self._jobs):
            can.append(self._go_on_finding)
        if self._tells and not self._is_told_to_wait():
            can.append(self._go_on_telling)
        return can

    def _go_on_reading(self) -> None:
        if self._main:
            self._carry_out(self._main.popleft())
        else:
            self._decide(self._step(self._read()), self._main)

    def _step(self, request: Request) -> list[Effect]:
        if isinstance(request.body, Interrupt):
            self.signals.signal(request.body.unique)
            return self._interrupted()
        effects, unique = self.core.step(request, self.now), request.header.unique
        if unique in self.core.state.waiting:
            self.signals.asks(unique, unique, self.core.state.waiting)
        return effects

    def _interrupted(self) -> list[Effect]:
        ending = self.signals.ending(self.core.state.waiting)
        return [effect for unique in ending for effect in self.core.interrupt(unique)]

    def _read(self) -> Request:
        return parse(self.kernel.read())

    def _fails(self, _: Question) -> bool:
        return self.rng.chance(self.failure_chance)

    def _go_on_answering(self) -> None:
        self._carry_out(self.rng.choice(self._threads).popleft())

    def _go_on_finding(self) -> None:
        job = self.rng.choice([job for job in self._jobs if job.due <= self.now])
        if not job.is_found:
            if self.core.state.waiting.gives_up(job.number):
                self._jobs.remove(job)
                self.answered["given up"] += 1
                return
            job.is_found = True
            if self._fails(job.question):
                job.answer = Failed(self.rng.choice(FAILURES))
            else:
                job.answer = self.source.answer(job.question)
            job.due = self.now + self._delay_s(job.question)
            return
        self._jobs.remove(job)
        self._answer(job.number, job.answer)

    def _is_told_to_wait(self) -> bool:
        """The notice that comes next: the kernel would have it wait."""
        _, notices = self._tells[0]
        return bool(notices) and bool(self.kernel.locks[parent_of(notices[0])])

    def _go_on_telling(self) -> None:
        number, notices = self._tells[0]
        if notices:
            assert self.kernel.write(notices.popleft()) != errno.EAGAIN
        else:
            self._tells.popleft()
            self._answer(number, None)

    def _answer(self, number: int, answer: object) -> None:
        thread: deque[Effect] = deque()
        self._threads.append(thread)
        self._decide(self.core.answered(number, answer, self.now), thread)

    def _decide(self, effects: list[Effect], thread: deque[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Remember):
                self._remember(effect.record)
            else:
                thread.append(effect)
        self.on_decided()

    def _remember(self, record: bytes) -> None:
        if self.death_chance and self.rng.chance(self.death_chance):
            self.log += record[: self.rng.below(len(record) + 1)]
            raise Died
        self.log += record

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Reply(parts):
                if self.kernel.write(b"".join(parts)):
                    self.answered["nobody"] += 1
            case Ask(number, Tell(notices)):
                self._tells.append((number, deque(notices)))
            case Ask(number, question):
                self._jobs.append(_Job(number, question, self.now + self._delay_s(question)))
            case CloseBacking(backing_id):
                self.kernel.close_backing(backing_id)
            case CloseOtherBackings(kept):
                for backing_id in self.kernel.backing.keys() - kept:
                    self.kernel.close_backing(backing_id)
            case Agreed():
                pass
            case _:
                raise AssertionError(effect)

    def _delay_s(self, _: Question) -> float:
        if self.rng.chance(self.late_chance):
            return self.rng.uniform(0.0, 2 * self.settings.timeout_s)
        return self.rng.uniform(0.0, self.delay_s)


def parent_of(notice: bytes) -> int:
    """The folder that a notice is about."""
    return int.from_bytes(notice[16:24], "little")
