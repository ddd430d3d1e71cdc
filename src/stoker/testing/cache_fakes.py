"""Origins and stores that misbehave on demand."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from stoker.cache.origin.port import Opened, Origin, OriginCounters, Part
from stoker.cache.store.containers import ContainerFiles
from stoker.errors import EnvironmentProblem, OriginError
from stoker.wire.cache_api import ObjectInfo


class FaultyOrigin:
    """Wraps an origin. Each entry of `faults` happens to one read or stream, in order; None lets it through.

    `delay_s` holds each of them back, in seconds; `before_read` is called before each. The first stream to
    come to `cut_after_bytes` raises OriginError there; it is None again then.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.faults: deque[Exception | None] = deque()
        self.stat_faults: deque[Exception | None] = deque()
        self.cut_after_bytes: int | None = None
        self.delay_s = 0.0
        self.before_read: Callable[[str], None] = lambda key: None

    @property
    def url(self) -> str:
        return self._origin.url

    @property
    def counters(self) -> OriginCounters:
        return self._origin.counters

    async def stat(self, key: str) -> ObjectInfo:
        fault = self.stat_faults.popleft() if self.stat_faults else None
        if fault is not None:
            raise fault
        return await self._origin.stat(key)

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        await self._begin(key)
        return await self._origin.read(key, start, stop, version)

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[Part, None]:
        async with aclosing(self._cut(key, self._origin.stream(key, start, stop, version))) as parts:
            async for part in parts:
                yield part

    async def open(self, key: str, stop: int) -> Opened:
        fault = self.stat_faults.popleft() if self.stat_faults else None
        if fault is not None:
            raise fault
        info, parts = await self._origin.open(key, stop)
        return Opened(info, self._cut(key, parts))

    async def _cut(self, key: str, whole: AsyncGenerator[Part, None]) -> AsyncGenerator[Part, None]:
        await self._begin(key)
        sent = 0
        async with aclosing(whole) as parts:
            async for part in parts:
                if self.cut_after_bytes is not None and sent + len(part) >= self.cut_after_bytes:
                    rest = part[: max(0, self.cut_after_bytes - sent)]
                    self.cut_after_bytes = None
                    if rest:
                        yield rest
                    raise OriginError("cut")
                sent += len(part)
                yield part

    async def _begin(self, key: str) -> None:
        fault = self.faults.popleft() if self.faults else None
        await asyncio.sleep(self.delay_s)
        if fault is not None:
            raise fault
        self.before_read(key)

    def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        return self._origin.list(prefix, after, limit)

    async def close(self) -> None:
        await self._origin.close()


class FullFiles(ContainerFiles):
    """A disk that is full while `is_full`."""

    is_full = True

    def to_write(self, number: int) -> int:
        if self.is_full:
            raise EnvironmentProblem("cannot write: No space left on device")
        return super().to_write(number)
