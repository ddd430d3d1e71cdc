"""Exact bytes of a dataset's objects, of the versions that its index was made from."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from stoker.base.ranges import ByteRange
from stoker.cache.client.client import ByteRange as Part
from stoker.data.attach import Served
from stoker.data.formats.source import IndexProgress, Source
from stoker.data.formats.table_index import Scanned
from stoker.errors import (
    AccessDenied,
    CacheError,
    ConfigError,
    DatasetChanged,
    EmptyDataset,
    ObjectChanged,
    ObjectNotFound,
    StokerError,
)
from stoker.wire.cache_api import ObjectInfo

log = logging.getLogger("stoker.data")
T = TypeVar("T")
R = TypeVar("R")
THREADS = 4
"""So many objects are read at once: enough to hide the latency of an origin."""


class Objects:
    """Reads the objects under a prefix, which a `Source` finds when it is first asked."""

    def __init__(self, served: Served | Source) -> None:
        self._served = served

    @property
    def where(self) -> str:
        """For messages."""
        if isinstance(self._served, Source):
            return self._served.url
        return f"stoker://{self._served.bucket}/{self._served.prefix}"

    @property
    def prefix(self) -> str:
        return self._served.prefix

    def listed(self) -> list[ObjectInfo]:
        """All objects under the prefix, but folders."""
        found = self._served.client.list_objects(self._served.bucket, self._served.prefix)
        return [info for info in found if not info.key.endswith("/")]

    def read(self, info: ObjectInfo, start: int, stop: int) -> bytes:
        """Bytes `[start, stop)` of that version of an object. Raises DatasetChanged, CacheError."""
        came: bytes | StokerError
        try:
            came = self._served.client.read(
                self._served.bucket, info.key, start, stop, version=info.version or None
            )
        except (ObjectChanged, ObjectNotFound) as error:
            came = error
        return self._checked(info, ByteRange(start, stop), came)

    def read_spans(self, info: ObjectInfo, spans: Sequence[ByteRange]) -> list[bytes]:
        """Several parts of one object, with one request. Raises as `read`."""
        return self.read_parts([(info, spans)])[0]

    def read_parts(self, wanted: Sequence[tuple[ObjectInfo, Sequence[ByteRange]]]) -> list[list[bytes]]:
        """Parts of several objects, with one request. Raises as `read`."""
        parts = [
            Part(info.key, span.start, span.stop, info.version or None)
            for info, spans in wanted
            for span in spans
        ]
        coming = iter(self._served.client.read_ranges(self._served.bucket, parts, errors="return"))
        return [[self._checked(info, span, next(coming)) for span in spans] for info, spans in wanted]

    def refresh(self) -> None:
        """Have the origin asked again what is there, if who reads may do that."""
        try:
            self._served.client.refresh(self._served.bucket, self._served.prefix)
        except (CacheError, AccessDenied) as error:
            log.debug("%s is not refreshed: %s", self.where, error)

    def watched(self, chosen: Sequence[ObjectInfo], coming: Iterable[Scanned]) -> Iterator[Scanned]:
        """What comes of those objects, one after the other; who wants to is told how far it is."""
        report = self._served.on_progress if isinstance(self._served, Source) else None
        sizes = [info.size_bytes for info in chosen]
        total_bytes, done_bytes, rows = sum(sizes), 0, 0
        for number, (found, size_bytes) in enumerate(zip(coming, sizes, strict=True), 1):
            done_bytes += size_bytes
            rows += sum(group.rows for group in found.groups)
            if report is not None:
                report(IndexProgress(number, len(sizes), rows, done_bytes, total_bytes))
            yield found

    def _checked(self, info: ObjectInfo, span: ByteRange, came: bytes | StokerError) -> bytes:
        if isinstance(came, bytes) and len(came) == span.size_bytes:
            return came
        if isinstance(came, StokerError) and not isinstance(came, ObjectChanged | ObjectNotFound):
            raise came
        self.refresh()  # or the next start would be given the same old list
        if isinstance(came, bytes):
            raise DatasetChanged(_changed(info, f"bytes [{span.start}, {span.stop}) are {len(came)}"))
        raise DatasetChanged(_changed(info, str(came))) from came


class SpanFile:
    """Parts of an object as a file that pyarrow reads, without a copy. What was not read ahead is fetched."""

    closed = False

    def __init__(
        self,
        size_bytes: int,
        parts: Sequence[tuple[int, bytes | memoryview]],
        fetch: Callable[[int, int], bytes],
    ) -> None:
        self._size_bytes = size_bytes
        self._parts = parts
        self._fetch = fetch
        self._position = 0

    def read_buffer(self, size: int) -> memoryview:
        start, stop = self._position, min(self._position + size, self._size_bytes)
        if start >= stop:
            return memoryview(b"")
        self._position = stop
        for first, data in self._parts:
            if first <= start and stop <= first + len(data):
                return memoryview(data)[start - first : stop - first]
        return memoryview(self._fetch(start, stop))

    def read(self, size: int) -> bytes:
        return bytes(self.read_buffer(size))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self._parts = ()


def in_turn(work: Callable[[T], R], items: Sequence[T], threads: int = THREADS) -> Iterator[R]:
    """The results in the order of `items`, of which at most `threads` are worked on or waited for at once."""
    if len(items) < 2 or threads < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(min(threads, len(items)), "stoker-tables") as pool:
        coming: deque[Future[R]] = deque()
        try:
            for item in items:
                coming.append(pool.submit(work, item))
                if len(coming) >= threads:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for left in coming:
                left.cancel()


def choose(objects: Objects, listed: Sequence[ObjectInfo], suffixes: Sequence[str]) -> list[ObjectInfo]:
    """The objects that hold tables: by their names, and none that is hidden (`_SUCCESS`, `.part.crc`).

    Raises EmptyDataset, which says what is there instead.
    """
    prefix = objects.prefix
    exact = [info for info in listed if info.key == prefix]
    if exact:
        return exact
    found = [
        info for info in listed if info.key.endswith(tuple(suffixes)) and not _is_hidden(info.key, prefix)
    ]
    if not found:
        there = f"there are {len(listed)} others, such as {listed[0].key!r}" if listed else "nothing is there"
        raise EmptyDataset(
            f"there are no {' or '.join(suffixes)} objects under {objects.where!r} ({there}): check the bucket and the "
            "prefix (a folder ends in '/'), or name the endings with suffixes=[…]"
        )
    return found


def check_limits(held_bytes: int, columns: Sequence[str] | None) -> None:
    """Raises ConfigError."""
    if held_bytes < 0:
        raise ConfigError(f"held_bytes must not be negative, got {held_bytes}")
    if isinstance(columns, str):
        raise ConfigError(f"columns must be a list: write columns=[{columns!r}]")
    if columns is not None and (not columns or len(set(columns)) != len(columns)):
        raise ConfigError(f"columns must be different names, and at least one, got {list(columns)}")


def _is_hidden(key: str, prefix: str) -> bool:
    parts = key[len(prefix) :].split("/")
    if prefix and not prefix.endswith("/"):
        parts = parts[1:]  # the first goes on with a name that was asked for
    return any(part.startswith(("_", ".")) for part in parts)


def _changed(info: ObjectInfo, why: str) -> str:
    return (
        f"{info.key!r} is not what it was when the dataset was indexed (version {info.version!r}): {why}. Put the "
        "object back, or make the dataset anew to index it as it is now"
    )
