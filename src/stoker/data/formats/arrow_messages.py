"""The messages of an Arrow IPC file or stream: where each lies, and how many rows it has. Pure.

A message is a marker, the length of its metadata (a FlatBuffer, padded), the metadata, and a body whose length the
metadata says (https://arrow.apache.org/docs/format/Columnar.html). The file format is a stream between two marks,
with a footer that lists the messages. pyarrow decodes messages, but to say where they lie it reads them all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

SCHEMA, DICTIONARY, RECORDS = 1, 2, 3
FILE_MAGIC = b"ARROW1"
FILE_START_BYTES = 8
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_PREFIX = struct.Struct("<II")
_MARKER = 0xFFFFFFFF
_WINDOW_BYTES = 64 * 1024
_ROWS_PER_BYTE_MAX = 1 << 17
"""More than compression or columns without values can make of them: a damaged number is often a huge one."""
_BLOCK = struct.Struct("<qi4xq")
_END = struct.Struct("<i6s")

ReadBytes = Callable[[int, int], bytes]


class Damaged(ValueError):
    """These bytes are not what the format says."""


class Message(NamedTuple):
    """A message at bytes `[start, stop)`; `rows` of one of RECORDS."""

    kind: int
    start: int
    stop: int
    rows: int


class Window:
    """Reads bytes here and there, in steps that are not too small."""

    def __init__(self, read: ReadBytes, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._start = 0
        self._data = b""

    def get(self, start: int, size: int) -> bytes:
        """Exactly so many bytes. Raises Damaged."""
        if start < 0 or size < 0 or start + size > self._size_bytes:
            raise Damaged(
                f"it ends at byte {self._size_bytes}, and bytes [{start}, {start + size}) are needed"
            )
        if not self._start <= start <= start + size <= self._start + len(self._data):
            stop = min(self._size_bytes, start + max(size, _WINDOW_BYTES))
            self._start, self._data = start, self._read(start, stop)
        return self._data[start - self._start : start - self._start + size]


def messages(read: ReadBytes, size_bytes: int) -> list[Message]:
    """All messages of a file or stream of so many bytes, the schema first. Raises Damaged."""
    window = Window(read, size_bytes)
    try:
        if window.get(0, min(size_bytes, len(FILE_MAGIC))) == FILE_MAGIC:
            first = _message(window, FILE_START_BYTES, size_bytes)
            found = [first, *_listed(window, size_bytes)] if first is not None else []
        else:
            found = list(_walk(window, size_bytes))
    except (struct.error, IndexError) as error:
        raise Damaged(f"its metadata is cut off: {error}") from error
    if not found or found[0].kind != SCHEMA:
        raise Damaged("it does not begin with a schema")
    return found


def _walk(window: Window, size_bytes: int) -> Iterator[Message]:
    position = 0
    while position < size_bytes:
        message = _message(window, position, size_bytes)
        if message is None:
            return
        yield message
        position = message.stop


def _listed(window: Window, size_bytes: int) -> Iterator[Message]:
    """The messages that the footer of a file names: dictionaries, then records."""
    length, magic = _END.unpack(window.get(size_bytes - _END.size, _END.size))
    if magic != FILE_MAGIC:
        raise Damaged("it was cut off: it does not end as Arrow files do")
    footer = window.get(size_bytes - _END.size - length, length)
    root = _root(footer)
    for field in (2, 3):
        at = _field(footer, root, field)
        if at is None:
            continue
        vector = at + _u32(footer, at)
        count = _u32(footer, vector)
        if vector + 4 + count * _BLOCK.size > len(footer):
            raise Damaged("its footer names more messages than it has room for")
        for number in range(count):
            start, _, _ = _BLOCK.unpack_from(footer, vector + 4 + number * _BLOCK.size)
            message = _message(window, start, size_bytes)
            if message is None:
                raise Damaged(f"there is no message at byte {start}, where its footer says so")
            yield message


def _message(window: Window, start: int, size_bytes: int) -> Message | None:
    """The message at a position; None at the end of a stream."""
    marker, length = _PREFIX.unpack(window.get(start, _PREFIX.size))
    if marker != _MARKER:
        raise Damaged(
            f"there is no message at byte {start}: this is not an Arrow file, or one from before 2019"
        )
    if length == 0:
        return None
    metadata = window.get(start + _PREFIX.size, length)
    root = _root(metadata)
    kind_at, header_at, body_at = (_field(metadata, root, number) for number in (1, 2, 3))
    kind = 0 if kind_at is None else metadata[kind_at]
    body_bytes = 0 if body_at is None else _i64(metadata, body_at)
    stop = start + _PREFIX.size + length + body_bytes
    if body_bytes < 0 or stop > size_bytes:
        raise Damaged(f"it ends at byte {size_bytes}, inside the message at byte {start}")
    rows = 0
    if kind == RECORDS and header_at is not None:
        header = header_at + _u32(metadata, header_at)
        rows_at = _field(metadata, header, 0)
        rows = 0 if rows_at is None else _i64(metadata, rows_at)
        if not 0 <= rows <= (stop - start) * _ROWS_PER_BYTE_MAX:
            raise Damaged(
                f"the message at byte {start} has {stop - start} bytes, and is said to have {rows} rows"
            )
    return Message(kind, start, stop, rows)


def _root(data: bytes) -> int:
    return _u32(data, 0)


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a table's field lies; None if it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise Damaged("a table of its metadata lies outside")
    (vtable_bytes,) = struct.unpack_from("<H", data, vtable)
    if 4 + 2 * number + 2 > vtable_bytes:
        return None
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number)
    return table + offset if offset else None


def _u32(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value


def _i64(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("<q", data, at)[0]
    return value
