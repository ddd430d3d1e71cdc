"""What reading costs, told by who reads: how a loader comes to know reading from decoding."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.cache.client.waited import waited
from stoker.data.waiting import Spent, Stretch, bounded


class Meter(threading.local):
    """What this thread has spent, since it was asked last."""

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []
        self._is_reading = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around each wait for bytes. What the cache's client does within is told apart; one inside another counts
        once."""
        if self._is_reading:
            yield
            return
        self._is_reading = True
        known = waited()
        asked_s, missed_s = known.asked_s, known.missed_s
        began = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self._is_reading = False
            origin_s = known.missed_s - missed_s
            cache_s = max(0.0, known.asked_s - asked_s - origin_s)
            rest_s = max(0.0, now - began - origin_s - cache_s)
            self._stretches = bounded([*self._stretches, Stretch(began, now, origin_s, cache_s, rest_s)])

    def take(self) -> Spent:
        """All that was spent, which begins anew."""
        stretches, self._stretches = self._stretches, []
        return Spent(tuple(stretches))


@functools.cache
def spent() -> Meter:
    """The process's one meter."""
    return Meter()
