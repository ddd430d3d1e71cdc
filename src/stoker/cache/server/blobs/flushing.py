"""What is written down is brought to the disk before it is told that it is: once for all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from stoker.errors import EnvironmentProblem


class Flushing:
    """`sync` brings to the disk all that was written before it was called, and raises OSError."""

    def __init__(self, sync: Callable[[], Awaitable[None]]) -> None:
        self._sync = sync
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def flush(self) -> None:
        """Return once all that is written by now is on the disk. Raises EnvironmentProblem."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._once_more(self._running))
        await asyncio.shield(self._next)

    async def _once_more(self, before: asyncio.Task[None] | None) -> None:
        """Whoever comes until `before` is over shares this one."""
        if before is not None:
            await asyncio.wait((before,))
        self._running, self._next = asyncio.current_task(), None
        try:
            await self._sync()
        except OSError as error:
            raise EnvironmentProblem(f"it cannot be made durable: {error}") from error
