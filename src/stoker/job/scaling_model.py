"""How fast a run is at each number of nodes: windows measured between commits, and a curve through them. PURE.

`scaling_curve` fits it. That needs NumPy, which is not imported before there is something to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

WINDOW_S = 10.0
WARMUP_STEPS = 3
"""Steps of a new world that are not counted: caches, allocators and prefetchers fill up."""
STEPS_MIN = 3
WINDOWS_MIN = 4
"""Windows of one size before its median means anything."""
WINDOWS_KEPT = 30
ERROR_MIN = 0.01
"""Two visits to one size never measure quite the same, however steady each was: at least this share of the median."""
LEAST_STEP_S = 1e-9
"""No prediction is shorter, so that it can be divided by: a curve that only rises begins with 0 on one node."""


class Window(NamedTuple):
    """A stretch of one generation between two commits, without any pause in it."""

    generation: int
    nodes: int
    steps: int
    seconds: float
    ended: float
    """When, seconds on the caller's clock."""


class Pause(NamedTuple):
    """The time that a change of the world, planned or not, took from the steps."""

    generation: int
    """The one that began."""
    nodes_before: int
    nodes_after: int
    seconds: float
    """From the last commit of the old world to the first of the new one, less one step."""
    ended: float


@dataclass
class Meter:
    """Cuts the progress of a run into windows and pauses. Times are seconds on the caller's clock."""

    window_s: float = WINDOW_S
    warmup_steps: int = WARMUP_STEPS
    _generation: int = -1
    _nodes: int = 0
    _commits: int = 0
    _commits_at_start: int = 0
    _last_commit_at: float | None = None
    _step_s: float = 0.0
    _left: tuple[int, float] | None = None
    """Nodes of the world before, and when it committed last; until the new one has committed."""
    _begun: tuple[int, float] | None = None
    """Commits and time at which the open window began."""

    def note(self, *, generation: int, nodes: int, commits: int, now: float) -> Window | Pause | None:
        """What is known of the run now; `commits` count from its start. Returns what has ended by it."""
        if generation != self._generation or nodes != self._nodes or commits < self._commits:
            self._enter(generation, nodes, commits)
            return None
        if commits == self._commits:
            return None
        made, self._commits, self._last_commit_at = commits - self._commits, commits, now
        if self._left is not None:
            nodes_before, left_at = self._left
            self._left = None
            lost_s = max(0.0, now - left_at - made * self._step_s)
            return Pause(generation, nodes_before, nodes, lost_s, now)
        if commits - self._commits_at_start < self.warmup_steps:
            return None
        if self._begun is None:
            self._begun = (commits, now)
            return None
        began_commits, began = self._begun
        steps, seconds = commits - began_commits, now - began
        if seconds < self.window_s or steps < STEPS_MIN:
            return None
        self._begun = (commits, now)
        self._step_s = seconds / steps
        return Window(generation, nodes, steps, seconds, now)

    def _enter(self, generation: int, nodes: int, commits: int) -> None:
        if self._last_commit_at is not None:
            self._left = (self._nodes, self._last_commit_at)
        self._generation, self._nodes = generation, nodes
        self._commits = self._commits_at_start = commits
        self._last_commit_at, self._begun = None, None


class Measured(NamedTuple):
    """What the windows of one size say."""

    nodes: int
    step_s: float
    """Median seconds per step."""
    error_s: float
    """Half the width of the interval that should hold the true median."""
    windows: int


def measure(windows: Sequence[Window]) -> tuple[Measured, ...]:
    """Median step time of each size that has enough windows, smallest first."""
    by_size: dict[int, list[float]] = {}
    for window in windows:
        by_size.setdefault(window.nodes, []).append(window.seconds / window.steps)
    return tuple(
        _summary(nodes, seconds[-WINDOWS_KEPT:])
        for nodes, seconds in sorted(by_size.items())
        if len(seconds) >= WINDOWS_MIN
    )


def _summary(nodes: int, seconds: Sequence[float]) -> Measured:
    middle, error_s = median_and_error(seconds)
    return Measured(nodes, middle, max(error_s, ERROR_MIN * middle), len(seconds))


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Median, and half the width of its 95 % interval from the median absolute deviation: an outlier moves neither.

    The factors are those of the normal distribution: its standard deviation is 1.4826 MAD, and a median scatters 1.2533
    times as much as a mean. The last one is for few values, of which MAD knows too little; it was found by trying: the
    interval holds the median in 90 of 100 cases with four values, in 95 from eight on. Raises
    statistics.StatisticsError for no values.
    """
    middle, count = median(values), len(values)
    spread = 1.4826 * median(abs(v - middle) for v in values)
    return middle, float(2 * 1.2533 * spread / count**0.5 * (1 + 4 / count))


class Curve(NamedTuple):
    """`t(n) = shared/n + fixed + each*(n - 1)`, in seconds per step."""

    shared_s: float
    fixed_s: float
    each_s: float

    def step_s(self, nodes: int) -> float:
        return max(LEAST_STEP_S, self.shared_s / nodes + self.fixed_s + self.each_s * (nodes - 1))

    def speedup(self, before: int, after: int) -> float:
        return self.step_s(before) / self.step_s(after)

    def efficiency(self, before: int, after: int) -> float:
        """What the nodes beyond `before` add each, as a share of what a node gave before: `scaling_efficiency`."""
        return scaling_efficiency(before, after, self.speedup(before, after))


def scaling_efficiency(before: int, after: int, speedup: float) -> float:
    """1: twice the nodes are twice as fast; 0: they change nothing; below 0: they slow the run down.

    The throughput scaling efficiency of Or, Zhang, Freedman (Resource Elasticity in Distributed Deep Learning, MLSys
    2020). On Amdahl's curve it is the share of the larger world's step that is shared work, whatever `before` was. On
    every curve of this file it is (p - r*before*after) / (after*t(after)): while it is positive it falls as worlds
    grow, so that there is one largest size that is worth a given share.
    """
    return (speedup - 1) / (after / before - 1)
