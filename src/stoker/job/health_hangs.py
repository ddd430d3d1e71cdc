"""Hang detection: when does a world stand still, and through whom?

A world *hangs* when none of its workers has made any progress (a commit, a batch, a collective) for a limit: the
longer of `least_s` and ten median steps; for the one user-facing timeout while any of its workers has not committed
in its life yet, since first steps compile. Then the stacks of all its workers are looked at, a few samples each:

1. A stopped process is the culprit.
2. A rank whose main thread waits in a collective is a victim; of the others those stand accused that are least
   excused by where they stand, and of these the one with strictly the least progress, if there is one.
3. If all stand alike, it is the rank with strictly the least progress, or the one that stands elsewhere than the rest.
4. An accused whose stacks differ between the samples is slow, not hung: a warning, and another look after twice the
   time. If they are alike but its main thread is put on a processor now and then (one long computation, or a loop that
   waits in vain), or there are no stacks, it gets another look first, half the limit later.
5. If nobody stands out, nobody is to blame (a lost packet, a bug in the network): the world is broken up and formed
   again, once. If it comes to that again before another commit, the network may be away for longer: such a world has
   the user-facing timeout, then the job fails with the stacks. If all stand in one function of their own and none in a
   collective, breaking it would wake nobody: they may read from a storage that does not answer. They are left alone for
   the user-facing timeout, too; then the job fails.

A worker that does not become ready within the user-facing timeout is looked at by itself, by rule 1 and rule 4.

Rule 2 takes a rank's place before its progress, since a rank may have handed out more batches than the others exactly
because it evaluates alone, and hangs there, while they wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stoker.job.health_stacks import (
    Standing,
    describe,
    format_stacks,
    format_world,
    function,
    has_stacks,
    is_awake,
    is_stopped,
    moved,
    name_ranks,
    standing,
)
from stoker.wire.health import StackRequest, Stacks

LEAST_S = 60.0
STEPS_MISSED = 10.0
SAMPLES = 3
INTERVAL_S = 1.0
REPLY_S = 15.0
"""Seconds beyond the sampling itself in which stacks must have come."""
NAMED = 3


@dataclass(frozen=True)
class TakeStacks:
    """Have the stacks of these workers taken."""

    request: StackRequest
    why: str


@dataclass(frozen=True)
class Hung:
    """This worker keeps the others waiting and does not move: it has to go."""

    worker: str
    why: str
    stacks: str
    """For people: its threads."""
    world: str = ""
    """For people: the main threads of all ranks; of several that hung together the first one has it."""


@dataclass(frozen=True)
class Slow:
    """No progress, but no hang either as far as can be seen: a warning."""

    worker: str
    why: str


@dataclass(frozen=True)
class BreakWorld:
    """Nobody stands out: form the world again out of the same workers."""

    why: str
    stacks: str


@dataclass(frozen=True)
class GiveUp:
    """The world hangs again and nobody is to blame: the job fails."""

    why: str
    stacks: str


HangEffect = TakeStacks | Hung | Slow | BreakWorld | GiveUp


@dataclass
class _Look:
    """Stacks that were asked for."""

    number: int
    workers: tuple[str, ...]
    began: float
    limit_s: float
    deadline: float
    dumps: dict[str, tuple[Stacks, ...]] = field(default_factory=dict)


@dataclass
class _Subject:
    """A world, or a worker that starts: what is looked at when it stands still."""

    still_since: float
    looks: int = 0
    """Looks since it stands still."""
    look_at: float = 0.0
    """No look before this time."""
    unsure: bool = False
    """The accused have been given another look, once."""
    open: _Look | None = None
    last: _Look | None = None
    """The look before; stacks are compared with its, too."""

    def alive(self, now: float) -> None:
        self.still_since, self.looks, self.look_at, self.unsure = now, 0, 0.0, False
        self.open = self.last = None

    def samples(self, worker: str) -> tuple[Stacks, ...]:
        """All samples of the last two looks."""
        return tuple(
            stacks for look in (self.last, self.open) if look for stacks in look.dumps.get(worker, ())
        )


class HangWatch:
    """Watches one job's worlds and its starting workers. Pure: `now` is an argument."""

    def __init__(
        self, *, user_timeout_s: float, least_s: float = LEAST_S, interval_s: float = INTERVAL_S
    ) -> None:
        self.user_timeout_s = user_timeout_s
        self.least_s = least_s
        self.interval_s = interval_s
        self._world: _Subject | None = None
        self._ranks: dict[str, int] = {}
        """Members that have not finished."""
        self._begun_at_commit = 0
        self._counters: dict[str, tuple[int, int]] = {}
        self._stepped: set[str] = set()
        """Workers that have committed in their life."""
        self._starting: dict[str, _Subject] = {}
        self._broken_at_commit: int | None = None
        self._last_look = 0

    # -- what happens -------------------------------------------------------------------------------------

    def begin_world(self, ranks: Mapping[str, int], commits: int, now: float) -> None:
        """A world of these workers (worker → rank) goes on from this commit."""
        self._ranks = dict(ranks)
        self._world = _Subject(now)
        self._begun_at_commit = commits
        self._counters = {}

    def end_world(self) -> None:
        """The world is being left: nothing is watched until the next one."""
        self._world = None
        self._ranks = {}

    def observe(self, worker: str, commits: int, progress: int, now: float) -> None:
        """A member's counters. `progress`: batches handed out and collectives entered *since its last commit*.

        Counted from the commit, the ranks' values can be compared, whatever each has done before.
        """
        if self._world is None or worker not in self._ranks:
            return
        if self._counters.get(worker) != (commits, progress):
            self._counters[worker] = (commits, progress)
            self._world.alive(now)
        if commits > self._begun_at_commit:
            self._stepped.add(worker)
        if self._broken_at_commit is not None and commits > self._broken_at_commit:
            self._broken_at_commit = None

    def finished(self, worker: str, now: float) -> None:
        """A member has come to the end of its script: the others are watched without it."""
        if self._ranks.pop(worker, None) is not None and self._world is not None:
            self._world.alive(now)

    def started(self, worker: str, now: float) -> None:
        """A worker process was started: it has to become ready."""
        self._starting.setdefault(worker, _Subject(now))

    def ready(self, worker: str) -> None:
        """It is ready."""
        self._starting.pop(worker, None)

    def gone(self, worker: str, now: float) -> None:
        """A worker ended."""
        self._starting.pop(worker, None)
        self._stepped.discard(worker)
        self.finished(worker, now)

    def stood_still(self, now: float) -> None:
        """Nothing was heard for a while, for the watcher itself was stopped."""
        for subject in [self._world, *self._starting.values()]:
            if subject is not None:
                subject.alive(now)

    def tick(self, now: float, median_step_s: float) -> list[HangEffect]:
        """Ask for stacks where something stands still, and judge those whose time to come is over."""
        effects: list[HangEffect] = []
        if self._world is not None and self._ranks:
            limit_s = self.limit_s(median_step_s)
            what = f"no progress of any of {len(self._ranks)} workers"
            effects += self._watch(self._world, self._ranks, limit_s, what, now)
        for worker, subject in list(self._starting.items()):
            effects += self._watch(subject, {worker: 0}, self.user_timeout_s, f"{worker} is not ready", now)
        return effects

    def on_stacks(self, look: int, worker: str, samples: Sequence[Stacks], now: float) -> list[HangEffect]:
        """The samples of one worker, oldest first; those of an older look change nothing."""
        for subject in [self._world, *self._starting.values()]:
            found = subject.open if subject is not None else None
            if subject is None or found is None or found.number != look or worker not in found.workers:
                continue
            found.dumps[worker] = tuple(samples)
            present = [w for w in found.workers if w in self._ranks or w in self._starting]
            if all(w in found.dumps for w in present):
                return self._judge(subject, now)
        return []

    def limit_s(self, median_step_s: float) -> float:
        """Seconds without progress after which the world is looked at."""
        limit_s = max(self.least_s, STEPS_MISSED * median_step_s)
        return limit_s if self._ranks.keys() <= self._stepped else max(limit_s, self.user_timeout_s)

    # -- looks --------------------------------------------------------------------------------------------

    def _watch(
        self, subject: _Subject, ranks: Mapping[str, int], limit_s: float, what: str, now: float
    ) -> list[HangEffect]:
        if subject.open is not None:
            return self._judge(subject, now) if now >= subject.open.deadline else []
        still_s = now - subject.still_since
        if still_s < limit_s or now < subject.look_at:
            return []
        workers = tuple(sorted(ranks, key=lambda worker: ranks[worker]))
        self._last_look += 1
        subject.looks += 1
        subject.look_at = now + limit_s * 2**subject.looks
        sampling_s = (SAMPLES - 1) * self.interval_s
        subject.open = _Look(self._last_look, workers, now, limit_s, now + sampling_s + REPLY_S)
        request = StackRequest(self._last_look, workers, SAMPLES, self.interval_s)
        return [TakeStacks(request, f"{what} for {still_s:.0f} s (limit {limit_s:.0f} s): taking stacks")]

    def _judge(self, subject: _Subject, now: float) -> list[HangEffect]:
        look = subject.open
        assert look is not None
        still_s = now - subject.still_since
        effects = (
            self._judge_world(subject, look, still_s)
            if subject is self._world
            else self._judge_start(subject, look.workers[0], still_s)
        )
        subject.last, subject.open = look, None
        return effects

    def _judge_start(self, subject: _Subject, worker: str, still_s: float) -> list[HangEffect]:
        samples = subject.samples(worker)
        words = f"{worker} is not ready after {still_s:.0f} s"
        if not is_stopped(samples) and self._has_respite(subject, [worker]):
            return [Slow(worker, f"{words} but {_is_busy(samples)}")]
        return [Hung(worker, f"{words} and {_stands(samples)}", _text(samples))]

    def _judge_world(self, subject: _Subject, look: _Look, still_s: float) -> list[HangEffect]:
        members = {worker: look.dumps.get(worker, ()) for worker in look.workers if worker in self._ranks}
        words = f"has not stepped for {still_s:.0f} s"
        stopped = [worker for worker, samples in members.items() if is_stopped(samples)]
        accused, reason = (stopped, "") if stopped else self._accuse(members)
        working = [w for w, samples in members.items() if standing(samples) is not Standing.WAITS]
        if not stopped and (busy := self._has_respite(subject, accused or working)):
            return [
                Slow(worker, f"{self._rank(worker)} {words} but {_is_busy(subject.samples(worker))}")
                for worker in busy[:NAMED]
            ]
        if not accused:
            return [self._nobody(subject, members, still_s)]
        whys = {
            w: " ".join([self._rank(w), words, "and", _stands(members[w]), reason]).rstrip() for w in accused
        }
        world = format_world(members, {worker: self._ranks[worker] for worker in members})
        return [
            Hung(worker, why, _text(members[worker]), world if worker == accused[0] else "")
            for worker, why in whys.items()
        ]

    def _has_respite(self, subject: _Subject, workers: Sequence[str]) -> list[str]:
        """Those of the accused that move; if none does, once, those that may be about to."""
        busy = [worker for worker in workers if moved(subject.samples(worker))]
        look = subject.open
        if look is None or busy or subject.unsure:
            return busy
        dumps = {worker: look.dumps.get(worker, ()) for worker in workers}
        busy = [worker for worker, samples in dumps.items() if is_awake(samples) or not has_stacks(samples)]
        if busy:
            subject.unsure = True
            subject.look_at = look.began + look.limit_s / 2
        return busy

    def _nobody(
        self, subject: _Subject, members: Mapping[str, Sequence[Stacks]], still_s: float
    ) -> HangEffect:
        ranks = {worker: self._ranks[worker] for worker in members}
        where, often = Counter(describe(samples) for samples in members.values()).most_common(1)[0]
        what = f"no worker has stepped for {still_s:.0f} s: {often} of {len(members)} stand in {where}"
        text = format_world(members, ranks)
        working = all(standing(samples) is Standing.WORKS for samples in members.values())
        if working and len({function(samples) for samples in members.values()}) == 1:
            return self._wait_for_timeout(subject, members, still_s, f"{what}, none waits for another", text)
        if self._broken_at_commit is not None:
            words = f"{what}; nobody is to blame, and forming the world again has not helped"
            return self._wait_for_timeout(subject, members, still_s, words, text)
        counted = [counters[0] for counters in self._counters.values()]
        self._broken_at_commit = max(counted, default=self._begun_at_commit)
        return BreakWorld(f"{what}; nobody is to blame: forming the world again", text)

    def _wait_for_timeout(
        self, subject: _Subject, members: Mapping[str, object], still_s: float, words: str, text: str
    ) -> HangEffect:
        """Nothing is left to be done, but the user-facing timeout may not be over."""
        if still_s >= self.user_timeout_s:
            return GiveUp(f"{words}, and the timeout of {self.user_timeout_s:.0f} s is over", text)
        subject.look_at = min(subject.look_at, subject.still_since + self.user_timeout_s)
        return Slow(next(iter(members)), words)

    # -- who ----------------------------------------------------------------------------------------------

    def _accuse(self, members: Mapping[str, Sequence[Stacks]]) -> tuple[list[str], str]:
        """Whom the stacks and counters point at, and how."""
        standings = {worker: standing(samples) for worker, samples in members.items()}
        worst = max(standings.values())
        accused = [worker for worker, level in standings.items() if level is worst]
        least = self._least(members)
        if len(members) / 2 < len(accused) < len(members) and least not in accused:
            return [], ""  # most of them would have to go, and nothing but their place is against them
        if len(accused) < len(members):
            waiting = name_ranks(self._ranks[w] for w in members if w not in accused)
            reason = f"while {waiting} {'wait' if len(members) - len(accused) > 1 else 'waits'}"
            return ([least], f"{reason}, and is behind them") if least in accused else (accused, reason)
        if len(members) == 1:
            return accused, ""
        if least is not None:
            return [least], f"and is behind the others ({self._counted(least)})"
        if worst is Standing.WAITS:
            return [], ""
        odd = _odd_one_out(members)
        return ([odd], "while all others stand elsewhere") if odd is not None else ([], "")

    def _least(self, members: Mapping[str, Sequence[Stacks]]) -> str | None:
        """The one with strictly the least progress."""
        counters = {worker: self._counters.get(worker, (self._begun_at_commit, 0)) for worker in members}
        lowest = min(counters.values())
        behind = [worker for worker, counted in counters.items() if counted == lowest]
        return behind[0] if len(behind) == 1 and len(members) > 1 else None

    def _counted(self, worker: str) -> str:
        commits, progress = self._counters.get(worker, (self._begun_at_commit, 0))
        return f"commit {commits} and {progress} batches and collectives"

    def _rank(self, worker: str) -> str:
        return f"rank {self._ranks[worker]} ({worker})"


def _odd_one_out(members: Mapping[str, Sequence[Stacks]]) -> str | None:
    """The one worker that stands elsewhere than all the others, who stand in one place; of three and more."""
    places = {worker: describe(samples) for worker, samples in members.items()}
    counted = Counter(places.values())
    alone = [worker for worker, place in places.items() if counted[place] == 1]
    return alone[0] if len(counted) == 2 and len(alone) == 1 and len(members) > 2 else None


def _is_busy(samples: Sequence[Stacks]) -> str:
    return f"{'is' if moved(samples) else 'may be'} busy in {describe(samples)}"


def _stands(samples: Sequence[Stacks]) -> str:
    if is_stopped(samples):
        return "is stopped by a signal (state T)"
    return f"stands in {describe(samples)}" if has_stacks(samples) else f"shows {describe(samples)}"


def _text(samples: Sequence[Stacks]) -> str:
    return format_stacks(samples[-1]) if samples else "no stacks came"
