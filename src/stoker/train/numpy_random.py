"""NumPy's global generator, kept aside at every commit at the price of a look at it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class NumpyRandomCopy:
    """A copy of the state of `np.random`, renewed only where it has changed.

    `np.random.get_state()` copies it in tens of microseconds, longer where the step has used the processor's caches.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._words = b""

    def renew(self) -> Any:
        """The state as it is now, for `np.random.set_state`; not to be changed."""
        words = _words_of_mersenne_twister()
        # A normal deviate that was kept for the next call leaves the words as they are when it is used.
        if not words or words != self._words or self._state[3]:
            self._state = np.random.get_state() if words else np.random.get_state(legacy=False)
            self._words = words
        return self._state


def _words_of_mersenne_twister() -> bytes:
    """The 624 words and the position that NumPy's default generator holds; empty where another one was set."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, and not in NumPy's stubs
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)
