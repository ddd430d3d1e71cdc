"""The same as `stoker.open`, `read`, `read_many` and `prefetch`, to be awaited.

    import stoker.aio

    data = await stoker.aio.read("stoker://bucket/key")
    async with await stoker.aio.open("stoker://bucket/lines.txt", "r") as file:
        async for line in file: ...

Each call is the blocking one in a thread, of at most THREADS in a process for all of its event loops: there is no
second client. Whoever stops waiting (a timeout, a cancelled task) disturbs nobody: a call that has not begun is
dropped, one that has begun ends by itself and its result is let go.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, ParamSpec, TypeVar

from stoker.data import reading

__all__ = ["THREADS", "AsyncFile", "open", "prefetch", "read", "read_many"]

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 64
"""What waits for a slow origin holds one; for the cache itself a few are enough."""


def _twin(blocking: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The same function, to be awaited."""

    @functools.wraps(blocking)
    async def awaited(*arguments: P.args, **options: P.kwargs) -> T:
        call = functools.partial(blocking, *arguments, **options)
        return await asyncio.wrap_future(_threads(os.getpid()).submit(call))

    return awaited


@functools.lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(THREADS, f"stoker-aio-{process}")


class AsyncFile:
    """A file that was opened with `open`. One call at a time; after one that was given up, `seek` before reading on."""

    def __init__(self, file: IO[Any]) -> None:
        self.wrapped = file
        self.read = _twin(file.read)
        self.readline = _twin(file.readline)
        self.seek = _twin(file.seek)
        self.tell = _twin(file.tell)
        self.close = _twin(file.close)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._lines()

    async def _lines(self) -> AsyncIterator[Any]:
        while lines := await _twin(self.wrapped.readlines)(_LINES_BYTES):
            for line in lines:
                yield line

    async def __aenter__(self) -> AsyncFile:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


_LINES_BYTES = 256 * 1024


@functools.wraps(reading.open)
async def open(*arguments: Any, **options: Any) -> AsyncFile:
    return AsyncFile(await _twin(reading.open)(*arguments, **options))


read = _twin(reading.read)
read_many = _twin(reading.read_many)
prefetch = _twin(reading.prefetch)
"""Await it for the handle, and the handle for the end."""
