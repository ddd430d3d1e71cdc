"""A folder of this machine, or one that is mounted here, as an origin.

Small reads on local file systems are done where they stand: a hop to a thread costs more than they do.
Everything else, and every read of a network file system, goes to a thread; large streams part by part.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

from stoker.cache.origin.cursors import Cursors
from stoker.cache.origin.port import (
    STAGING,
    Opened,
    OriginCounters,
    changed,
    check_length,
    not_found,
    open_in_two,
)
from stoker.errors import ConfigError, ObjectNotFound, OriginError
from stoker.wire.cache_api import ObjectInfo

INLINE_BYTES_MAX = 128 * 1024
PART_BYTES = 1024 * 1024
_LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "f2fs", "zfs"}
)


class LocalOrigin:
    """Regular files below a folder; symbolic links are followed only while they stay inside it.

    The version of a file is its size and modification time in nanoseconds.
    Raises ConfigError if the folder cannot be opened.
    """

    def __init__(self, folder: str) -> None:
        self._root = os.path.realpath(folder)
        if not os.path.isdir(self._root):
            raise ConfigError(f"the origin folder {folder!r} is not there, or is not a folder")
        self.url = Path(self._root).as_uri() + "/"
        self.counters = OriginCounters()
        self._is_inline = _file_system_of(self._root) in _LOCAL_FILE_SYSTEMS
        # Folders that were resolved and found to lie inside the root, so that each is resolved once.
        self._inside: dict[str, bool] = {"": True}
        self._lists: Cursors[Iterator[ObjectInfo]] = Cursors()

    async def stat(self, key: str) -> ObjectInfo:
        self.counters.requests += 1
        if self._is_inline:
            return self._stat(key)
        return await asyncio.to_thread(self._stat, key)

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        self.counters.requests += 1
        if self._is_inline and stop - start <= INLINE_BYTES_MAX:
            data = self._read(key, start, stop, version)
        else:
            data = await asyncio.to_thread(self._read, key, start, stop, version)
        self.counters.bytes_read += len(data)
        return check_length(self.url, key, data, start, stop)

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[bytes, None]:
        """Parts of 1 MiB, each checked to be of that version before it is yielded."""
        if stop - start <= PART_BYTES:
            yield await self.read(key, start, stop, version)
            return
        self.counters.requests += 1
        file = _OpenedOnce(lambda: self._open(key))
        try:
            for first in range(start, stop, PART_BYTES):
                last = min(first + PART_BYTES, stop)
                part = await asyncio.to_thread(self._read_part, file, key, first, last, version)
                self.counters.bytes_read += len(part)
                yield check_length(self.url, key, part, first, last)
        finally:
            file.leave()

    async def open(self, key: str, stop: int) -> Opened:
        return await open_in_two(self, key, stop)

    async def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        walk = self._lists.take(prefix, after) or self._walk(prefix, after)
        while True:
            self.counters.requests += 1
            page = await asyncio.to_thread(_take, walk, limit, self.url)
            try:
                if page:
                    yield page
            except GeneratorExit:
                if len(page) == limit:
                    self._lists.keep(prefix, page[-1].key, walk)
                raise
            if len(page) < limit:
                return

    async def close(self) -> None:
        self._inside.clear()
        self._lists.clear()

    def _open(self, key: str) -> int:
        if not self._is_inside(key):
            raise not_found(self.url, key)
        try:
            return os.open(
                f"{self._root}/{key}",
                os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW,
            )
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise not_found(self.url, key) from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise not_found(
                    self.url, key
                ) from error  # and no failure, which would be counted against the origin
            return self._open_link(key, error)

    def _open_link(self, key: str, error: OSError) -> int:
        real = os.path.realpath(f"{self._root}/{key}")
        if not os.path.islink(f"{self._root}/{key}") or os.path.commonpath([self._root, real]) != self._root:
            if os.path.islink(f"{self._root}/{key}"):
                raise not_found(self.url, key) from error
            raise OriginError(f"cannot read {key!r} in {self.url}: {error.strerror}") from error
        try:
            return os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as second:
            raise not_found(self.url, key) from second

    def _is_inside(self, key: str) -> bool:
        folder, _, name = key.rpartition("/")
        if name in ("", ".", "..") or "\0" in key or key.startswith("/"):
            return False
        known = self._inside.get(folder)
        if known is None:
            parts = folder.split("/")
            known = all(part not in ("", ".", "..", STAGING) for part in parts)
            if known:
                real = os.path.realpath(f"{self._root}/{folder}")
                known = os.path.commonpath([self._root, real]) == self._root
            if len(self._inside) < 100_000:
                self._inside[folder] = known
        return known

    def _stat(self, key: str) -> ObjectInfo:
        fd = self._open(key)
        try:
            return self._info(key, os.fstat(fd))
        finally:
            os.close(fd)

    def _info(self, key: str, found: os.stat_result) -> ObjectInfo:
        if not stat.S_ISREG(found.st_mode):
            raise not_found(self.url, key)
        return _info_of(key, found)

    def _read(self, key: str, start: int, stop: int, version: str) -> bytes:
        fd = self._open(key)
        try:
            return self._read_from(fd, key, start, stop, version)
        finally:
            os.close(fd)

    def _read_part(self, file: _OpenedOnce, key: str, start: int, stop: int, version: str) -> bytes:
        fd = file.take()
        if fd is None:
            return b""  # who asked has left
        try:
            return self._read_from(fd, key, start, stop, version)
        finally:
            file.put_back()

    def _read_from(self, fd: int, key: str, start: int, stop: int, version: str) -> bytes:
        try:
            before = self._info(key, os.fstat(fd))
            if before.version != version:
                raise changed(self.url, key, version, before.version)
            data = os.pread(fd, stop - start, start)
            while len(data) < stop - start:
                more = os.pread(fd, stop - start - len(data), start + len(data))
                if not more:
                    break
                data += more
            # The file may have been rewritten in place while it was read.
            after = _version(os.fstat(fd))
            if after != version:
                raise changed(self.url, key, version, after)
            return data
        except OSError as error:
            raise OriginError(f"cannot read {key!r} in {self.url}: {error.strerror}") from error

    def _walk(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        folder, _, _ = prefix.rpartition("/")
        if folder and not self._is_inside(f"{folder}/x"):
            return
        above = [os.path.realpath(f"{self._root}/{folder}")]
        stack = [self._entries(folder, prefix, after)]
        while stack:
            for name, entry in stack[-1]:
                if not name.endswith("/"):
                    info = self._listed(name, entry)
                    if info is not None:
                        yield info
                    continue
                real = os.path.realpath(entry.path) if entry.is_symlink() else f"{above[-1]}/{entry.name}"
                # A link to a folder above would be walked round and round.
                if real not in above:
                    above.append(real)
                    stack.append(self._entries(name[:-1], prefix, after))
                    break
            else:
                stack.pop()
                above.pop()

    def _entries(self, folder: str, prefix: str, after: str | None) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """A folder's entries in the order of the keys: a sub-folder sorts as its name with a slash."""
        found: list[tuple[str, os.DirEntry[str]]] = []
        try:
            with os.scandir(f"{self._root}/{folder}") as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if _is_folder(entry) and self._is_inside(f"{name}/x"):
                        name += "/"
                        if not (name.startswith(prefix) or prefix.startswith(name)):
                            continue
                        if after is not None and name < after and not after.startswith(name):
                            continue
                    elif not name.startswith(prefix) or (after is not None and name <= after):
                        continue
                    found.append((name, entry))
        except (FileNotFoundError, NotADirectoryError):
            return iter(())
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return iter(())
            raise
        found.sort(key=lambda pair: pair[0])
        return iter(found)

    def _listed(self, key: str, entry: os.DirEntry[str]) -> ObjectInfo | None:
        try:
            key.encode()
            if not entry.is_symlink():
                found = entry.stat()
                return _info_of(key, found) if stat.S_ISREG(found.st_mode) else None
            return self._stat(key)
        except (FileNotFoundError, UnicodeEncodeError, ObjectNotFound, OriginError):
            return None


class _OpenedOnce:
    """A descriptor that is opened when it is first taken, by one thread at a time.

    A thread cannot be called back. If its asker leaves while it reads, it closes the descriptor itself
    afterwards: closed under its hands, the number could be another file's by the time it reads.
    """

    def __init__(self, open_file: Callable[[], int]) -> None:
        self._open_file = open_file
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._is_taken = False
        self._is_left = False

    def take(self) -> int | None:
        """Until `put_back`; None after `leave`. Raises what opening it raises."""
        with self._lock:
            if self._is_left:
                return None
            self._is_taken = True
        try:
            if self._fd is None:
                self._fd = self._open_file()
        except BaseException:
            self.put_back()
            raise
        return self._fd

    def put_back(self) -> None:
        with self._lock:
            self._is_taken = False
            self._close_if_over()

    def leave(self) -> None:
        """Nobody will take it again. Does not wait for who has it."""
        with self._lock:
            self._is_left = True
            self._close_if_over()

    def _close_if_over(self) -> None:
        if self._is_left and not self._is_taken and self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _info_of(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, _version(found), found.st_mtime)


def _version(found: os.stat_result) -> str:
    return f"{found.st_size}-{found.st_mtime_ns}"


def _take(walk: Iterator[ObjectInfo], limit: int, url: str) -> list[ObjectInfo]:
    page: list[ObjectInfo] = []
    try:
        for info in walk:
            page.append(info)
            if len(page) == limit:
                break
    except OSError as error:
        raise OriginError(f"cannot list {url}: {error.strerror}") from error
    return page


def _file_system_of(path: str) -> str:
    """The type of the file system that `path` lies on, as /proc names it; empty if it cannot be told."""
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                fields = line.split(" ")
                point = fields[1].replace("\\040", " ")
                if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
                    best, kind = point, fields[2]
    except OSError:
        return ""
    return kind
