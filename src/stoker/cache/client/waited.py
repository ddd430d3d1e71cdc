"""How long this thread has waited for batches, told apart by whether the server had them at hand.

An answer whose length is said at its beginning was there as a whole when it was asked for. One that comes in chunks was
not: a part of it had to be fetched, or looked at, first.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Waited(threading.local):
    """Since the thread began."""

    asked_s = 0.0
    """In calls that read batches."""
    missed_s = 0.0
    """Of that, for answers of which a part was not at hand."""

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a call that reads batches."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.asked_s += time.perf_counter() - began

    def answered(self, began_s: float, *, is_whole: bool) -> None:
        """An answer has come, which was waited for since then."""
        if not is_whole:
            self.missed_s += time.perf_counter() - began_s


@functools.cache
def waited() -> Waited:
    """The process's one: each thread sees its own."""
    return Waited()
