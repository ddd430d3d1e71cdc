"""Prometheus text (exposition format 0.0.4), and what is counted for it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = dict[str, str]
Sample = tuple[Labels, float]
LATENCY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Histogram:
    """How often something took how long. `bounds`: ascending; what is above the last counts as well."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S, counts: Sequence[int] = ()) -> None:
        """`counts`: within each bound and not within the one before, and beyond the last."""
        self.bounds = tuple(bounds)
        self.counts = list(counts) or [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def family(name: str, kind: str, help_text: str, samples: Iterable[Sample]) -> str:
    """One metric with all its samples; nothing at all without any."""
    lines = [f"{name}{_labels(labels)} {_number(value)}\n" for labels, value in samples]
    return _head(name, kind, help_text) + "".join(lines) if lines else ""


def histogram_family(name: str, help_text: str, histograms: Iterable[tuple[Labels, Histogram]]) -> str:
    """One metric with a histogram for each of its labels; nothing at all without any."""
    lines = []
    for labels, histogram in histograms:
        within = 0
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            within += count
            lines.append(f"{name}_bucket{_labels({**labels, 'le': _number(bound)})} {within}\n")
        lines.append(f"{name}_sum{_labels(labels)} {_number(histogram.total)}\n")
        lines.append(f"{name}_count{_labels(labels)} {within}\n")
    return _head(name, "histogram", help_text) + "".join(lines) if lines else ""


def _head(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
