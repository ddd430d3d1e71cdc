"""Calls of the `@stoker.elastic` function, one in each world, and whose fault it was that one ended.

An exception that leaves a loop of the script is noticed there before anybody knows what it means: a peer's death comes
as an error of the collective, long before the order to leave the world. What is to be said of the step under way waits
for the verdict on the whole call.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future

VERDICT_WAIT_S = 10.0
"""Seconds that an exception may take from a loop of the script to the end of the function, through the script's own
handlers. Later it counts as one that the script has caught."""


class Attempt:
    """One call of the function."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._undecided: list[Future[bool]] = []
        self.has_ended = False

    def verdict(self) -> Future[bool]:
        """Of an exception that is on its way now: whether it means that the world, not the script, has failed."""
        verdict: Future[bool] = Future()
        with self._lock:
            if self.has_ended:
                verdict.set_result(False)
            else:
                self._undecided.append(verdict)
        return verdict

    def go_on(self) -> None:
        """The script asks for more: it has caught what was on its way."""
        self._decide(world_broke=False)

    def end(self, *, world_broke: bool) -> None:
        """The function has returned or raised. Only the first word counts."""
        self.has_ended = True
        self._decide(world_broke=world_broke)

    def _decide(self, *, world_broke: bool) -> None:
        with self._lock:
            undecided, self._undecided = self._undecided, []
        for verdict in undecided:
            verdict.set_result(world_broke)


class Attempts:
    """The one under way, if any. The training thread begins and ends it, others may look."""

    def __init__(self) -> None:
        self._newest: Attempt | None = None

    def begin(self) -> Attempt:
        """The function is about to be called."""
        self._newest = Attempt()
        return self._newest

    @property
    def under_way(self) -> Attempt | None:
        """None outside the function."""
        newest = self._newest
        return None if newest is None or newest.has_ended else newest


def is_broken_world(verdict: Future[bool], wait_s: float = VERDICT_WAIT_S) -> bool:
    """Wait for a verdict, but not for longer than that."""
    try:
        return verdict.result(wait_s)
    except TimeoutError:
        return False


@functools.cache
def attempts() -> Attempts:
    """The process's: a process is one worker."""
    return Attempts()
