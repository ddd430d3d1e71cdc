"""A request's body, in parts as the back asks for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from stoker.errors import WireError

WINDOW_BYTES = 1024 * 1024
"""So much may be on its way; enough for one part to come while another is written."""
_STEP_BYTES = WINDOW_BYTES // 2


class BodyParts:
    """Iterate over it once. `size_bytes`: of all of it, None where nobody knows; `more` tells the front that so many
    more bytes may come. A peer that goes ends the task that reads."""

    def __init__(self, size_bytes: int | None, more: Callable[[int], object]) -> None:
        self.size_bytes = size_bytes
        self.received_bytes = 0
        self._more = more
        self._parts: deque[bytes] = deque()
        self._granted_bytes = 0
        self._held_bytes = 0
        self._is_over = False
        self._waiting: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether all of it has come."""
        return self._is_over

    def take(self, part: bytes, is_last: bool) -> None:
        """What the front has."""
        self._parts.append(part)
        self._is_over = is_last
        self.received_bytes += len(part)
        self._granted_bytes -= len(part)
        self._held_bytes += len(part)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            # Looked at before each wait: while a part was written all that was granted may have come.
            waiting_bytes = self._granted_bytes + self._held_bytes
            if not self._is_over and waiting_bytes <= _STEP_BYTES:
                grant = WINDOW_BYTES - waiting_bytes
                self._granted_bytes += grant
                self._more(grant)
            if self._parts:
                part = self._parts.popleft()
                self._held_bytes -= len(part)
                if part:
                    yield part
            elif self._is_over:
                return
            else:
                self._waiting = asyncio.get_running_loop().create_future()
                await self._waiting

    async def all(self, bytes_max: int) -> bytes:
        """The whole body. Raises WireError if it is longer than that."""
        if self.size_bytes is not None and self.size_bytes > bytes_max:
            raise WireError(f"a body has at most {bytes_max} bytes here, not {self.size_bytes}")
        parts = bytearray()
        async for part in self:
            parts += part
            if len(parts) > bytes_max:
                raise WireError(f"a body has at most {bytes_max} bytes here")
        return bytes(parts)
