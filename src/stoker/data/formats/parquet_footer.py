"""The footer of a Parquet file: its columns, and where each row group lies. Pure.

pyarrow reads footers too, but ends the process where one is damaged: its Python side lets C++ exceptions through.

A footer is a Thrift struct in the compact protocol (https://github.com/apache/parquet-format): fields with a number and
a kind each, of which most are skipped here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stoker.base.ranges import ByteRange

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_DEPTH_MAX = 24

Reader = Callable[[bytes, int], tuple[Any, int]]


class DamagedFooter(ValueError):
    """These bytes are not a footer."""


class Chunk(NamedTuple):
    """One leaf of a column in a row group."""

    column: str
    """The top-level column that it is a part of."""
    span: ByteRange


class RowGroup(NamedTuple):
    rows: int
    chunks: list[Chunk]


class Footer(NamedTuple):
    columns: tuple[str, ...]
    """Top-level columns."""
    row_groups: list[RowGroup]
    metadata: dict[bytes, bytes]


def read_footer(data: bytes) -> Footer:
    """From the bytes of the Thrift struct, and any that follow. Raises DamagedFooter."""
    try:
        found, end = _struct(data, 0, _FILE)
        if end > len(data):
            raise DamagedFooter("it is cut off")
        groups = [_row_group(group) for group in found[4]]
        if sum(group.rows for group in groups) != found[3]:
            raise DamagedFooter("its row groups do not have as many rows as it says")
        pairs = {pair[1]: pair.get(2, b"") for pair in found.get(5, ())}
        return Footer(_top_level(found[2]), groups, pairs)
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise DamagedFooter(f"{type(error).__name__}: {error}") from error


def _row_group(found: dict[int, Any]) -> RowGroup:
    chunks = []
    for chunk in found[1]:
        if chunk.get(1):
            raise DamagedFooter("its columns lie in other files, as those of a _metadata file do")
        if 3 not in chunk:
            raise DamagedFooter("its columns are encrypted")
        said = chunk[3]
        start = said[9]
        if 0 < said.get(11, 0) < start:
            start = said[11]  # the dictionary comes first
        if start < 0 or said[7] < 0:
            raise DamagedFooter("a column lies outside the file")
        chunks.append(Chunk(said[3][0].decode(), ByteRange(start, start + said[7])))
    if found[3] < 0:
        raise DamagedFooter(f"a row group has {found[3]} rows")
    return RowGroup(found[3], chunks)


def _top_level(elements: list[dict[int, Any]]) -> tuple[str, ...]:
    """The children of the first element; a tree is written depth first."""
    names = []
    at = 1
    for _ in range(elements[0].get(5, 0)):
        names.append(elements[at][4].decode())
        open_elements = 1
        while open_elements:
            open_elements += elements[at].get(5, 0) - 1
            at += 1
    return tuple(names)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    for shift in range(7, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DamagedFooter("a number is too long")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    value = (value >> 1) ^ -(value & 1)
    if not -(2**63) <= value < 2**63:
        raise DamagedFooter("a number is too large")
    return value, at


def _binary(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _varint(data, at)
    if at + size > len(data):
        raise DamagedFooter("a text reaches over its end")
    return data[at : at + size], at + size


def _list_head(data: bytes, at: int) -> tuple[int, int, int]:
    """The kind and number of elements."""
    head = data[at]
    size, at = (head >> 4, at + 1) if head < 0xF0 else _varint(data, at + 1)
    if size > len(data) - at:
        raise DamagedFooter("a list reaches over its end")
    return head & 0x0F, size, at


def _list_of(kind: int, read: Reader) -> Reader:
    def read_list(data: bytes, at: int) -> tuple[list[Any], int]:
        found, size, at = _list_head(data, at)
        if found != kind and size:
            raise DamagedFooter(f"a list is of kind {found}")
        items = []
        for _ in range(size):
            item, at = read(data, at)
            items.append(item)
        return items, at

    return read_list


def _struct_of(fields: Mapping[int, tuple[int, Reader]]) -> Reader:
    return lambda data, at: _struct(data, at, fields)


def _struct(data: bytes, at: int, fields: Mapping[int, tuple[int, Reader]]) -> tuple[dict[int, Any], int]:
    """Those fields of a struct that are there; the others are skipped."""
    found: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 0x0F
        if head < 0x10:
            number, at = _integer(data, at)
        else:
            number += head >> 4
        wanted = fields.get(number)
        if wanted is None:
            at = _skip(data, at, kind, 0)
        elif wanted[0] != kind:
            raise DamagedFooter(f"field {number} is of kind {kind}")
        else:
            found[number], at = wanted[1](data, at)
    return found, at + 1


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """The position after a value of a kind."""
    if _I16 <= kind <= _I64:
        while data[at] > 0x7F:
            at += 1
        return at + 1
    if kind == _BINARY:
        size, at = _varint(data, at)
        return at + size
    if depth > _DEPTH_MAX:
        raise DamagedFooter("it is nested too deeply")
    if kind == _STRUCT:
        while head := data[at]:
            at += 1
            if head < 0x10:
                _, at = _varint(data, at)
            at = _skip(data, at, head & 0x0F, depth + 1)
        return at + 1
    if kind in (_LIST, _SET):
        inner, size, at = _list_head(data, at)
        for _ in range(size):
            # The values of fields that are true or false are their kinds; those of elements take a byte.
            at = at + 1 if inner in (_TRUE, _FALSE) else _skip(data, at, inner, depth + 1)
        return at
    if kind in (_TRUE, _FALSE):
        return at
    if kind == _BYTE:
        return at + 1
    if kind == _DOUBLE:
        return at + 8
    # Maps are not used in footers.
    raise DamagedFooter(f"there is a value of the unknown kind {kind}")


_COLUMN = {
    3: (_LIST, _list_of(_BINARY, _binary)),  # path
    7: (_I64, _integer),  # compressed bytes
    9: (_I64, _integer),  # first data page
    11: (_I64, _integer),  # dictionary page
}
_CHUNK = {1: (_BINARY, _binary), 3: (_STRUCT, _struct_of(_COLUMN))}  # file, column
_GROUP = {1: (_LIST, _list_of(_STRUCT, _struct_of(_CHUNK))), 3: (_I64, _integer)}  # chunks, rows
_ELEMENT = {4: (_BINARY, _binary), 5: (_I32, _integer)}  # name, children
_PAIR = {1: (_BINARY, _binary), 2: (_BINARY, _binary)}
_FILE = {
    2: (_LIST, _list_of(_STRUCT, _struct_of(_ELEMENT))),
    3: (_I64, _integer),  # rows
    4: (_LIST, _list_of(_STRUCT, _struct_of(_GROUP))),
    5: (_LIST, _list_of(_STRUCT, _struct_of(_PAIR))),
}
