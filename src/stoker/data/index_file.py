"""A file of named columns of numbers, written at once and then mapped.

magic (8 bytes), length and CRC-32C of what is said (u32 each, little endian), what is said (JSON), the columns,
each at a multiple of 64 bytes
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stoker._native import crc32c

_MAGIC = b"StkIdx01"
_HEAD = struct.Struct("<8sII")
_ALIGN = 64


class BadIndexFile(ValueError):
    """The file is not what `save_columns` wrote."""


class _Column(msgspec.Struct):
    name: str
    kind: str
    count: int


class _Said(msgspec.Struct):
    columns: list[_Column]
    more: dict[str, Any]


def save_columns(path: Path, said: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a file that is there as a whole or not at all. Raises OSError."""
    columns = [_Column(name, array.dtype.str, len(array)) for name, array in arrays.items()]
    text = msgspec.json.encode(_Said(columns, dict(said)))
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, len(text), crc32c(text)) + text)
            for array in arrays.values():
                file.write(bytes(-file.tell() % _ALIGN))
                file.write(np.ascontiguousarray(array).data.cast("B") if len(array) else b"")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def open_columns(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """What was said, and the columns, mapped. Raises OSError, BadIndexFile."""
    if os.path.getsize(path) < _HEAD.size:
        raise BadIndexFile(f"{path} is too short")
    whole = np.asarray(np.memmap(path, np.uint8, "r"))
    magic, length, crc = _HEAD.unpack(whole[: _HEAD.size].tobytes())
    text = whole[_HEAD.size : _HEAD.size + length].tobytes()
    if magic != _MAGIC or crc32c(text) != crc:
        raise BadIndexFile(f"{path} is not an index, or damaged")
    try:
        said = msgspec.json.decode(text, type=_Said)
    except msgspec.DecodeError as error:
        raise BadIndexFile(f"{path} is not an index: {error}") from None
    arrays: dict[str, npt.NDArray[Any]] = {}
    at = _HEAD.size + length
    for column in said.columns:
        at += -at % _ALIGN
        kind = np.dtype(column.kind)
        stop = at + column.count * kind.itemsize
        if stop > len(whole):
            raise BadIndexFile(f"{path} was cut off")
        arrays[column.name] = whole[at:stop].view(kind)
        at = stop
    return said.more, arrays
