"""A block while it comes in: whoever wants it reads what is there and waits for more."""

from __future__ import annotations

import asyncio


class Landing:
    """The bytes of one block, filled from its start; kept until they are stored."""

    __slots__ = ("_waiters", "data", "filled")

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)
        self.filled = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_whole(self) -> bool:
        return self.filled == len(self.data)

    def take(self, part: bytes | memoryview) -> None:
        """The next bytes. Raises ValueError if there are more than belong to the block."""
        end = self.filled + len(part)
        if end > len(self.data):
            raise ValueError(f"{end} bytes came of a block of {len(self.data)}")
        self.data[self.filled : end] = part
        self.filled = end
        self.wake()

    def wake(self) -> None:
        """Something has changed for those who wait."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self) -> None:
        """Wait for the next bytes, or for news about the fetch."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
