"""A seeded discrete-event loop: the world's only clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from stoker.base.rng import Rng


class Loop:
    """Runs callbacks in order of their virtual time; ties go in the order of scheduling."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = Rng(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, callback))

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        while self._queue and not done():
            at, _, callback = heapq.heappop(self._queue)
            if at > until_s:
                self.now = until_s
                return
            self.now = at
            callback()
