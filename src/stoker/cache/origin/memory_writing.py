"""This process's memory as an origin that can be written to: for tests and for trying things out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing

from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.origin.port import Opened, OriginCounters, Part, not_found
from stoker.cache.origin.staged_origin import StagedOrigin
from stoker.cache.origin.staged_uploads import Staged, StagedUploads
from stoker.cache.origin.writing_port import (
    NO_ATTRIBUTES,
    Attributes,
    Capabilities,
    Described,
    check_writable_key,
    precondition_failed,
    whole,
)
from stoker.errors import ObjectNotFound, OriginReadOnly
from stoker.wire.cache_api import ObjectInfo


class WritableMemoryOrigin(StagedOrigin):
    """A MemoryOrigin that is written to as any other. It keeps content types and metadata, and forgets uploads as it
    forgets all else."""

    def __init__(self, name: str = "", part_bytes: int = 256 * 1024) -> None:
        self.memory = MemoryOrigin(name, part_bytes)
        self.url = self.memory.url
        self.capabilities = Capabilities(
            is_atomic=True,
            has_conditions=True,
            copies_itself=False,
            keeps_content_type=True,
            keeps_metadata=True,
            keeps_owner=False,
        )
        self._attributes: dict[str, tuple[ObjectInfo, Attributes]] = {}
        self._uploads = StagedUploads(self.url, MemoryStaging(), self._put, time.time)

    @property
    def counters(self) -> OriginCounters:
        return self.memory.counters

    async def stat(self, key: str) -> ObjectInfo:
        return await self.memory.stat(key)

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        return await self.memory.read(key, start, stop, version)

    def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[Part, None]:
        return self.memory.stream(key, start, stop, version)

    async def open(self, key: str, stop: int) -> Opened:
        return await self.memory.open(key, stop)

    def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        return self.memory.list(prefix, after, limit)

    async def describe(self, key: str) -> Described:
        info = await self.memory.stat(key)
        known = self._attributes.get(key)
        return Described(info, known[1] if known is not None and known[0] == info else NO_ATTRIBUTES)

    async def _put(
        self,
        key: str,
        parts: AsyncIterable[Part],
        size_bytes: int | None,
        attributes: Attributes,
        if_match: str | None,
        if_none_match: bool,
    ) -> ObjectInfo:
        check_writable_key(self.url, key)
        if attributes.owner is not None:
            raise OriginReadOnly(f"objects in {self.url} belong to nobody: write without an owner")
        self.counters.requests += 1
        async with aclosing(whole(self.url, key, parts, size_bytes)) as coming:
            data = b"".join([part async for part in coming])
        found = self.memory.find(key)
        if if_match is not None and found is None:
            raise not_found(self.url, key)
        if found is not None and (if_none_match or if_match not in (None, "*", found.version)):
            raise precondition_failed(self.url, key, if_match, found.version)
        self.counters.bytes_written += len(data)
        info = self.memory.put(key, data)
        self._attributes[key] = info, attributes
        return info

    async def delete(self, key: str) -> None:
        self.counters.requests += 1
        if self.memory.find(key) is not None:
            self.memory.delete(key)

    async def clean_up(self, now: float, age_s: float) -> int:
        return await self._uploads.clean_up(now, age_s)

    async def close(self) -> None:
        await self.memory.close()


class MemoryStaging:
    """As `Staging` in `staged_uploads.py`."""

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, tuple[bytes, float]]] = {}

    async def write(self, folder: str, name: Callable[[], str], parts: AsyncIterable[Part]) -> None:
        data = b"".join([part async for part in parts])
        self._folders.setdefault(folder, {})[name()] = data, time.time()

    async def read(self, folder: str, name: str) -> AsyncGenerator[Part, None]:
        file = self._folders.get(folder, {}).get(name)
        if file is None:
            raise ObjectNotFound(f"{name} of upload {folder} is gone")
        yield file[0]

    async def files(self, folder: str) -> list[Staged]:
        files = self._folders.get(folder, {})
        return [Staged(name, len(data), written_at) for name, (data, written_at) in files.items()]

    async def folders(self) -> list[str]:
        return list(self._folders)

    async def remove(self, folder: str) -> None:
        self._folders.pop(folder, None)
