"""The curve of a run's step time over its number of nodes that measurements fit, and all others that they allow. PURE.

For a fixed global batch a step on n nodes takes

    t(n) = p/n + q + r*(n-1)        p, q, r >= 0

p/n is the work that the nodes share, q what every node does anyway, r what each further node adds. Two models come to
these same three functions: a ring all-reduce with latency a and time per byte b, 2(n-1)*a + 2(n-1)/n*M*b (Thakur,
Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005), whose second part is a
constant less a share of 1/n; and the universal scalability law n/(1 + s(n-1) + k*n(n-1)) (Gunther: Guerrilla Capacity
Planning, 2007), whose contention s is q and whose coherence k is r. With r = 0 it is Amdahl's law. Fitted by
non-negative least squares, as Optimus does (Peng and others: Optimus, EuroSys 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

from stoker.job.scaling_model import LEAST_STEP_S, Curve, Measured, scaling_efficiency

F64 = npt.NDArray[np.float64]

RIDGE = (0.0, 0.0, 1e-3)
SIZES_MAX = 12
"""Sizes that bound a prediction; more would make the enumeration of `_corners` slow and hardly narrower."""


def _columns(nodes: Sequence[int]) -> F64:
    n = np.asarray(nodes, dtype=np.float64)
    return np.stack([1 / n, np.ones_like(n), n - 1], axis=1)


def fit(measured: Sequence[Measured]) -> Curve:
    """The non-negative curve nearest to the medians, each weighted by its error.

    Three unknowns make seven possible sets of positive ones, so all are tried. Two sizes leave the balance of `fixed`
    and `each` open; a trace of ridge then takes `each` to be none: a larger world shows what it is, and can be taken
    back, while one that is never tried shows nothing.
    """
    errors = np.array([m.error_s for m in measured])
    matrix = _columns([m.nodes for m in measured]) / errors[:, None]
    wanted = np.array([m.step_s for m in measured]) / errors
    lengths = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    length = float(np.linalg.norm(wanted))
    matrix = np.concatenate([matrix / lengths, np.diag(RIDGE)])
    wanted = np.concatenate([wanted / length, np.zeros(3)])
    best, least = np.zeros(3), float("inf")
    for size in (1, 2, 3):
        for chosen in map(list, combinations(range(3), size)):
            solution = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            cost = float(np.sum((matrix[:, chosen] @ solution - wanted) ** 2))
            if (solution >= 0).all() and cost < least:
                best, least = np.zeros(3), cost
                best[chosen] = solution
    shared_s, fixed_s, each_s = best * length / lengths
    return Curve(float(shared_s), float(fixed_s), float(each_s))


@dataclass(frozen=True)
class Band:
    """All curves of the model that the measurements allow, by the corners of that set."""

    corners: F64 = field(repr=False)
    """One (shared, fixed, each) in a row."""

    def step_s(self, nodes: int) -> tuple[float, float]:
        """Least and greatest seconds per step at this size."""
        values = self.corners @ _columns([nodes])[0]
        return max(LEAST_STEP_S, float(values.min())), max(LEAST_STEP_S, float(values.max()))

    def efficiency(self, before: int, after: int) -> tuple[float, float]:
        """Least and greatest `scaling_efficiency`: a ratio of two linear forms is extreme in corners."""
        slow, fast = (np.maximum(self.corners @ _columns([n])[0], LEAST_STEP_S) for n in (before, after))
        speedups = slow / fast
        return (
            scaling_efficiency(before, after, float(speedups.min())),
            scaling_efficiency(before, after, float(speedups.max())),
        )


def band(measured: Sequence[Measured], curve: Curve) -> Band:
    """The curves that pass through every median ± its error, or as near as `curve` does where that is wider.

    So what two sizes cannot tell apart (a constant and a cost per node) shows as width far from them. Needs two sizes:
    one bounds nothing. Raises ValueError for fewer.
    """
    if len(measured) < 2:
        raise ValueError(f"{len(measured)} measured sizes bound no curve: at least 2 are needed")
    used = sorted(measured, key=lambda m: -m.windows)[:SIZES_MAX]
    columns = _columns([m.nodes for m in used])
    middle = np.array([m.step_s for m in used])
    point = np.array(curve)
    reach = np.maximum(np.array([m.error_s for m in used]), np.abs(columns @ point - middle) * (1 + 1e-9))
    matrix = np.concatenate([columns, -columns, -np.eye(3)])
    limits = np.concatenate([middle + reach, reach - middle, np.zeros(3)])
    return Band(np.concatenate([_corners(matrix, limits), point[None, :]]))


def _corners(matrix: F64, limits: F64) -> F64:
    """Corners of `matrix @ x ≤ limits` in three dimensions: every three planes meet in a point, some of them inside."""
    triples = np.array(list(combinations(range(len(limits)), 3)))
    planes = matrix[triples]
    regular = np.abs(np.linalg.det(planes)) > 1e-12
    points: F64 = np.linalg.solve(planes[regular], limits[triples][regular][:, :, None])[:, :, 0]
    slack = 1e-9 * np.abs(limits).max()
    inside: F64 = points[(points @ matrix.T <= limits + slack).all(axis=1)]
    return inside
