"""Children that a test forks."""

from __future__ import annotations

import os
from collections.abc import Callable


def start_child(task: Callable[[], bool]) -> int:
    """A forked process that does nothing but the task."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if task() else 2
        finally:
            os._exit(code)
    return child


def ended_well(child: int) -> bool:
    """Whether the task was true, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def in_child(task: Callable[[], bool]) -> bool:
    """Whether the task was true in a forked process."""
    return ended_well(start_child(task))
