"""What a training loop waited for. PURE.

A loop waits for one batch at a time, so that what was being done for that batch meanwhile is what it waited for, and
nothing that was done beside it for others. Whoever makes a batch notes when it did what, by a clock that is one for all
processes; the wait is laid over that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

CAUSES = {
    "starting_s": "starting",
    "not_begun_s": "not begun",
    "origin_s": "origin",
    "cache_s": "cache",
    "reading_s": "reading",
    "decoding_s": "decoding",
    "samples_s": "dataset",
    "collating_s": "collating",
    "hand_over_s": "hand-over",
    "pinning_s": "pinning",
}
"""What a wait is divided into, and its name in reports."""
STRETCHES_MAX = 32


class Stretch(NamedTuple):
    """A time of reading, from its beginning to its end, and what of its seconds went where; the rest is decoding."""

    start_s: float
    stop_s: float
    origin_s: float = 0.0
    """For what the cache did not have at hand."""
    cache_s: float = 0.0
    """For what it had: asking, and taking the bytes."""
    reading_s: float = 0.0
    """Beside these two: taking records out of what was read, or a database."""

    @property
    def parts(self) -> tuple[float, float, float]:
        return self[2:]


class Spent(NamedTuple):
    """Of the seconds in which a batch's samples were made."""

    stretches: tuple[Stretch, ...] = ()
    """Of reading, in their order; none: not told apart."""


class Times(NamedTuple):
    """When a step was begun, read and collated, by `time.perf_counter`, which is one clock for all processes."""

    began_s: float = 0.0
    read_s: float = 0.0
    """From here on it was collated: reading and decoding were done."""
    collated_s: float = 0.0
    spent: Spent = Spent()
    """How much of reading went where."""
    ready_s: float = 0.0
    """Since then it could have been begun: who makes it was started."""
    came_s: float = float("inf")
    """From here on it was copied to pinned memory, by the loop's process."""


def causes(began_s: float, ended_s: float, times: Times) -> Iterator[tuple[str, float]]:
    """What a loop waited for that wanted a batch from `began_s` to `ended_s`, and how long. The parts make the whole.

    Within a stretch of reading its parts count as spread evenly.
    """

    def within(low: float, high: float) -> float:
        return max(0.0, min(high, ended_s) - max(low, began_s))

    ready_s = min(times.ready_s, times.began_s)
    yield "starting_s", within(began_s, ready_s)
    yield "not_begun_s", within(ready_s, times.began_s)
    samples = within(times.began_s, times.read_s)
    if times.spent.stretches:
        read = [0.0, 0.0, 0.0]
        low = times.began_s
        for stretch in times.spent.stretches:
            start, stop = max(low, stretch.start_s), min(stretch.stop_s, times.read_s)
            length = max(stop - start, sum(stretch.parts))
            if stop > start:
                share = within(start, stop) / length
                read = [sum_s + part * share for sum_s, part in zip(read, stretch.parts, strict=True)]
                low = stop
        yield from zip(("origin_s", "cache_s", "reading_s"), read, strict=True)
        yield "decoding_s", max(0.0, samples - sum(read))
    else:
        yield "samples_s", samples
    yield "collating_s", within(times.read_s, times.collated_s)
    came_s = max(times.collated_s, times.came_s)
    yield "hand_over_s", within(times.collated_s, came_s)
    yield "pinning_s", within(came_s, ended_s)


def bounded(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Neighbours made one, where there are many: a dataset may read record by record."""
    if len(stretches) < STRETCHES_MAX:
        return list(stretches)
    pairs = [stretches[first : first + 2] for first in range(0, len(stretches), 2)]
    return [_joined(pair) for pair in pairs]


def _joined(some: Sequence[Stretch]) -> Stretch:
    origin, cache, reading = (sum(parts) for parts in zip(*(one.parts for one in some), strict=True))
    return Stretch(some[0].start_s, some[-1].stop_s, origin, cache, reading)


def added(waits: Iterable[dict[str, float]]) -> dict[str, float]:
    """Several divided waits as one."""
    total = dict.fromkeys(CAUSES, 0.0)
    for waiting in waits:
        for cause, seconds in waiting.items():
            total[cause] += seconds
    return total
