"""A machine that has no room for another thread, for as long as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NO_MACHINE_HAS_BYTES = 1 << 47


@contextmanager
def no_thread_can_start() -> Iterator[None]:
    """To start one fails in the system, which has no room for its stack."""
    before = threading.stack_size(_NO_MACHINE_HAS_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
