"""A block while it comes in: whoever wants it reads what is there and waits for more."""

from __future__ import annotations

import asyncio


class Landing:
    """The bytes of one block, filled from its start. They are kept until they are stored, or nobody reads them.

    `granted_bytes`: what it has of the budget of all fetches.
    """

    __slots__ = ("_waiters", "data", "filled", "granted_bytes", "is_settled", "is_stored", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.data = bytearray()
        self.filled = 0
        self.granted_bytes = 0
        self.is_settled = False
        self.is_stored = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_whole(self) -> bool:
        return self.filled == self.size_bytes

    def take(self, part: bytes | memoryview) -> None:
        """The next bytes, which are known to be of the right version. Raises ValueError for more than the block has."""
        end = self.filled + len(part)
        if end > self.size_bytes:
            raise ValueError(f"{end} bytes came of a block of {self.size_bytes}")
        if not self.data:
            self.data = bytearray(self.size_bytes)
        self.data[self.filled : end] = part
        self.filled = end
        self.wake()

    def stored(self) -> None:
        """Readers find it in the store from now on; the memory is given back."""
        self.is_stored = True
        self.data = bytearray()
        self.wake()

    def settle(self) -> None:
        """It is stored, or will not be."""
        self.is_settled = True
        self.wake()

    async def settled(self) -> None:
        """Wait until it is stored, or will not be."""
        while not self.is_settled:
            await self.changed()

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
