"""Objects as files: one version each, with as much read ahead as the way of reading asks for.

Columns of a table are read here and there, and cost the bytes that they have. What is read on from where the last read
ended is fetched in larger and larger parts, so that lines cost few requests.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

from fsspec.spec import AbstractBufferedFile

from stoker.cache.client.client import CacheClient
from stoker.errors import ShortBody
from stoker.wire.cache_api import ObjectInfo

HEAD_BYTES = 64 * 1024
"""Of each object, fetched by the request that opens it; most small objects are read with that one."""
AHEAD_BYTES_MIN = 64 * 1024
AHEAD_BYTES_MAX = 4 * 1024 * 1024
_LINE_BYTES = 8 * 1024
"""Of what is read by lines where nothing is to be read ahead."""


class ObjectFile(io.BufferedReader):
    """An object, opened for reading. Raises ObjectChanged where the version that was opened is to be had no longer.

    `ahead_bytes`: how much is fetched at most beyond what is asked for; 0: nothing. Not for two threads at once, as any
    file. Pickled, it is opened again at the same version and place.
    """

    raw: _RawObject

    def __init__(
        self,
        client: CacheClient,
        bucket: str,
        info: ObjectInfo,
        head: bytes = b"",
        ahead_bytes: int = AHEAD_BYTES_MAX,
    ) -> None:
        raw = _RawObject(client, bucket, info, head, ahead_bytes)
        super().__init__(raw, max(ahead_bytes, _LINE_BYTES))
        # What is always fetched need not be told of: that would cost each small read.
        self._told_from_bytes = min(ahead_bytes, AHEAD_BYTES_MIN)

    @property
    def size(self) -> int:
        """Of the object, in bytes; this is how fsspec's files call it."""
        return self.raw.info.size_bytes

    @property
    def version(self) -> str:
        """The version of the object that is read."""
        return self.raw.info.version

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self._told_from_bytes:
            self.raw.wanted_stop = self.tell() + size
        return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        self.raw.wanted_stop = self.tell() + memoryview(buffer).nbytes
        return super().readinto(buffer)

    def read1(self, size: int = -1, /) -> bytes:
        # Without this, a part as small as what is asked for is fetched; text asks for 8 KiB.
        self.peek(1)
        return super().read1(size)

    def __reduce__(self) -> tuple[Callable[..., ObjectFile], tuple[object, ...]]:
        raw = self.raw
        return _again, (raw.client, raw.bucket, raw.info, raw.ahead_bytes, self.tell())


def open_object(client: CacheClient, bucket: str, key: str, ahead_bytes: int | None = None) -> ObjectFile:
    """Open an object as it is now, with one request. Raises ObjectNotFound, AccessDenied, OriginError."""
    part = client.part(bucket, key, 0, HEAD_BYTES)
    info = ObjectInfo(key, part.size_bytes, part.version)
    return ObjectFile(
        client, bucket, info, part.data, AHEAD_BYTES_MAX if ahead_bytes is None else ahead_bytes
    )


class _RawObject(io.RawIOBase):
    """Gives what is wanted, and what reading that goes on will want next; less than the buffer has room for."""

    def __init__(
        self, client: CacheClient, bucket: str, info: ObjectInfo, head: bytes, ahead_bytes: int
    ) -> None:
        super().__init__()
        self.client = client
        self.bucket = bucket
        self.info = info
        self.ahead_bytes = ahead_bytes
        self.name = f"stoker://{bucket}/{info.key}"
        self.wanted_stop = 0
        self.head = head
        self._position = 0
        self._fetched_to = len(head)
        self._in_a_row = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.info.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._position = base + offset
        self.wanted_stop = 0
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        start = self._position
        if start < len(self.head):
            data = self.head[start : start + len(buffer)]
        else:
            self._in_a_row = self._in_a_row + 1 if start == self._fetched_to else 0
            ahead = min(AHEAD_BYTES_MIN << min(self._in_a_row, 16), self.ahead_bytes)
            if self.wanted_stop <= start:
                ahead = max(ahead, _LINE_BYTES)
            stop = max(self.wanted_stop, start + ahead)
            data = self._fetch(start, min(stop, start + len(buffer), self.info.size_bytes))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        start = self._position
        if len(self.head) == self.info.size_bytes:
            data = self.head[start:]
        else:
            data = self._fetch(start, self.info.size_bytes)
        self._position += len(data)
        return data

    def _fetch(self, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        data = self.client.read(self.bucket, self.info.key, start, stop, version=self.info.version)
        if len(data) != stop - start:
            raise ShortBody(f"{self.name}: bytes [{start}, {stop}) came as {len(data)} bytes")
        self._fetched_to = stop
        return data


class ThreadsFile(io.BufferedIOBase):
    """An object for who reads one file in many threads without a lock, as DuckDB does: each has a place of its own."""

    def __init__(self, opened: ObjectFile) -> None:
        super().__init__()
        self._opened = opened
        self._local = threading.local()

    @property
    def size(self) -> int:
        """Of the object, in bytes."""
        return self._opened.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._mine().tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._mine().seek(offset, whence)

    def read(self, size: int | None = -1, /) -> bytes:
        return self._mine().read(size)

    def read1(self, size: int = -1, /) -> bytes:
        return self._mine().read1(size)

    def readinto(self, buffer: Any, /) -> int:
        return self._mine().readinto(buffer)

    def _mine(self) -> ObjectFile:
        if self.closed:
            raise ValueError("read of closed file")
        mine: ObjectFile | None = getattr(self._local, "file", None)
        if mine is None:
            raw = self._opened.raw
            mine = ObjectFile(raw.client, raw.bucket, raw.info, raw.head, raw.ahead_bytes)
            self._local.file = mine
        return mine


class CachedFile(AbstractBufferedFile):  # type: ignore[misc]
    """An object behind one of fsspec's own caches, for those who ask for one by `cache_type`."""

    def __init__(self, client: CacheClient, bucket: str, info: ObjectInfo, *arguments: Any, **options: Any):
        self._client = client
        self._bucket = bucket
        self._info = info
        super().__init__(*arguments, size=info.size_bytes, **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        stop = min(end, self._info.size_bytes)
        if start >= stop:
            return b""
        return self._client.read(self._bucket, self._info.key, start, stop, version=self._info.version)


def _again(client: CacheClient, bucket: str, info: ObjectInfo, ahead_bytes: int, position: int) -> ObjectFile:
    file = ObjectFile(client, bucket, info, b"", ahead_bytes)
    file.seek(position)
    return file
