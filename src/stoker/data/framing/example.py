"""`tf.train.Example` without TensorFlow: named lists of bytes, floats or integers, as protocol buffers have them.

Example { Features features = 1 }     Features { map<string, Feature> feature = 1 }
Feature { BytesList = 1 | FloatList = 2 | Int64List = 3 }, each of them { repeated value = 1 }
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.data.framing.scan import Malformed

Feature = list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


def parse(message: bytes) -> dict[str, Feature]:
    """The features of one Example. Raises Malformed."""
    found: dict[str, Feature] = {}
    for field, features in _fields(message):
        if field != 1 or not isinstance(features, bytes):
            continue
        for number, entry in _fields(features):
            if number != 1 or not isinstance(entry, bytes):
                continue
            parts = dict(_fields(entry))
            name, feature = parts.get(1, b""), parts.get(2, b"")
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise Malformed("a feature is not a message")
            try:
                found[name.decode()] = _feature(feature)
            except UnicodeDecodeError:
                raise Malformed(f"a feature's name is not UTF-8: {name[:40]!r}") from None
    return found


def build(features: Mapping[str, Any]) -> bytes:
    """An Example of bytes, text, numbers, and sequences of them. Raises Malformed for anything else."""
    entries = b""
    for name, value in features.items():
        entry = _message(1, name.encode()) + _message(2, _built(name, value))
        entries += _message(1, entry)
    return _message(1, entries)


def _feature(message: bytes) -> Feature:
    parts = list(_fields(message))
    if not parts:
        return []
    kind, values = parts[-1]
    if kind not in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST) or not isinstance(values, bytes):
        raise Malformed(f"a feature is of the unknown kind {kind}")
    items = [value for field, value in _fields(values, is_fixed=kind == _FLOAT_LIST) if field == 1]
    if kind == _BYTES_LIST:
        if not all(isinstance(item, bytes) for item in items):
            raise Malformed("a list of bytes has something else")
        return [item for item in items if isinstance(item, bytes)]
    if kind == _FLOAT_LIST:
        return _floats(items)
    numbers: list[int] = []
    for item in items:
        numbers += _varints(item) if isinstance(item, bytes) else [item]
    return np.array(numbers, np.uint64).astype(np.int64)


def _floats(items: Sequence[int | bytes]) -> npt.NDArray[np.float32]:
    raw = b"".join(item if isinstance(item, bytes) else struct.pack("<I", item) for item in items)
    if len(raw) % 4:
        raise Malformed("a list of floats has a part of one")
    return np.frombuffer(raw, "<f4").astype(np.float32)


def _fields(message: bytes, *, is_fixed: bool = False) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields. `is_fixed`: a number must be of four bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field, kind = tag >> 3, tag & 7
        if kind == _BYTES:
            length, at = _varint(message, at)
            if at + length > len(message):
                raise Malformed("a field ends after its message", at)
            yield field, message[at : at + length]
            at += length
        elif kind == _VARINT and not is_fixed:
            value, at = _varint(message, at)
            yield field, value
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
            if at + size > len(message) or (is_fixed and size != 4):
                raise Malformed("a number ends after its message", at)
            yield field, int.from_bytes(message[at : at + size], "little")
            at += size
        else:
            raise Malformed(f"a field is of the unknown kind {kind}", at)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise Malformed("it ends inside a number", at)
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise Malformed("a number has more than ten bytes", at)


def _varints(packed: bytes) -> list[int]:
    values, at = [], 0
    while at < len(packed):
        value, at = _varint(packed, at)
        values.append(value)
    return values


def _built(name: str, value: Any) -> bytes:
    items = _items(value)
    if items and all(isinstance(item, bytes | str) for item in items):
        texts = [item.encode() if isinstance(item, str) else item for item in items]
        return _message(_BYTES_LIST, b"".join(_message(1, text) for text in texts))
    if all(isinstance(item, int | np.integer | np.bool_) for item in items):
        if any(not -(2**63) <= int(item) < 2**63 for item in items):
            raise Malformed(f"{name!r} has an integer of more than 64 bits")
        packed = b"".join(_encoded(int(item) & 0xFFFFFFFFFFFFFFFF) for item in items)
        return _message(_INT64_LIST, _message(1, packed))
    if all(isinstance(item, int | float | np.number) for item in items):
        return _message(_FLOAT_LIST, _message(1, np.array(items, "<f4").tobytes()))
    raise Malformed(
        f"{name!r} is of type {type(value).__name__}: an Example has bytes, text and numbers only"
    )


def _items(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype.kind in "biuf" else [value]
    return list(value) if isinstance(value, list | tuple) else [value]


def _message(field: int, content: bytes) -> bytes:
    return _encoded(field << 3 | _BYTES) + _encoded(len(content)) + content


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
