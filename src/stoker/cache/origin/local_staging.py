"""Writing files of a folder, in threads; and those that nobody sees, in which parts of uploads lie."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

from stoker.cache.origin import local_files
from stoker.cache.origin.local_files import NewFile
from stoker.cache.origin.local_root import Root
from stoker.cache.origin.port import STAGING, OriginCounters, Part
from stoker.cache.origin.staged_uploads import Staged
from stoker.errors import ObjectNotFound

T = TypeVar("T")
_THREADS = 4
"""Of their own: what waits for a disk to flush holds up nobody who reads."""
_AT_ONCE_BYTES = 1024 * 1024


class FileWriter:
    """Threads in which files below a folder are written."""

    def __init__(self, place: Root, url: str, counters: OriginCounters) -> None:
        self._place = place
        self.root = place.path
        self.url = url
        self.counters = counters
        self._threads = ThreadPoolExecutor(_THREADS, "stoker-cache-writes")

    async def call(self, key: str, function: Callable[[], T]) -> T:
        """Run it in a thread, and do not leave before that has ended: who goes on may close what it works on. Raises
        what is typed, and as `refusal` says."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, function)
        try:
            return await asyncio.shield(running)
        except OSError as error:
            raise local_files.refusal(self.url, key, error) from error
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # nobody else asks for it
            raise

    async def fill(self, file: NewFile, key: str, parts: AsyncGenerator[Part, None]) -> None:
        """All that comes, to a file that is made for it. Raises OriginError where the folder is gone: nothing is
        written to what it was mounted on."""
        await self.call(key, self._place.check)
        await self.call(key, file.open)
        async with aclosing(parts):
            waiting: list[Part] = []
            waiting_bytes = 0
            async for part in parts:
                waiting.append(part)
                waiting_bytes += len(part)
                if waiting_bytes >= _AT_ONCE_BYTES:
                    await self._write(file, key, waiting)
                    waiting, waiting_bytes = [], 0
            if waiting:
                await self._write(file, key, waiting)

    async def _write(self, file: NewFile, key: str, parts: list[Part]) -> None:
        def write() -> None:
            for part in parts:
                file.write(part)

        await self.call(key, write)
        self.counters.bytes_written += sum(map(len, parts))

    def close(self) -> None:
        """Nothing is written any more."""
        self._threads.shutdown(wait=False)


class LocalStaging:
    """As `Staging` in `staged_uploads.py`: below `.stoker-writes/uploads`, on the file system of the objects."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer
        self._below = f"{STAGING}/uploads"
        self._root = f"{writer.root}/{self._below}"

    async def write(self, folder: str, name: Callable[[], str], parts: AsyncIterable[Part]) -> None:
        writer, file = self._writer, NewFile(self._writer.root)

        def publish() -> None:
            os.fsync(file.fd)
            local_files.publish(file, writer.root, f"{self._below}/{folder}/{name()}", None, lambda _: None)

        async def coming() -> AsyncGenerator[Part, None]:
            async for part in parts:
                yield part

        try:
            await writer.fill(file, folder, coming())
            await writer.call(folder, publish)
        finally:
            await writer.call(folder, file.drop)

    async def read(self, folder: str, name: str) -> AsyncGenerator[Part, None]:
        path, at = f"{self._root}/{folder}/{name}", 0
        while part := await self._writer.call(name, partial(_read, path, at)):
            at += len(part)
            yield part

    async def files(self, folder: str) -> list[Staged]:
        return await self._writer.call(folder, lambda: _files(f"{self._root}/{folder}"))

    async def folders(self) -> list[str]:
        return await self._writer.call("", lambda: _names(self._root))

    async def remove(self, folder: str) -> None:
        await self._writer.call(folder, lambda: _remove_tree(f"{self._root}/{folder}"))

    async def remove_unfinished(self, before: float) -> int:
        """Give up files that got no name, and to which nothing was written since (in seconds since 1970): how many."""
        folder = f"{self._writer.root}/{STAGING}/new"
        return await self._writer.call("", lambda: _remove_old(folder, before))


def _read(path: str, at: int) -> bytes:
    """What comes at a place in a file; nothing at its end. Raises ObjectNotFound."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ObjectNotFound(f"{path} is gone") from None
    try:
        return os.pread(fd, _AT_ONCE_BYTES, at)
    finally:
        os.close(fd)


def _names(folder: str) -> list[str]:
    with suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


def _files(folder: str) -> list[Staged]:
    found = []
    for name in _names(folder):
        with suppress(FileNotFoundError):
            entry = os.stat(f"{folder}/{name}")
            found.append(Staged(name, entry.st_size, entry.st_mtime_ns / 1e9))
    return found


def _remove_tree(folder: str) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _remove_old(folder: str, before: float) -> int:
    count = 0
    for name in _names(folder):
        with suppress(FileNotFoundError):
            if os.stat(f"{folder}/{name}").st_mtime < before:
                os.unlink(f"{folder}/{name}")
                count += 1
    return count
