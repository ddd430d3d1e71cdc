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

    def do(self, work: Callable[[], None]) -> None:
        """Soon. What it raises is logged."""
        with self._lock:
            if not self._idle and self._threads < self._count_max:
                self._threads += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
            else:
                self._idle -= 1
        self._todo.put(work)

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
