"""Stops and continuations of child processes, pushed by the kernel.

A stopped process (Ctrl-Z, SIGSTOP, a debugger's freeze) does not end, so its pidfd stays silent; but its parent gets a
SIGCHLD at once, and `waitid` tells what happened without taking the child's exit from whoever reaps it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Child:
    pidfd: int
    is_stopped: bool = False


class StopWatch:
    """Calls back when a watched child of this process is stopped or goes on.

    It installs a handler for SIGCHLD in the running loop, so it works in the main thread's loop only, and not in
    uvloop, which keeps that signal for itself. Exits are none of its business: it never reaps.
    """

    def __init__(self, on_stopped: Callable[[int], None], on_continued: Callable[[int], None]) -> None:
        self._on_stopped = on_stopped
        self._on_continued = on_continued
        self._children: dict[int, _Child] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to listen. Raises RuntimeError outside the main thread, and in a loop that keeps SIGCHLD."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self._look_at_all)

    def watch(self, pid: int) -> None:
        """Watch a child of this process. One that has ended is not watched, nor one for which no descriptor is left."""
        if pid in self._children:
            return
        try:
            self._children[pid] = _Child(os.pidfd_open(pid))
        except OSError:
            return
        self._look_at(pid)  # it may have been stopped before

    def forget(self, pid: int) -> None:
        """Watch it no longer; call it when the child has ended."""
        child = self._children.pop(pid, None)
        if child is not None:
            os.close(child.pidfd)

    def close(self) -> None:
        """Watch nobody any more."""
        for pid in list(self._children):
            self.forget(pid)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_signal_handler(signal.SIGCHLD)
        self._loop = None

    def _look_at_all(self) -> None:
        """After a SIGCHLD: the kernel makes one of many, so each child is asked."""
        for pid in list(self._children):
            self._look_at(pid)

    def _look_at(self, pid: int) -> None:
        while (child := self._children.get(pid)) is not None:
            try:
                news = os.waitid(os.P_PIDFD, child.pidfd, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            except ChildProcessError:  # it has been reaped
                self.forget(pid)
                return
            if news is None:
                return
            is_stopped = news.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)
            if is_stopped == child.is_stopped:
                continue
            child.is_stopped = is_stopped
            (self._on_stopped if is_stopped else self._on_continued)(pid)
