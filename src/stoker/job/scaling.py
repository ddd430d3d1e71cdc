"""`--auto-scale`: decide how many nodes the run has, from what it measures on itself. PURE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple

from stoker.errors import ConfigError
from stoker.job.scaling_advice import (
    DEFAULT_TARGET_EFFICIENCY,
    KEEP,
    PAUSES_KEPT,
    Advice,
    Limits,
    recommend,
)
from stoker.job.scaling_model import (
    WINDOWS_KEPT,
    WINDOWS_MIN,
    Measured,
    Meter,
    Pause,
    Window,
    measure,
    scaling_efficiency,
)

Mode = Literal["off", "recommend", "apply"]
RECENT = 8
OUTLIERS = 1
DRIFT = 1.2
"""Conditions have changed when the newest windows of a size, all but this many, are each slower than its older ones by
this factor, or each faster. Windows with an evaluation in them come one at a time."""


@dataclass(frozen=True)
class Policy:
    """What `--auto-scale` and its flags say. Raises ConfigError for a value that cannot be."""

    mode: Mode
    min_nodes: int
    max_nodes: int
    unit: int = 1
    target_efficiency: float = DEFAULT_TARGET_EFFICIENCY
    """Share of a node's usual work that the last nodes must still add; in (0, 1]."""
    cooldown_s: float = 60.0
    """Seconds after any change of the world, planned or not, in which no other is decided."""

    def __post_init__(self) -> None:
        if self.mode not in ("off", "recommend", "apply"):
            raise ConfigError(f"--auto-scale {self.mode}: give off, recommend or apply")
        if not 0 < self.target_efficiency <= 1:
            raise ConfigError(f"target efficiency {self.target_efficiency:g} must be above 0 and at most 1")
        if self.cooldown_s < 0:
            raise ConfigError(f"a cooldown of {self.cooldown_s:g} s must not be negative")
        Limits(self.min_nodes, self.max_nodes, self.unit)

    def limits(self, available: int) -> Limits:
        return Limits(self.min_nodes, self.max_nodes, self.unit, available)


class Trial(NamedTuple):
    """A change that has still to prove itself."""

    before: Measured
    after: int
    began: float


class AutoScaler:
    """Measures, advises and, with `apply`, changes the world and checks what came of it.

    Feed it `note` with every report of progress, and ask `decide` now and then; the caller carries the change out. Each
    change is a trial: a larger world whose nodes do not count is taken back, a smaller one that cost too much is
    undone, and neither is tried again until conditions change. So there are at most as many changes as sizes.
    """

    def __init__(self, policy: Policy, meter: Meter | None = None) -> None:
        self.policy = policy
        self.wanted = policy.limits(0).every_size()[0]
        """With `apply`: the size to keep. It begins with the smallest and is grown by what is measured."""
        self._meter = meter if meter is not None else Meter()
        self._windows: list[Window] = []
        self._pauses: list[Pause] = []
        self._began: float | None = None
        self._nodes = 0
        self._changed_at = 0.0
        self._ordered_at: float | None = None
        """When a change was decided that has not come about yet."""
        self._trial: Trial | None = None
        self._refuted_above: int | None = None
        """This size and larger ones have been tried and are not worth it."""
        self._refuted_below: int | None = None
        """This size and smaller ones have been tried and cost too much."""

    def note(self, *, generation: int, nodes: int, commits: int, now: float) -> None:
        """What is known of the run now; `commits` count from its start."""
        if self._began is None:
            self._began = now
        self._see_world(nodes, now)
        ended = self._meter.note(generation=generation, nodes=nodes, commits=commits, now=now)
        if isinstance(ended, Pause):
            self._pauses = [*self._pauses, ended][-PAUSES_KEPT:]
        elif ended is not None:
            self._add(ended)

    def measured(self) -> tuple[Measured, ...]:
        """Median step time of each size that has been seen for long enough, smallest first."""
        return measure(self._windows)

    def decide(self, *, nodes: int, available: int, now: float) -> Advice:
        """What should be done now. `nodes`: in the world; `available`: those and the ones that stand by.

        `change` in the answer is set once, with `apply` only; the caller then brings the world to `nodes`.
        """
        if self.policy.mode == "off":
            return Advice(nodes, "off", "auto-scale is off")
        self._see_world(nodes, now)
        available = max(available, nodes)
        if self.policy.mode == "recommend":
            return self._recommend(nodes, self.policy.limits(available), now)
        if self._ordered_at is not None:
            if now - self._ordered_at < self.policy.cooldown_s:
                return Advice(self.wanted, "wait", f"waiting for the world of {self.wanted}")
            self._ordered_at, self._trial, self.wanted = None, None, nodes
        if now - self._changed_at < self.policy.cooldown_s:
            why = f"measuring: a new world is left alone for {self.policy.cooldown_s:g} s"
            return Advice(nodes, "measure", why)
        advice = self._decide(nodes, available, now)
        return advice if advice.nodes == nodes else self._change(nodes, advice, now)

    def _decide(self, nodes: int, available: int, now: float) -> Advice:
        verdict = self._judge(nodes, available, now)
        if verdict is not None:
            return verdict
        limits = self._limits(nodes, available)
        advice = self._recommend(nodes, limits, now)
        floor, ceiling = self._refuted_below, self._refuted_above
        if floor is not None and advice.nodes <= floor < nodes:
            why = f"keep {nodes}: {floor} was tried and cost too much"
            return advice._replace(nodes=nodes, kind="keep", why=why, predicted_speedup=1.0)
        if advice.nodes == nodes == limits.every_size()[-1] and ceiling is not None:
            return advice._replace(why=f"keep {nodes}: {ceiling} was tried and is not worth it")
        return advice

    def _recommend(self, nodes: int, limits: Limits, now: float) -> Advice:
        return recommend(
            self._windows,
            limits,
            target_efficiency=self.policy.target_efficiency,
            now=now,
            nodes=nodes,
            pauses=self._pauses,
            began=self._began,
        )

    def _limits(self, nodes: int, available: int) -> Limits:
        """The user's limits, less the sizes that have been tried in vain."""
        limits = self.policy.limits(available)
        ceiling = self._refuted_above
        if ceiling is None or ceiling <= nodes:
            return limits
        below = max((n for n in limits.every_size() if n < ceiling), default=limits.every_size()[0])
        return replace(limits, max_nodes=below)

    def _judge(self, nodes: int, available: int, now: float) -> Advice | None:
        """The verdict on the change under trial; None when there is none, or it stands."""
        trial = self._trial
        if trial is None or nodes != trial.after:
            return None
        fresh = measure([w for w in self._windows if w.nodes == nodes and w.ended > trial.began])
        if not fresh:
            return None
        self._trial = None
        before, after, target = trial.before, fresh[0], self.policy.target_efficiency
        share, slack = _share_and_slack(before, after)
        if after.nodes > before.nodes and share + slack < KEEP * target:
            self._refuted_above = after.nodes
            back = self._recommend(before.nodes, self._limits(before.nodes, available), now)
            speedup = before.step_s / after.step_s
            why = (
                f"{after.nodes} nodes taken back: measured {speedup:.2f} times as fast as {before.nodes}, each node "
                f"added does {share:.0%} of a node's work, {target:.0%} is asked for; not tried again until conditions "
                "change"
            )
            return back._replace(nodes=max(before.nodes, back.nodes), kind="undo", why=why)
        if after.nodes < before.nodes and share - slack > target:
            self._refuted_below = after.nodes
            why = (
                f"back to {before.nodes} nodes: each one given up did {share:.0%} of a node's work, {target:.0%} is "
                f"asked for; {after.nodes} is not tried again until conditions change"
            )
            return Advice(self.policy.limits(available).nearest(before.nodes), "undo", why)
        if after.nodes < before.nodes:
            self._refuted_above = before.nodes
        return None

    def _change(self, nodes: int, advice: Advice, now: float) -> Advice:
        before = next((m for m in measure(self._windows) if m.nodes == nodes), None)
        is_return = nodes in (self._refuted_above, self._refuted_below)
        is_size = nodes in self.policy.limits(0).every_size()
        self._trial = Trial(before, advice.nodes, now) if before and is_size and not is_return else None
        self._ordered_at, self.wanted = now, advice.nodes
        return advice._replace(change=True)

    def _see_world(self, nodes: int, now: float) -> None:
        if nodes != self._nodes:
            self._nodes, self._changed_at = nodes, now
            if nodes == self.wanted:
                self._ordered_at = None

    def _add(self, window: Window) -> None:
        self._windows.append(window)
        same = [w for w in self._windows if w.nodes == window.nodes]
        if len(same) > WINDOWS_KEPT:
            self._windows.remove(same.pop(0))
        if _has_drifted(same):
            self._windows = same[-RECENT:]
            self._trial = self._refuted_above = self._refuted_below = None


def _has_drifted(same: list[Window]) -> bool:
    """Whether the size of these windows has become faster or slower, by more than noise."""
    steps_s = [w.seconds / w.steps for w in same]
    older, recent = steps_s[:-RECENT], steps_s[-RECENT:]
    if len(older) < WINDOWS_MIN:
        return False
    usual = median(older)
    slower = sum(s > usual * DRIFT for s in recent)
    faster = sum(s < usual / DRIFT for s in recent)
    return max(slower, faster) >= RECENT - OUTLIERS


def _share_and_slack(before: Measured, after: Measured) -> tuple[float, float]:
    """Scaling efficiency between two measured sizes, and how far it may be off."""
    small, large = sorted((before, after), key=lambda m: m.nodes)
    speedup = small.step_s / large.step_s
    error = speedup * (small.error_s / small.step_s + large.error_s / large.step_s)
    return scaling_efficiency(small.nodes, large.nodes, speedup), error / (large.nodes / small.nodes - 1)
