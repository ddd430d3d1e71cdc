"""Which workers of a running world are slow, by the time of their own work per step.

In synchronous training every rank's step lasts as long as the slowest one's, so step times say nothing about who is
slow. What does is the time from a commit until a rank's own gradients are ready, which holds no waiting for others. A
worker's score is the moving average of that time over the median of its world.

A worker is called a straggler when its score has stayed at or above `ratio` over a window of both steps and seconds,
and is no longer one when it has stayed below the lower `release_ratio` as long. Between the two nothing changes. In
worlds of one or two nobody is judged: of two, nothing says which of them is the normal one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

STRAGGLER_RATIO = 1.5
RELEASE_SHARE = 0.8
"""By default a straggler is released below this share of `ratio`."""
WINDOW_STEPS = 20
WINDOW_S = 30.0
SETTLING_STEPS = 3
"""Steps of a world that count for nobody: caches are cold, kernels are chosen, code is compiled."""
NEW_WEIGHT = 0.1
"""Weight of the newest step in the moving average."""
WORLD_JUDGED = 3
"""Fewest workers of a world in which anybody is judged."""


@dataclass(frozen=True)
class StragglerChange:
    """A worker became a straggler, or is none any more."""

    worker: str
    slow: bool
    score: float
    """Its own work per step, in medians of its world."""
    why: str


@dataclass
class _Pace:
    commits: int
    busy_s: float
    steps: int = 0
    """Steps of this world that it has reported."""
    step_s: float = 0.0
    """Moving average of its own work per step; 0: nothing counted yet."""
    turned_at: float | None = None
    """Since when its score is on the other side of the bound."""
    turned_steps: int = 0
    """Its `steps` at that time."""


class StragglerScores:
    """Scores of one job's workers. Pure: `now` is an argument.

    Reports are cumulative, so that lost, doubled and late ones do no harm.
    """

    def __init__(
        self,
        *,
        ratio: float = STRAGGLER_RATIO,
        release_ratio: float | None = None,
        window_steps: int = WINDOW_STEPS,
        window_s: float = WINDOW_S,
    ) -> None:
        self.ratio = ratio
        self.release_ratio = RELEASE_SHARE * ratio if release_ratio is None else release_ratio
        self.window_steps = window_steps
        self.window_s = window_s
        self._ranks: dict[str, int] = {}
        self._paces: dict[str, _Pace] = {}
        self._slow: set[str] = set()

    @property
    def stragglers(self) -> frozenset[str]:
        """The workers that are called slow now."""
        return frozenset(self._slow)

    def begin_world(self, ranks: Mapping[str, int]) -> None:
        """A new world: worker → rank. Averages start anew, since each one's share of the batch is another."""
        self._ranks = dict(ranks)
        self._paces = {}
        self._slow &= set(ranks)

    def observe(self, worker: str, commits: int, busy_s: float) -> None:
        """A worker's counters so far: its commits, and the seconds of its own work in all of them."""
        if worker not in self._ranks:
            return
        pace = self._paces.get(worker)
        if pace is None or commits < pace.commits or busy_s < pace.busy_s:
            self._paces[worker] = _Pace(commits, busy_s)
            return
        steps, spent_s = commits - pace.commits, busy_s - pace.busy_s
        if steps == 0:
            return
        pace.commits, pace.busy_s = commits, busy_s
        if pace.steps >= SETTLING_STEPS:
            kept = (1 - NEW_WEIGHT) ** steps if pace.step_s > 0 else 0.0
            pace.step_s = kept * pace.step_s + (1 - kept) * spent_s / steps
        pace.steps += steps

    def tick(self, now: float) -> list[StragglerChange]:
        """Judge everybody; each change is told once. Call it about once a second: it looks at every worker."""
        times = self._step_times()
        if len(times) < WORLD_JUDGED:
            return []
        middle_s = median(times.values())
        changes = []
        for worker, own_s in times.items():
            pace, score, was_slow = self._paces[worker], own_s / middle_s, worker in self._slow
            turned = score < self.release_ratio if was_slow else score >= self.ratio
            if not turned:
                pace.turned_at = None
                continue
            if pace.turned_at is None:
                pace.turned_at, pace.turned_steps = now, pace.steps
            steps, lasted_s = pace.steps - pace.turned_steps, now - pace.turned_at
            if steps < self.window_steps or lasted_s < self.window_s:
                continue
            pace.turned_at = None
            self._slow ^= {worker}
            why = (
                f"rank {self._ranks[worker]} takes {score:.1f} x the median's {middle_s:.2g} s a step "
                f"{'again ' if was_slow else ''}for {steps} steps ({lasted_s:.0f} s)"
            )
            changes.append(StragglerChange(worker, not was_slow, score, why))
        return changes

    def scores(self) -> dict[str, float]:
        """Each worker's own work per step, in medians; of those that have been measured."""
        times = self._step_times()
        middle_s = median(times.values()) if times else 0.0
        return {worker: own_s / middle_s for worker, own_s in times.items()}

    def _step_times(self) -> dict[str, float]:
        return {worker: pace.step_s for worker, pace in self._paces.items() if pace.step_s > 0}
