"""A block while it comes in: whoever wants it is sent what is there, and what comes."""

from __future__ import annotations

import asyncio

from stoker._native import Files, Inflow, Piece


class Landing:
    """The bytes of one block, filled from its start. They are in memory until they are stored, or nobody needs them.

    `granted_bytes`: what it has of the budget of all fetches.
    """

    __slots__ = (
        "__weakref__",
        "_waiters",
        "granted_bytes",
        "inflow",
        "is_settled",
        "is_stored",
        "size_bytes",
    )

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.inflow = Inflow(size_bytes)
        self.granted_bytes = 0
        self.is_settled = False
        self.is_stored = False
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def filled(self) -> int:
        return self.inflow.filled

    @property
    def is_whole(self) -> bool:
        return self.inflow.filled == self.size_bytes

    @property
    def data(self) -> memoryview:
        """What is there; nothing once it is stored."""
        return memoryview(self.inflow.view())

    def take(self, part: bytes | bytearray | memoryview) -> None:
        """The next bytes, which are known to be of the right version. Raises ValueError for more than the block has."""
        if not self.inflow.take(part):
            raise ValueError(f"{self.filled + len(part)} bytes came of a block of {self.size_bytes}")
        filled = self.filled
        if any(beyond < filled for beyond, _ in self._waiters):
            waiters, self._waiters = self._waiters, []
            for beyond, waiter in waiters:
                if beyond >= filled:
                    self._waiters.append((beyond, waiter))
                elif not waiter.done():
                    waiter.set_result(None)

    def stored(self, files: Files, piece: Piece) -> None:
        """Readers find it in the store from now on, where `piece` was found in the same turn of the loop; those that
        are being sent it are sent the rest from there."""
        if not self.inflow.keep(files, piece.container, piece.offset):
            return  # the file cannot be opened now: they go on from memory
        self.is_stored = True
        self.wake()

    def settle(self) -> None:
        """It is stored, or will not be."""
        self.is_settled = True
        self.wake()

    async def settled(self) -> None:
        """Wait until it is stored, or will not be."""
        while not self.is_settled:
            await self.changed(self.size_bytes)

    def wake(self) -> None:
        """There is news about the fetch."""
        waiters, self._waiters = self._waiters, []
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self, beyond: int) -> None:
        """Wait until more than so many bytes are there, or for news about the fetch."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((beyond, waiter))
        await waiter
