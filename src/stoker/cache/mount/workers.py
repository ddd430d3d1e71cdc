"""Threads that find things out for a mount, as many as have something to do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger("stoker.mount")


class Workers:
    """Does what it is given, in threads that end with the process. At most `count_max` things at a time; the others
    wait for their turn."""

    def __init__(self, name: str, count_max: int) -> None:
        self._name = name
        self._count_max = count_max
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        """Threads that wait for work; below 0: so much work waits for them."""

    def do(self, work: Callable[[], None]) -> None:
        """Soon. What it raises is logged. Where no more threads can be started it waits for those there are; raises
        RuntimeError if there is none."""
        with self._lock:
            if self._idle > 0 or self._threads == self._count_max or not self._starts():
                self._idle -= 1
            self._todo.put(work)

    def _starts(self) -> bool:
        """Whether there is a thread more."""
        self._threads += 1
        try:
            threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
        except RuntimeError:
            self._threads -= 1
            if not self._threads:
                raise
            return False
        return True

    def _run(self) -> None:
        while True:
            work = self._todo.get()
            try:
                work()
            except Exception:
                # A defect of one piece of work must not take its thread from all others.
                log.exception("what the mount asked for could not be carried out")
            with self._lock:
                self._idle += 1
