"""What reading costs, told by who reads: how a loader comes to know reading from decoding."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Spent(NamedTuple):
    """Of the seconds in which a batch's samples were made."""

    reading_s: float = 0.0
    """Waiting for bytes: of the cache, or of what it reads from."""


class Meter(threading.local):
    """What this thread has spent, since it began."""

    reading_s = 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around each wait for bytes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.reading_s += time.perf_counter() - began


@functools.cache
def spent() -> Meter:
    """The process's one meter."""
    return Meter()
