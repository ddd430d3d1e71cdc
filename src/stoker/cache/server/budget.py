"""How much may be fetched from origins at once."""

from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """Bounds requests and bytes in flight together; first come, first served.

    A single request larger than the whole budget is let through alone.
    """

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self._requests = self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._bytes = bytes_max
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def is_half_free(self) -> bool:
        """Whether nobody waits, nor soon will."""
        is_free = 2 * self._bytes >= self._bytes_max and 2 * self._requests >= self._requests_max
        return is_free and not self._queue

    async def take(self, size_bytes: int) -> None:
        """Wait for room. Every `take` that returns is matched by one `give`."""
        if not self._queue and self._has_room(size_bytes):
            self._requests -= 1
            self._bytes -= size_bytes
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((future, size_bytes))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(size_bytes)
            raise

    def give(self, size_bytes: int) -> None:
        """Return what `take` took."""
        self._requests += 1
        self._bytes += size_bytes
        while self._queue and (self._queue[0][0].done() or self._has_room(self._queue[0][1])):
            future, wanted_bytes = self._queue.popleft()
            if not future.done():
                self._requests -= 1
                self._bytes -= wanted_bytes
                future.set_result(None)

    def _has_room(self, size_bytes: int) -> bool:
        return self._requests > 0 and (size_bytes <= self._bytes or self._bytes == self._bytes_max)
