"""Writes blocks on a thread of the native part: many that come at about the same time cost one turn of the loop."""

from __future__ import annotations

import asyncio
import itertools
import os

from stoker._native import Writer

Data = bytes | bytearray | memoryview


class BlockWriter:
    """Lives on one event loop, which it listens on while anything is being written."""

    def __init__(self) -> None:
        self._writer: Writer | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[int]] = {}

    async def write(self, fd: int, offset: int, data: Data) -> int:
        """Write all of it, and close the descriptor; returns its CRC-32C. Raises OSError.

        It is written even if whoever waits for it is cancelled.
        """
        loop = asyncio.get_running_loop()
        if self._writer is None:
            try:
                self._writer = Writer()
            except RuntimeError as error:  # no more threads, or no more descriptors
                os.close(fd)
                raise OSError(str(error)) from error
        if not self._waiting:
            loop.add_reader(self._writer.fileno(), self._take)
        number = next(self._numbers)
        done: asyncio.Future[int] = loop.create_future()
        self._waiting[number] = done
        self._writer.write(number, fd, offset, data)
        return await done

    def _take(self) -> None:
        assert self._writer is not None
        for number, crc, error in self._writer.take():
            done = self._waiting.pop(number)
            if done.done():
                continue
            if error:
                done.set_exception(OSError(error, os.strerror(error)))
            else:
                done.set_result(crc)
        if not self._waiting:
            asyncio.get_running_loop().remove_reader(self._writer.fileno())
