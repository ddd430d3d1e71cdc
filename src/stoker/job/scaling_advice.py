"""How many nodes a run should have: a plain function of what was measured. PURE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from stoker.base.units import format_duration
from stoker.errors import ConfigError
from stoker.job.scaling_model import (
    WINDOWS_MIN,
    Curve,
    Measured,
    Pause,
    Window,
    measure,
)

if TYPE_CHECKING:
    from stoker.job.scaling_curve import Band

DEFAULT_TARGET_EFFICIENCY = 0.5
KEEP = 0.8
"""A world is made smaller only when its last nodes give less than this share of the target: between the two thresholds
nothing changes, so that noise does not move the world to and fro."""
REACH = 2
"""No advice beyond this many times the largest measured world: predictions far from measurements are worth little."""
SMALLEST_CHANGE = 0.2
"""Share of the nodes below which a change is not worth its pause, and could not be told from noise afterwards."""
PAYBACK = 2
"""A change must save this many times its pause: it may have to be taken back."""
DEFAULT_PAUSE_S = 5.0
"""What a change of the world is taken to cost until one has been measured."""
PAUSES_KEPT = 9


@dataclass(frozen=True)
class Limits:
    """What sizes a world may have.

    `available`: nodes that are in the world or stand by. Raises ConfigError when no size is possible at all.
    """

    min_nodes: int
    max_nodes: int
    unit: int = 1
    """Sizes are multiples of this."""
    available: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes or self.unit < 1:
            raise ConfigError(
                f"no world has {self.min_nodes} to {self.max_nodes} nodes in units of {self.unit}: give "
                "1 <= MIN <= MAX and a unit of at least 1"
            )
        if not self.every_size():
            raise ConfigError(
                f"between {self.min_nodes} and {self.max_nodes} nodes there is no multiple of {self.unit}: change "
                "--nnodes or the unit"
            )

    def every_size(self) -> range:
        """All sizes between the limits, whether nodes are there or not."""
        first = -(-self.min_nodes // self.unit) * self.unit
        return range(first, self.max_nodes + 1, self.unit)

    def sizes(self) -> range:
        """The sizes for which there are nodes; the smallest of all when there are too few even for that."""
        every = self.every_size()
        possible = range(every.start, min(self.max_nodes, self.available) + 1, self.unit)
        return possible or every[:1]

    def nearest(self, nodes: int) -> int:
        """The largest possible size that is at most `nodes`; the smallest where there is none."""
        return max((n for n in self.sizes() if n <= nodes), default=self.sizes()[0])


Kind = Literal["off", "measure", "wait", "keep", "explore", "grow", "shrink", "undo"]


class Advice(NamedTuple):
    """How many nodes the run should have now, and why."""

    nodes: int
    kind: Kind
    """What sort of advice it is. The figures in `why` move with each measurement, this does not."""
    why: str
    predicted_speedup: float | None = None
    """Of that size over the present one; None: not known."""
    confidence: float = 0.0
    """Least over greatest speed that the measurements allow at that size: 1 is certain, 0 is a guess."""
    change: bool = False
    """The world is to be changed to this size now: `--auto-scale apply`."""


def recommend(
    windows: Sequence[Window],
    limits: Limits,
    *,
    target_efficiency: float = DEFAULT_TARGET_EFFICIENCY,
    now: float,
    nodes: int | None = None,
    pauses: Sequence[Pause] = (),
    began: float | None = None,
) -> Advice:
    """The largest world whose last nodes still give at least `target_efficiency` of what a node gives before them.

    `target_efficiency` is in (0, 1]: near 0 asks for the fastest world, 1 for no waste. `nodes`: the present size, by
    default that of the newest window. `began`: when the run did, if that was before the first window; it is taken to
    last as long again as it has lasted. `now` and `began` are on the clock of the windows, in seconds.

    Raises ConfigError for a target outside (0, 1].
    """
    if not 0 < target_efficiency <= 1:
        raise ConfigError(f"target efficiency {target_efficiency:g} must be above 0 and at most 1")
    if nodes is None:
        nodes = windows[-1].nodes if windows else limits.sizes()[0]
    stay = limits.nearest(nodes)
    if stay != nodes:
        why = f"{_nodes(nodes)} is not a size that is allowed: {_range(limits)}"
        return Advice(stay, "shrink" if stay < nodes else "grow", why)
    measured = measure(windows)
    here = next((m for m in measured if m.nodes == nodes), None)
    if here is None:
        seen = sum(w.nodes == nodes for w in windows)
        return Advice(nodes, "measure", f"measuring: {seen} of {WINDOWS_MIN} windows at {_nodes(nodes)}")
    lasted_s = max(0.0, now - (began if began is not None else windows[0].ended - windows[0].seconds))
    run = _Run(here, limits, _pause_s(pauses), lasted_s)
    if len(measured) == 1:
        return _explore(run)
    from stoker.job.scaling_curve import band, fit  # NumPy takes as long to import as all else of a master

    curve = fit(measured)
    return _advise(run, curve, band(measured, curve), target_efficiency, [m.nodes for m in measured])


class _Run(NamedTuple):
    """Where the run stands."""

    here: Measured
    limits: Limits
    pause_s: float
    lasted_s: float
    """It is taken to go on for as long as it has lasted."""

    def pays(self, speedup: float) -> bool:
        return self.lasted_s * (1 - 1 / speedup) > PAYBACK * self.pause_s


def _explore(run: _Run) -> Advice:
    """One size says nothing about others: try a larger one while nodes stand by."""
    nodes = run.here.nodes
    larger = [n for n in run.limits.sizes() if nodes < n <= max(REACH * nodes, nodes + run.limits.unit)]
    if not larger:
        why = f"only {_nodes(nodes)} measured so far and no more stand by: there is nothing to compare with"
        return Advice(nodes, "keep", why, predicted_speedup=1.0, confidence=1.0)
    wanted = larger[-1]
    if not run.pays(wanted / nodes):
        pause, lasted = format_duration(run.pause_s), format_duration(run.lasted_s)
        why = f"keep {_nodes(nodes)}: trying {wanted} costs a pause of {pause}, and the run has only lasted {lasted}"
        return Advice(nodes, "keep", why, predicted_speedup=1.0, confidence=1.0)
    why = f"only {_nodes(nodes)} measured so far and {wanted - nodes} more stand by: try {wanted} for a while"
    return Advice(wanted, "explore", why)


def _advise(run: _Run, curve: Curve, allowed: Band, target: float, measured: Sequence[int]) -> Advice:
    """Compare sizes along the curve; `measured` are those that have been measured, smallest first."""
    nodes, largest = run.here.nodes, measured[-1]
    sizes = [n for n in run.limits.sizes() if n <= max(nodes, REACH * largest)]
    sure = up = _largest_worth(sizes, curve.efficiency, target)
    if len(measured) == 2 and nodes < largest:
        # Between the only two sizes the curve may bend either way: what is possible is worth a try.
        inside = [n for n in sizes if n <= largest]
        up = max(up, _largest_worth(inside, lambda low, high: allowed.efficiency(low, high)[1], target))
    keep = max(up, _largest_worth(sizes, curve.efficiency, KEEP * target))
    wanted = up if nodes < up or nodes > keep else nodes
    stays = _why_it_stays(run, curve, allowed, sizes, wanted, target, largest)
    if stays is not None:
        return _advice(run, curve, allowed, nodes, "keep", stays)
    share, speedup = curve.efficiency(min(nodes, wanted), max(nodes, wanted)), curve.speedup(nodes, wanted)
    change = f"{nodes} → {_nodes(wanted)}, {speedup:.2f} times as fast"
    if wanted > max(nodes, sure):
        why = f"only {measured[0]} and {measured[1]} nodes measured so far: try {wanted}, between them, for a while"
        return _advice(run, curve, allowed, wanted, "explore", why)
    if wanted > nodes:
        why = f"{change}: each node added would do {share:.0%} of a node's work, {target:.0%} is asked for"
        return _advice(run, curve, allowed, wanted, "grow", why)
    last = "the last node does" if nodes - wanted == 1 else f"the last {nodes - wanted} nodes do"
    why = f"{change}: {last} {share:.0%} of a node's work, {target:.0%} is asked for"
    return _advice(run, curve, allowed, wanted, "shrink", why)


def _why_it_stays(
    run: _Run, curve: Curve, allowed: Band, sizes: Sequence[int], wanted: int, target: float, largest: int
) -> str | None:
    """Why the world is not changed to the wanted size; None: it is."""
    nodes, lasted = run.here.nodes, format_duration(run.lasted_s)
    if wanted == nodes:
        return _why_right(nodes, sizes, curve, target, run.limits, largest)
    if abs(wanted - nodes) < SMALLEST_CHANGE * nodes:
        return f"keep {_nodes(nodes)}: {wanted} is too little a change to be worth a pause"
    speedup = curve.speedup(nodes, wanted)
    if wanted > nodes and not run.pays(speedup):
        saved, pause = format_duration(run.lasted_s * (1 - 1 / speedup)), format_duration(run.pause_s)
        return f"keep {_nodes(nodes)}: {wanted} would have saved {saved} of {lasted}, too little for a pause of {pause}"
    if wanted < nodes and run.lasted_s < PAYBACK * run.pause_s:
        return f"keep {_nodes(nodes)}: the run has only lasted {lasted}"
    if wanted < nodes and allowed.efficiency(wanted, nodes)[1] >= target:
        return f"keep {_nodes(nodes)}: it is not certain yet that {wanted} would do"
    return None


def _largest_worth(sizes: Sequence[int], efficiency: Callable[[int, int], float], target: float) -> int:
    """Go up in the smallest steps while each is worth it: efficiency falls, so the first that is not ends it."""
    best = sizes[0]
    for before, after in pairwise(sizes):
        if efficiency(before, after) < target:
            break
        best = after
    return best


def _why_right(
    nodes: int, sizes: Sequence[int], curve: Curve, target: float, limits: Limits, largest: int
) -> str:
    larger = [n for n in sizes if n > nodes]
    if larger:
        share = curve.efficiency(nodes, larger[0])
        return (
            f"keep {_nodes(nodes)}: one more would do {share:.0%} of a node's work, {target:.0%} is asked for"
        )
    if nodes < limits.sizes()[-1]:
        return f"keep {_nodes(nodes)}: more than {REACH * largest} are not judged yet"
    if nodes < limits.every_size()[-1]:
        return f"keep {_nodes(nodes)}: no more stand by"
    return f"keep {_nodes(nodes)}, the most that is allowed"


def _advice(run: _Run, curve: Curve, allowed: Band, nodes: int, kind: Kind, why: str) -> Advice:
    least_s, greatest_s = allowed.step_s(nodes)
    return Advice(
        nodes=nodes,
        kind=kind,
        why=why,
        predicted_speedup=curve.speedup(run.here.nodes, nodes),
        confidence=least_s / greatest_s,
    )


def _pause_s(pauses: Sequence[Pause]) -> float:
    return median(p.seconds for p in pauses[-PAUSES_KEPT:]) if pauses else DEFAULT_PAUSE_S


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _range(limits: Limits) -> str:
    sizes = limits.sizes()
    of = f" in units of {limits.unit}" if limits.unit > 1 else ""
    return f"{sizes[0]} to {sizes[-1]}{of}" if len(sizes) > 1 else f"{sizes[0]}"
