"""Who waits for an answer, and got a signal meanwhile. Pure.

On a local disk no signal ends a call on a file, unless it ends the program: handlers of timers, of children that end
or of stack dumps run when the call is done, and no program looks for EINTR there. The kernel says here of the first
signal of each request that there was one, not which, and of a later one nothing: so it is looked again and again
whether somebody is to end.
"""

from __future__ import annotations

from collections.abc import Callable, Container

KEPT_MIN = 1000


class Signals:
    """`is_ending`: whether a thread is to end, or was told to by who sits at the terminal."""

    def __init__(self, is_ending: Callable[[int], bool]) -> None:
        self._is_ending = is_ending
        self._threads: dict[int, int] = {}
        """By the number of the request."""
        self._signalled: set[int] = set()
        self._kept = KEPT_MIN

    def asks(self, unique: int, thread: int, waiting: Container[int]) -> None:
        """A thread waits for what it has asked. `waiting`: who does, of all who have."""
        self._threads[unique] = thread
        if len(self._threads) > self._kept:
            self._threads = {one: thread for one, thread in self._threads.items() if one in waiting}
            self._kept = max(KEPT_MIN, 2 * len(self._threads))

    def signal(self, unique: int) -> None:
        """Whoever has asked that got a signal."""
        if unique in self._threads:
            self._signalled.add(unique)

    def ending(self, waiting: Container[int]) -> list[int]:
        """What was asked by who is to end, and need wait no longer."""
        self._signalled = {unique for unique in self._signalled if unique in waiting}
        return sorted(unique for unique in self._signalled if self._is_ending(self._threads[unique]))
