"""Objects in this process's memory: for tests and for trying things out."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import AsyncGenerator

from stoker.cache.origin.port import OriginCounters, changed, check_length, not_found
from stoker.wire.cache_api import ObjectInfo


class MemoryOrigin:
    """A dictionary of objects. The version of an object counts how often it was put."""

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self.counters = OriginCounters()
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}
        self._puts = 0

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """Create or overwrite an object."""
        self._puts += 1
        info = ObjectInfo(key, len(data), f"{self._puts}-{zlib.crc32(data):08x}")
        self._objects[key] = (info, data)
        return info

    def delete(self, key: str) -> None:
        """Remove an object. Raises KeyError."""
        del self._objects[key]

    async def stat(self, key: str) -> ObjectInfo:
        self.counters.requests += 1
        return self._get(key)[0]

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        self.counters.requests += 1
        info, data = self._get(key)
        if info.version != version:
            raise changed(self.url, key, version, info.version)
        piece = data[start:stop]
        self.counters.bytes_read += len(piece)
        return check_length(self.url, key, piece, start, stop)

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
