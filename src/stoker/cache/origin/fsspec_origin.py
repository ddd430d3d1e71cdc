"""Any file system that fsspec opens, as an origin."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import fsspec

from stoker.cache.origin.port import Opened, OriginCounters, changed, check_length, not_found, open_in_two
from stoker.errors import ConfigError, OriginError, StokerError
from stoker.wire.cache_api import ObjectInfo

_VERSION_FIELDS = (
    "ETag",
    "etag",
    "e_tag",
    "checksum",
    "md5Hash",
    "mtime",
    "created",
    "last_modified",
    "LastModified",
)


class FsspecOrigin:
    """A folder of an fsspec file system, each call in a thread.

    The version of an object is its size and what the file system gives as its tag, checksum or time.
    Raises ConfigError if fsspec cannot open the URL.
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"cannot open the origin {url.partition('?')[0]}: {error}") from error
        self.url = url.partition("?")[0]
        self.counters = OriginCounters()
        self._root = str(root).rstrip("/")

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
        self.counters.requests += 1
        found: Sequence[ObjectInfo] = await self._call(prefix, self._list)
        keys = [info.key for info in found]
        first = 0 if after is None else bisect.bisect_right(keys, after)
        for start in range(first, len(found), limit):
            yield [*found[start : start + limit]]

    async def close(self) -> None:
        self._fs = None

    async def _check_version(self, key: str, version: str) -> None:
        """Raises ObjectNotFound, ObjectChanged."""
        found = await self.stat(key)
        if found.version != version:
            raise changed(self.url, key, version, found.version)

    async def _call(self, key: str, function: Any, *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(function, key, *arguments)
        except StokerError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise not_found(self.url, key) from error
        except Exception as error:
            raise OriginError(f"{self.url}: {key!r}: {type(error).__name__}: {str(error)[:300]}") from error

    def _path(self, key: str) -> str:
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise not_found(self.url, key)
        return f"{self._root}/{key}"

    def _stat(self, key: str) -> ObjectInfo:
        meta = self._fs.info(self._path(key))
        if meta["type"] != "file":
            raise not_found(self.url, key)
        return ObjectInfo(key, int(meta["size"]), _version(meta))

    def _read(self, key: str, start: int, stop: int) -> bytes:
        return bytes(self._fs.cat_file(self._path(key), start=start, end=stop))

    def _list(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        base = self._path(folder) if folder else self._root
        try:
            found = self._fs.find(base, detail=True)
        except FileNotFoundError:
            return []
        infos = []
        for path, meta in found.items():
            key = str(path).removeprefix(self._root).lstrip("/")
            if key.startswith(prefix) and meta["type"] == "file":
                infos.append(ObjectInfo(key, int(meta["size"]), _version(meta)))
        return sorted(infos, key=lambda info: info.key)


def _version(meta: dict[str, Any]) -> str:
    mark = next((meta[field] for field in _VERSION_FIELDS if meta.get(field) is not None), "")
    return f"{meta['size']}-{str(mark).strip(chr(34))}"
