"""A folder of this machine, or one that is mounted here, as an origin.

Small reads on local file systems are done where they stand: a hop to a thread costs more than they do.
Everything else, and every read of a network file system, goes to a thread; large streams part by part.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncGenerator, Iterator
from operator import length_hint
from pathlib import Path

from msgspec.structs import replace

from stoker.cache.origin.cursors import Cursors
from stoker.cache.origin.local_files import attributes_of, keeps_attributes
from stoker.cache.origin.local_opened import OpenedOnce
from stoker.cache.origin.local_root import Root
from stoker.cache.origin.port import (
    STAGING,
    Entries,
    Opened,
    OriginCounters,
    changed,
    check_length,
    not_found,
    open_in_two,
)
from stoker.cache.origin.writing_port import told_of
from stoker.errors import ObjectNotFound, OriginError
from stoker.wire.cache_api import ObjectInfo

INLINE_BYTES_MAX = 128 * 1024
PART_BYTES = 1024 * 1024

RESCANNED_MAX = 20_000
_A_FOLDER = "a folder"
"""In place of a version, which no file has."""
_Scanned = Iterator[tuple[str, "os.DirEntry[str]"]]


class LocalOrigin:
    """Regular files below a folder; symbolic links are followed only while they stay inside it.

    The version of a file is its size and modification time in nanoseconds. Where the folder itself is gone, or not
    mounted any more, nobody is told that there are no files: that is an OriginError.
    Raises ConfigError if the folder cannot be opened.
    """

    def __init__(self, folder: str) -> None:
        self._place = Root(folder)
        self._root = self._place.path
        self.url = Path(self._root).as_uri() + "/"
        self.counters = OriginCounters()
        self._is_inline = self._place.is_local
        # Folders that were resolved and found to lie inside the root, so that each is resolved once.
        self._inside: dict[str, bool] = {"": True}
        self._lists: Cursors[Iterator[ObjectInfo]] = Cursors()
        self._folders: Cursors[Iterator[ObjectInfo]] = Cursors()
        self._keeps_attributes = keeps_attributes(self._root)
        self._untold: tuple[()] | None = ()

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
        file = OpenedOnce(lambda: self._open(key))
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
            page = await asyncio.to_thread(_take, walk, limit, self.url, self._place)
            try:
                if page:
                    yield page
            except GeneratorExit:
                if len(page) == limit:
                    self._lists.keep(prefix, page[-1].key, walk)
                raise
            if len(page) < limit:
                return

    async def folder(self, prefix: str, after: str | None, limit: int) -> Entries | None:
        """See `ListsFolders`. A folder is looked through anew for each page, unless it is very large."""
        self.counters.requests += 1
        walk = self._folders.take(prefix, after)
        if walk is None:
            entries, folder = await asyncio.to_thread(self._scan, prefix, after)
            is_large = length_hint(entries) > RESCANNED_MAX
            walk = self._right_below(entries, folder, prefix, after)
        else:
            is_large = True
        page = await asyncio.to_thread(_take, walk, limit, self.url, self._place)
        last = page[-1].key if len(page) == limit else None
        if last is not None and is_large:
            self._folders.keep(prefix, last, walk)
        objects = [info for info in page if info.version != _A_FOLDER]
        return Entries(objects, [info.key for info in page if info.version == _A_FOLDER], last)

    def _scan(self, prefix: str, after: str | None) -> tuple[_Scanned, str]:
        """The entries of the folder that a prefix is in, and its name. Raises OriginError."""
        folder, _, _ = prefix.rpartition("/")
        if folder and not self._is_inside(f"{folder}/x"):
            return iter(()), folder
        try:
            return self._entries(folder, prefix, after), folder
        except OSError as error:
            raise OriginError(f"cannot list {self.url}: {error.strerror}") from error

    def _right_below(
        self, entries: _Scanned, folder: str, prefix: str, after: str | None
    ) -> Iterator[ObjectInfo]:
        """What is right below a prefix; of a folder in which anything is, its name alone."""
        if prefix == f"{folder}/":
            yield from self._folder_itself(prefix, prefix, after)
        for name, entry in entries:
            if not name.endswith("/"):
                info = self._listed(name, entry)
                if info is not None:
                    yield info
            elif name.startswith(prefix) and (after is None or name > after) and self._has_objects(name):
                yield ObjectInfo(name, 0, _A_FOLDER)

    def _has_objects(self, prefix: str) -> bool:
        return next(self._walk(prefix, None), None) is not None

    async def close(self) -> None:
        self._inside.clear()
        self._lists.clear()
        self._folders.clear()

    def _open(self, key: str) -> int:
        if not self._is_inside(key):
            raise not_found(self.url, key)
        try:
            return os.open(
                f"{self._root}/{key}",
                os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW,
            )
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise self._missing(key) from error
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
            raise self._missing(key) from second

    def _missing(self, key: str) -> ObjectNotFound:
        """The error for a key that is not there. Raises OriginError if that is because the folder itself is gone."""
        self._place.check()
        return not_found(self.url, key)

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
            info = self._info(key, os.fstat(fd))
            if not self._keeps_attributes:
                return info
            return replace(info, headers=told_of(attributes_of(fd)))
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

    def _read_part(self, file: OpenedOnce, key: str, start: int, stop: int, version: str) -> bytes:
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
        if prefix == f"{folder}/":
            yield from self._folder_itself(prefix, prefix, after)
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
                    yield from self._folder_itself(name, prefix, after)
                    above.append(real)
                    stack.append(self._entries(name[:-1], prefix, after))
                    break
            else:
                stack.pop()
                above.pop()

    def _folder_itself(self, key: str, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        """The object that a folder is, if it is one: only where it can be written."""
        return iter(())

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
                info = _info_of(key, found) if stat.S_ISREG(found.st_mode) else None
                return info if info is None or self._untold == () else replace(info, headers=None)
            return self._stat(key)
        except (FileNotFoundError, UnicodeEncodeError, ObjectNotFound, OriginError):
            return None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _info_of(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, _version(found), found.st_mtime)


def _version(found: os.stat_result) -> str:
    return f"{found.st_size}-{found.st_mtime_ns}"


def _take(walk: Iterator[ObjectInfo], limit: int, url: str, place: Root) -> list[ObjectInfo]:
    page: list[ObjectInfo] = []
    try:
        for info in walk:
            page.append(info)
            if len(page) == limit:
                break
    except OSError as error:
        raise OriginError(f"cannot list {url}: {error.strerror}") from error
    place.check()  # where it is gone, what was not found may be there still
    return page
