"""Clocks for tests."""

from __future__ import annotations


class HandClock:
    """Goes as far as it is moved; the time of day is far from what is counted."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at + 1e9
