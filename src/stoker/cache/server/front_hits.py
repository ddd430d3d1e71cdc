"""What the native front has answered, by bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class HitFigures(NamedTuple):
    """What the front has answered of one bucket."""

    hits: int = 0
    size_bytes: int = 0
    handed_on: int = 0
    """How often another server was asked instead."""
    handed_on_bytes: int = 0


class FrontHits:
    """What the front has answered since the start, which it tells only once."""

    def __init__(self, take: Callable[[], dict[int, tuple[int, int, int, int]]]) -> None:
        self._take = take
        self._sums: dict[int, HitFigures] = {}

    def of(self, bucket: int) -> HitFigures:
        """Of the bucket with that number in the index."""
        for number, more in self._take().items():
            known = self._sums.get(number, HitFigures())
            self._sums[number] = HitFigures(*(a + b for a, b in zip(known, more, strict=True)))
        return self._sums.get(bucket, HitFigures())
