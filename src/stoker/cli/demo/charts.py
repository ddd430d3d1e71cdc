"""The report's charts as inline SVG: numbers in, text out. Colours are CSS classes of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

WIDTH = 1000
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 44, 30
ROW = 30


class Mark(NamedTuple):
    """A vertical line at a moment, seconds since the start."""

    at_s: float
    label: str
    kind: str
    """kill, recovered or joined: its colour."""


class Bar(NamedTuple):
    """A stretch of one row."""

    row: int
    start_s: float
    end_s: float
    kind: str
    label: str
    short: str
    """What stands in the bar where the label does not fit."""
    title: str


class Line(NamedTuple):
    """A curve: (seconds, value) points."""

    points: Sequence[tuple[float, float]]
    kind: str
    is_area: bool = False


@dataclass(frozen=True)
class Frame:
    """What the charts share: the time axis, epochs and marks."""

    seconds: float
    epochs: Sequence[tuple[float, float]]
    marks: Sequence[Mark]

    def x(self, at_s: float) -> float:
        """Horizontal place of a moment."""
        inside = min(max(at_s / self.seconds, 0.0), 1.0) if self.seconds > 0 else 0.0
        return LEFT + inside * (WIDTH - LEFT - RIGHT)


def curve_chart(frame: Frame, lines: Sequence[Line], *, height: int, unit: str, name: str) -> str:
    """Curves over time from zero to a round number above the highest."""
    top_value = max((value for line in lines for _, value in line.points), default=0.0) or 1.0
    ticks = round_ticks(top_value)
    floor = height - BOTTOM

    def y(value: float) -> float:
        return floor - value / ticks[-1] * (floor - TOP)

    parts = [_epochs(frame, floor)]
    for tick in ticks:
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_short(tick)}{unit}</text>'
        )
    for line in lines:
        path = " ".join(f"{frame.x(at):.1f},{y(value):.1f}" for at, value in line.points)
        if line.is_area and line.points:
            first, last = frame.x(line.points[0][0]), frame.x(line.points[-1][0])
            parts.append(
                f'<polygon class="area {line.kind}" points="{first:.1f},{floor} {path} {last:.1f},{floor}"/>'
            )
        parts.append(f'<polyline class="curve {line.kind}" points="{path}"/>')
    parts += [_time_axis(frame, floor), _marks(frame, floor)]
    return _svg(parts, height, name)


def bar_chart(frame: Frame, rows: Sequence[str], bars: Sequence[Bar], *, name: str) -> str:
    """One row for each name, stretches of time as bars."""
    floor = TOP + ROW * len(rows)
    parts = [_epochs(frame, floor)]
    for row, label in enumerate(rows):
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{TOP + row * ROW + 19}" text-anchor="end">{escape(label)}</text>'
        )
    for bar in bars:
        left, right = frame.x(bar.start_s), frame.x(bar.end_s)
        width = max(right - left, 1.5)
        top = TOP + bar.row * ROW + 4
        parts.append(
            f'<rect class="bar {bar.kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 8}" rx="3">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
        label = next((text for text in (bar.label, bar.short) if text and width > 6.5 * len(text) + 8), "")
        if label:
            parts.append(_text("inbar", left + 6, top + 15, "start", label))
    parts += [_time_axis(frame, floor), _marks(frame, floor)]
    return _svg(parts, floor + BOTTOM, name)


def round_ticks(highest: float, wanted: int = 4) -> list[float]:
    """Zero and round steps up to at least `highest`."""
    rough = highest / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * m for m in (1, 2, 2.5, 5) if power * m >= rough), power * 10)
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)]


def _svg(parts: list[str], height: int, name: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}">'
        + "".join(parts)
        + "</svg>"
    )


def _epochs(frame: Frame, floor: float) -> str:
    parts = []
    labels_fit = len(frame.epochs) <= 8
    for number, (start_s, end_s) in enumerate(frame.epochs):
        left, right = frame.x(start_s), frame.x(end_s)
        shade = "even" if number % 2 == 0 else "odd"
        parts.append(
            f'<rect class="epoch {shade}" x="{left:.1f}" y="{TOP}" width="{max(right - left, 0):.1f}" '
            f'height="{floor - TOP:.1f}"/>'
        )
        if labels_fit and right - left > 60:
            parts.append(_text("epoch-name", right - 6, TOP + 14, "end", f"epoch {number + 1}"))
    return "".join(parts)


def _time_axis(frame: Frame, floor: float) -> str:
    line = f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor:.1f}" y2="{floor:.1f}"/>'
    ticks = [tick for tick in round_ticks(frame.seconds, 8) if tick <= frame.seconds]
    return line + "".join(_text("tick", frame.x(t), floor + 18, "middle", f"{_short(t)} s") for t in ticks)


def _marks(frame: Frame, floor: float) -> str:
    """Labels stand above the chart: the kill's to the left of its line, the others' to the right, joins higher."""
    lines, names = [], []
    for mark in frame.marks:
        at = frame.x(mark.at_s)
        left_side = at > WIDTH * 0.75 or (mark.kind == "kill" and at > WIDTH * 0.2)
        height = 14 if mark.kind == "joined" else 32
        anchor, shift = ("end", -5) if left_side else ("start", 5)
        lines.append(
            f'<line class="mark {mark.kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{height - 10}" y2="{floor:.1f}"/>'
        )
        names.append(_text(f"mark-name {mark.kind}", at + shift, height, anchor, mark.label))
    return "".join(lines + names)


def _text(style: str, x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}"
