"""The one place that reads a clock. Pure cores get `now` as an argument instead."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds for decisions, wall seconds for logs."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; its zero means nothing."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, for people; never used to decide."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class BootClock(SystemClock):
    """For promises to other machines: it also goes on while this one is suspended."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
