"""Any file system that fsspec opens, as an origin.

What is certain of an object is as much as its file system tells: an entity tag or a checksum tells any two contents
apart; a time, only those that were written at different times as it counts them (most web servers: whole seconds);
where there is none of these, another content of the same length is not noticed.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from urllib.parse import quote, unquote

import fsspec

from stoker.cache.origin.content import seconds_of
from stoker.cache.origin.open import without_query, without_secrets
from stoker.cache.origin.port import (
    STAGING,
    Opened,
    OriginCounters,
    changed,
    check_length,
    not_found,
    open_in_two,
)
from stoker.errors import ConfigError, ObjectNotFound, OriginError, StokerError
from stoker.wire.cache_api import ObjectInfo

_MODIFIED_FIELDS = ("LastModified", "last_modified", "Last-Modified", "mtime", "modified", "updated")
_VERSION_FIELDS = (
    "ETag",
    "etag",
    "e_tag",
    "checksum",
    "md5Hash",
    "Content-MD5",
    "Digest",
    "mtime",
    "modificationTime",
    "modify",
    "created",
    "last_modified",
    "LastModified",
    "Last-Modified",
)
_TIMES = ("mtime", "modificationTime", "modify", "modified", "created", "last_modified", "LastModified")
_NO_PARTS = ("", ".", "..", STAGING)
_ABSENT_STATUSES = (404, 410)
_CONNECTED = frozenset(("sftp", "ssh", "ftp"))
"""File systems over one connection, which they do not make again, and which carries one request at a time: FTP mixes up
the answers of several, and paramiko's SFTP may wait for ever."""


class FsspecOrigin:
    """A folder of an fsspec file system, each call in a thread.

    The version of an object is its size and what the file system gives as its tag, checksum or time.
    A web server must answer ranges, and is listed by its pages of links. Raises ConfigError if fsspec cannot open the
    URL.
    """

    def __init__(self, url: str) -> None:
        self.url = _shown(url)
        self.counters = OriginCounters()
        self._opened_url = url
        scheme = url.partition("://")[0]
        self._is_connected = scheme in _CONNECTED
        # Requests that wait for their turn take none of the threads in which others read.
        self._threads = ThreadPoolExecutor(1, "stoker-cache-origin") if self._is_connected else None
        self._opening = threading.Lock()
        self._fs: Any = None
        try:
            root = self._open()
        except Exception as error:
            raise ConfigError(
                f"cannot open the origin {self.url}: {without_secrets(str(error), url)}"
            ) from error
        # Of a web server the paths are URLs: keys are quoted in them, and a query stands behind them.
        self._is_web = root.startswith(("http://", "https://"))
        root, mark, query = root.partition("?") if self._is_web else (root, "", "")
        self._root, self._query = root.rstrip("/"), mark + query

    def _open(self) -> str:
        """Connect, where that is needed. The path in the file system."""
        # SFTP has no such cache, and takes no such option.
        options = {} if self._opened_url.startswith(("sftp:", "ssh:")) else {"use_listings_cache": False}
        self._fs, root = fsspec.core.url_to_fs(self._opened_url, skip_instance_cache=True, **options)
        return str(root)

    def _files(self) -> Any:
        """The file system; opened again where its connection was given up."""
        with self._opening:
            if self._fs is None:
                self._open()
            return self._fs

    async def stat(self, key: str) -> ObjectInfo:
        self.counters.requests += 1
        found: ObjectInfo = await self._call(key, self._stat)
        return found

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        await self._check_version(key, version)
        self.counters.requests += 1
        data: bytes = await self._call(key, self._read, start, stop)
        self.counters.bytes_read += len(data)
        # The read itself cannot be tied to a version: only if both looks agree is it of that one.
        await self._check_version(key, version)
        return check_length(self.url, key, data, start, stop)

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[bytes, None]:
        """One part: most file systems ask for a range in one request, and it is checked as a whole."""
        yield await self.read(key, start, stop, version)

    async def open(self, key: str, stop: int) -> Opened:
        return await open_in_two(self, key, stop)

    async def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        """A folder is listed when its turn comes: a page costs what lies before its end, and each folder as a whole."""
        walk = self._walk(prefix, after)
        while page := await self._call(prefix, lambda _: list(islice(walk, limit))):
            yield page
            if len(page) < limit:
                return

    async def close(self) -> None:
        self._fs = None
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _check_version(self, key: str, version: str) -> None:
        """Raises ObjectNotFound, ObjectChanged."""
        found = await self.stat(key)
        if found.version != version:
            raise changed(self.url, key, version, found.version)

    async def _call(self, key: str, function: Any, *arguments: Any) -> Any:
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, function, key, *arguments)
        except StokerError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            if _is_outage(error.__cause__):
                raise self._failed(key, error.__cause__) from error
            raise not_found(self.url, key) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
                raise not_found(self.url, key) from error
            if self._is_connected:
                self._fs = None
            raise self._failed(key, error) from error

    def _failed(self, key: str, error: BaseException | None) -> OriginError:
        said = without_secrets(str(error), self._opened_url)[:300]
        return OriginError(f"{self.url}: {key!r}: {type(error).__name__}: {said}")

    def _path(self, key: str) -> str:
        if any(part in _NO_PARTS for part in key.split("/")):
            raise not_found(self.url, key)
        return f"{self._root}/{quote(key) if self._is_web else key}{self._query}"

    def _stat(self, key: str) -> ObjectInfo:
        meta = self._files().info(self._path(key))
        # A web server answers for a folder with a page, at the folder's URL.
        if meta["type"] != "file" or (self._is_web and str(meta.get("url")).partition("?")[0].endswith("/")):
            raise not_found(self.url, key)
        return self._info(key, meta)

    def _info(self, key: str, meta: dict[str, Any]) -> ObjectInfo:
        if meta.get("size") is None:
            raise OriginError(f"{self.url} does not tell how long {key!r} is: it cannot be cached")
        return ObjectInfo(key, int(meta["size"]), _version(meta), _modified_s(meta))

    def _read(self, key: str, start: int, stop: int) -> bytes:
        return bytes(self._files().cat_file(self._path(key), start=start, end=stop))

    def _walk(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder and any(part in _NO_PARTS for part in folder.split("/")):
            return
        stack = [self._entries(f"{folder}/" if folder else "", prefix, after)]
        while stack:
            for key, meta in stack[-1]:
                if key.endswith("/"):
                    stack.append(self._entries(key, prefix, after))
                    break
                try:
                    if meta.get("size") is None:
                        self.counters.requests += 1
                        yield self._stat(key)
                    else:
                        yield self._info(key, meta)
                except (FileNotFoundError, ObjectNotFound):
                    continue  # it is gone meanwhile, or is no object
            else:
                stack.pop()

    def _entries(self, folder: str, prefix: str, after: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
        """A folder's objects and folders, in the order of the keys: a folder sorts as its name with a slash."""
        self.counters.requests += 1
        try:
            listed = self._files().ls(self._folder_path(folder), detail=True)
        except OSError as error:
            is_absent = (
                isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno == errno.ENAMETOOLONG
            )
            if not is_absent or _is_outage(error.__cause__):
                raise
            return iter(())
        found: list[tuple[str, dict[str, Any]]] = []
        for meta in listed:
            name = self._name(meta, folder)
            if name is None:
                continue
            key = folder + name
            if meta["type"] == "directory":
                key += "/"
                if not (key.startswith(prefix) or prefix.startswith(key)):
                    continue
                if after is not None and key < after and not after.startswith(key):
                    continue
            elif meta["type"] != "file" or not key.startswith(prefix) or (after is not None and key <= after):
                continue
            found.append((key, meta))
        return iter(sorted(found, key=lambda pair: pair[0]))

    def _folder_path(self, folder: str) -> str:
        if self._is_web:
            return f"{self._root}/{quote(folder)}{self._query}"
        return f"{self._root}/{folder}".rstrip("/") or "/"

    def _name(self, meta: dict[str, Any], folder: str) -> str | None:
        """An entry's name in its folder; None for what is the folder itself, or no part of it."""
        path = str(meta["name"]).rstrip("/")
        parent, _, name = path.rpartition("/")
        if self._is_web:
            # A page may link to anything, and to itself in another order.
            if unquote(parent) != unquote(f"{self._root}/{folder}").rstrip("/") or "?" in name or "#" in name:
                return None
            name = unquote(name)
        elif path.strip("/") == self._folder_path(folder).strip("/"):
            return None  # what is listed may be a file of that name, as its only entry
        try:
            name.encode()
        except UnicodeEncodeError:
            return None
        return None if name in _NO_PARTS or "/" in name else name


def _shown(url: str) -> str:
    """The URL without its secrets. Of users there is a mark: what is held of one's is not another's."""
    shown = without_query(url)
    user = url.partition("://")[2].partition("/")[0].rpartition("@")[0].partition(":")[0]
    mark = hashlib.sha256(unquote(user).encode()).hexdigest()[:8]
    return shown.replace("://", f"://user-{mark}@", 1) if user else shown


def _is_outage(cause: BaseException | None) -> bool:
    """Whether what is said not to be there could only not be asked for: fsspec's HTTP says the same of both."""
    is_web = cause is not None and type(cause).__module__.partition(".")[0] == "aiohttp"
    return is_web and getattr(cause, "status", None) not in _ABSENT_STATUSES


def _modified_s(meta: dict[str, Any]) -> float:
    for field in _MODIFIED_FIELDS:
        mark = meta.get(field)
        if isinstance(mark, datetime):
            return mark.timestamp()
        if isinstance(mark, (int, float)):
            return float(mark)
        if isinstance(mark, str) and mark:
            return seconds_of(mark)
    return 0.0


def _version(meta: dict[str, Any]) -> str:
    mark = next((meta[field] for field in _VERSION_FIELDS if meta.get(field) is not None), "")
    if isinstance(mark, datetime):
        mark = mark.timestamp()  # some tell it as this when asked, and as that when listed
    return f"{meta['size']}-{str(mark).strip(chr(34))}"


def is_taken_for(meta: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a file cannot be told from another one by its version, which only counts time."""
    field = next((field for field in _VERSION_FIELDS if meta.get(field) is not None), None)
    return field in _TIMES and _version(meta) == _version(before)


def written_at(meta: dict[str, Any]) -> float:
    """When a file was written, in seconds since 1970; for ever from now where that is not told."""
    mark = next((meta[field] for field in _TIMES if meta.get(field) is not None), None)
    if isinstance(mark, str):
        try:
            # As FTP says it.
            mark = datetime.strptime(mark[:14], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
        except ValueError:
            return math.inf
    if isinstance(mark, datetime):
        return mark.timestamp()
    return float(mark) if isinstance(mark, int | float) else math.inf
