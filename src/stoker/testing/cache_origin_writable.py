"""How suites of origins that can be written to come to them, and what they write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from stoker.cache.origin.port import Part
from stoker.cache.origin.writing_port import WritableOrigin
from stoker.testing.cache_origin import listed, streamed

T = TypeVar("T")
MIB = 1024 * 1024


class Trouble(Exception):
    """What a body fails with in these tests."""


async def body(*parts: Part, fails: bool = False) -> AsyncGenerator[Part, None]:
    """These parts, and then an error or not."""
    for part in parts:
        yield part
        await asyncio.sleep(0)
    if fails:
        raise Trouble


def cut(data: bytes, size_bytes: int) -> list[bytes]:
    """The same in parts."""
    return [data[at : at + size_bytes] for at in range(0, len(data), size_bytes)]


async def content(origin: WritableOrigin, key: str) -> bytes:
    """All of an object."""
    info = await origin.stat(key)
    if not info.size_bytes:
        return b""
    return b"".join(await streamed(origin, key, 0, info.size_bytes, info.version))


async def keys_of(origin: WritableOrigin, prefix: str = "") -> list[str]:
    return [info.key for info in await listed(origin, prefix, None, 1000)]


class WritableOrigins:
    """How a suite comes to origins. `open_empty` may be called several times in a test: what was written before is
    there then, unless `forgets`."""

    forgets = False
    """Whether what was written is gone with who wrote it."""
    large_bytes = 24 * MIB
    """Half of it is more than any origin holds in memory of what it is sent."""
    versions = 30
    """How many are written one after the other."""
    tick_s = 0.02
    """What is written so much later is later by the origin's clock."""
    part_bytes = 5 * MIB + 11
    """Of an upload's parts; no origin asks for more than 5 MiB."""

    def open_empty(self) -> WritableOrigin:
        """An origin without objects, or with those that this test has put there."""
        raise NotImplementedError

    def run(self, test: Callable[[WritableOrigin], Awaitable[T]]) -> T:
        async def in_time() -> T:
            origin = self.open_empty()
            try:
                async with asyncio.timeout(120):
                    return await test(origin)
            finally:
                await origin.close()

        return asyncio.run(in_time())
