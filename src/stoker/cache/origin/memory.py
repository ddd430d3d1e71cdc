"""Objects in this process's memory: for tests and for trying things out."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

from stoker.cache.origin.port import Opened, OriginCounters, changed, check_length, not_found
from stoker.wire.cache_api import ObjectInfo


class MemoryOrigin:
    """A dictionary of objects. The version of an object counts how often it was put.

    Streams come in parts of `part_bytes`.
    """

    def __init__(self, name: str = "", part_bytes: int = 256 * 1024) -> None:
        self.url = f"memory://{name}"
        self.counters = OriginCounters()
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}
        self._puts = 0
        self._part_bytes = part_bytes

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Create or overwrite an object."""
        self._puts += 1
        info = ObjectInfo(key, len(data), f"{self._puts}-{zlib.crc32(data):08x}", float(self._puts))
        self._objects[key] = (info, data)
        return info

    def delete(self, key: str) -> None:
        """Remove an object. Raises KeyError."""
        del self._objects[key]

    def find(self, key: str) -> ObjectInfo | None:
        """An object, if it is there; this is no request."""
        found = self._objects.get(key)
        return None if found is None else found[0]

    async def stat(self, key: str) -> ObjectInfo:
        self.counters.requests += 1
        return self._get(key)[0]

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        piece = self._content(key, version)[start:stop]
        self.counters.bytes_read += len(piece)
        return check_length(self.url, key, piece, start, stop)

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._parts(key, self._content(key, version), start, stop)) as parts:
            async for part in parts:
                yield part

    async def open(self, key: str, stop: int) -> Opened:
        self.counters.requests += 1
        info, data = self._get(key)
        return Opened(info, self._parts(key, data, 0, min(stop, info.size_bytes)))

    async def _parts(self, key: str, data: bytes, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        for first in range(start, stop, self._part_bytes):
            last = min(first + self._part_bytes, stop)
            part = data[first:last]
            self.counters.bytes_read += len(part)
            yield check_length(self.url, key, part, first, last)

    async def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        keys = sorted(key for key in self._objects if key.startswith(prefix))
        keys = keys[bisect.bisect_right(keys, after) if after is not None else 0 :]
        for first in range(0, len(keys), limit):
            self.counters.requests += 1
            yield [self._objects[key][0] for key in keys[first : first + limit]]

    async def close(self) -> None:
        self._objects.clear()

    def _get(self, key: str) -> tuple[ObjectInfo, bytes]:
        found = self._objects.get(key)
        if found is None:
            raise not_found(self.url, key)
        return found

    def _content(self, key: str, version: str) -> bytes:
        """What one request finds. It stays as it is, also if the object is put again meanwhile."""
        self.counters.requests += 1
        info, data = self._get(key)
        if info.version != version:
            raise changed(self.url, key, version, info.version)
        return data
