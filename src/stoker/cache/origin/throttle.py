"""A limit on bandwidth and latency in front of any origin: `?stoker_mbps=20&stoker_latency_ms=2`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from stoker.base.clock import Clock, SystemClock
from stoker.cache.origin.port import (
    Entries,
    Opened,
    Origin,
    OriginCounters,
    Part,
    begun,
    folder_of,
    sites_of,
)
from stoker.wire.cache_api import ObjectInfo

_BURST_S = 0.02
_PART_BYTES_MIN = 16 * 1024


class ThrottledOrigin:
    """All reads through this object share `mbps` megabits a second; each request takes `latency_ms` more."""

    def __init__(
        self, origin: Origin, mbps: float | None = None, latency_ms: float = 0.0, clock: Clock | None = None
    ) -> None:
        self._origin = origin
        self._bytes_per_s = None if mbps is None else mbps * 125_000.0
        self._latency_s = latency_ms / 1000.0
        self._clock = clock or SystemClock()
        self._free_at = self._clock.now()

    @property
    def url(self) -> str:
        return self._origin.url

    @property
    def counters(self) -> OriginCounters:
        return self._origin.counters

    async def stat(self, key: str) -> ObjectInfo:
        await self._wait(0)
        return await self._origin.stat(key)

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        await self._wait(stop - start)
        return await self._origin.read(key, start, stop, version)

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[Part, None]:
        """In parts as small as they would come over a slow line, each when its bytes would be there."""
        await self._wait(0)
        async with aclosing(
            await begun(self._paced(self._origin.stream(key, start, stop, version)))
        ) as parts:
            async for part in parts:
                yield part

    async def open(self, key: str, stop: int) -> Opened:
        await self._wait(0)
        opened = await self._origin.open(key, stop)
        return Opened(opened.info, await begun(self._paced(opened.parts)))

    async def _paced(self, stream: AsyncGenerator[Part, None]) -> AsyncGenerator[Part, None]:
        rate = self._bytes_per_s
        async with aclosing(stream) as parts:
            yield b""
            async for part in parts:
                if rate is None:
                    yield part
                    continue
                step = max(_PART_BYTES_MIN, int(rate * _BURST_S))
                for first in range(0, len(part), step):
                    piece = part[first : first + step]
                    await self._sleep(self._line_s(len(piece), rate))
                    yield piece

    async def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        async with aclosing(self._origin.list(prefix, after, limit)) as pages:
            async for page in pages:
                await self._wait(0)
                yield page

    async def folder(self, prefix: str, after: str | None, limit: int) -> Entries | None:
        """See `ListsFolders`."""
        await self._wait(0)
        return await folder_of(self._origin, prefix, after, limit)

    async def sites(self, asked: int) -> int:
        return await sites_of(self._origin, asked)

    async def close(self) -> None:
        await self._origin.close()

    async def _wait(self, size_bytes: int) -> None:
        line_s = 0.0
        if self._bytes_per_s is not None and size_bytes:
            line_s = self._line_s(size_bytes, self._bytes_per_s)
        await self._sleep(self._latency_s + line_s)

    def _line_s(self, size_bytes: int, bytes_per_s: float) -> float:
        """Seconds until the line has carried so many bytes more; they are counted as carried."""
        now = self._clock.now()
        self._free_at = max(self._free_at, now - _BURST_S) + size_bytes / bytes_per_s
        return max(0.0, self._free_at - now)

    async def _sleep(self, delay_s: float) -> None:
        if delay_s > 0:
            await asyncio.sleep(delay_s)
