"""What is said of worlds that break: nothing much of the first, but the reason where one after the other does. Pure.

A peer that dies breaks its world once, and the others go on. What is wrong with a device, a driver or the network
breaks every world that is formed, with no step between, and only these errors say what it is.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from stoker.train.failures import tells_of_a_lost_peer, with_causes

WHY_CHARS = 500


class Break(NamedTuple):
    """One world's end, and how much is to be said of it."""

    importance: Literal["quiet", "loud", "known"]
    """`loud`: the same reason again, with no step between, for the second time; `known`: it was said before."""
    why: str


class Breaks:
    """Of one worker."""

    def __init__(self) -> None:
        self._commits = -1
        self._times: dict[str, int] = {}
        """By reason, all at that commit."""

    def note(self, error: BaseException, commits: int) -> Break:
        """A world has broken by this error after so many commits."""
        if commits != self._commits:
            self._commits, self._times = commits, {}
        why = in_one_line(error)
        kind = re.sub(r"\d+", "#", why)  # ports and addresses are others each time
        times = self._times[kind] = self._times.get(kind, 0) + 1
        return Break("quiet" if times == 1 else "loud" if times == 2 else "known", why)


def in_one_line(error: BaseException) -> str:
    """The last line of its traceback, and that of the error of the collective where the script has wrapped it."""
    inner = next((one for one in with_causes(error) if tells_of_a_lost_peer(one)), error)
    return _line(error) if inner is error else f"{_line(error)}, from {_line(inner)}"


def _line(error: BaseException) -> str:
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return line if len(line) <= WHY_CHARS else f"{line[: WHY_CHARS - 1]}…"
