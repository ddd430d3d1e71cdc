"""MosaicML's MDS: `index.json` names shard files and their columns; a shard has a table of where its samples are."""

from __future__ import annotations

import decimal
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stoker.data.framing.scan import Compressed, Malformed, Scan, Spans, Want

_COUNT = struct.Struct("<I")
_SCALARS = {
    name: np.dtype(name)
    for name in (
        "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    )
}  # fmt: skip
_ARRAY_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_SHAPE_TYPES = ("uint8", "uint16", "uint32", "uint64")
_AS_BYTES = ("bytes", "pil", "jpeg", "png", "list[pil]", "list[jpeg]", "list[png]", "jpeg_array")
"""Images stay as they are in the file."""
_TEXTS: Mapping[str, Any] = {
    "str": str, "str_int": int, "str_float": float, "str_decimal": decimal.Decimal, "json": json.loads,
}  # fmt: skip


class RawFile(msgspec.Struct):
    """A file of a shard."""

    basename: str
    bytes: int


class Shard(msgspec.Struct):
    """What the index says of one shard."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    raw_data: RawFile
    samples: int
    version: int = 2
    format: str = "mds"
    compression: str | None = None


class _Index(msgspec.Struct):
    shards: list[Shard]


class Columns(msgspec.Struct):
    """Name, encoding and size of each column; no size: it stands in the sample."""

    names: list[str]
    encodings: list[str]
    sizes: list[int | None]


def parse_index(text: bytes) -> list[Shard]:
    """The shards that `index.json` names. Raises Malformed, and Compressed for shards that are compressed."""
    try:
        shards = msgspec.json.decode(text, type=_Index).shards
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"it is no index of MDS: {error}") from None
    for shard in shards:
        if shard.format != "mds" or shard.version != 2:
            raise Malformed(
                f"{shard.raw_data.basename!r} is of format {shard.format!r}, version {shard.version}"
            )
        if shard.compression is not None:
            raise Compressed(f"its shards are compressed with {shard.compression}")
        if len({len(shard.column_names), len(shard.column_encodings), len(shard.column_sizes)}) != 1:
            raise Malformed(f"the columns of {shard.raw_data.basename!r} do not match")
        for name, encoding in zip(shard.column_names, shard.column_encodings, strict=True):
            if encoding == "pkl":
                raise Malformed(
                    f"column {name!r} has pickled objects: reading them would run code that they bring"
                )
            if not _is_known(encoding):
                raise Malformed(f"column {name!r} has the unknown encoding {encoding!r}")
    return shards


def scan(size_bytes: int, samples: int, spans: Spans) -> Scan:
    """Find the samples of a shard: only its table is looked at."""
    table_bytes = _COUNT.size * (samples + 2)
    if table_bytes > size_bytes:
        raise Malformed(f"it has {size_bytes} bytes, too few for {samples} samples: it was cut off")
    data = yield Want(0, table_bytes)
    (count,) = _COUNT.unpack_from(data)
    if count != samples:
        raise Malformed(f"it says that it has {count} samples, the index says {samples}")
    ends = np.frombuffer(data, "<u4", samples + 1, _COUNT.size).astype(np.int64)
    if ends[0] < table_bytes or ends[-1] > size_bytes or bool(np.any(np.diff(ends) < 0)):
        raise Malformed("its table of samples is not what it should be, or it was cut off")
    spans.extend(ends[:-1], ends[1:])
    return ""


def sample(record: bytes, columns: Columns) -> dict[str, Any]:
    """The values of one sample, by column. Raises Malformed."""
    sizes: list[int] = []
    at = 0
    for said in columns.sizes:
        if said:
            sizes.append(said)
            continue
        if at + _COUNT.size > len(record):
            raise Malformed("it ends inside the sizes of its columns", at)
        sizes.append(_COUNT.unpack_from(record, at)[0])
        at += _COUNT.size
    if at + sum(sizes) != len(record):
        raise Malformed(f"its columns have {sum(sizes)} bytes, there are {len(record) - at}", at)
    found = {}
    for name, encoding, size in zip(columns.names, columns.encodings, sizes, strict=True):
        try:
            found[name] = decoded(encoding, record[at : at + size])
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise Malformed(f"column {name!r} is no {encoding}: {error}", at) from None
        at += size
    return found


def decoded(encoding: str, data: bytes) -> Any:
    """A value. Raises ValueError and its like."""
    if encoding in _AS_BYTES:
        return data
    if encoding in _TEXTS:
        return _TEXTS[encoding](data.decode())
    if encoding == "int":
        return int(_scalar(data, _SCALARS["int64"]))
    if encoding in _SCALARS:
        return _scalar(data, _SCALARS[encoding])
    return _array(data, encoding)


def encoding_of(value: Any) -> str:
    """The encoding that values of this kind are written with. Raises Malformed."""
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, str):
        return "str"
    if isinstance(value, bool) or value is None or isinstance(value, list | dict | tuple):
        return "json"
    if isinstance(value, int):
        return "int"
    if isinstance(value, float):
        return "float64"
    if isinstance(value, np.generic) and value.dtype.name in _SCALARS:
        return value.dtype.name
    if isinstance(value, np.ndarray) and value.dtype.name in _SCALARS and value.ndim and value.size:
        return "ndarray"
    raise Malformed(f"MDS has no encoding for {type(value).__name__}")


def encoded(encoding: str, value: Any) -> bytes:
    """A value as it stands in a sample. Raises ValueError, TypeError and their like."""
    if encoding == "bytes":
        return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else _no(value, "bytes")
    if encoding == "str":
        return value.encode() if isinstance(value, str) else _no(value, "str")
    if encoding == "json":
        return json.dumps(value).encode()
    if encoding == "ndarray":
        return _array_bytes(value)
    kind = _SCALARS["int64" if encoding == "int" else encoding]
    if kind.kind in "iu" and isinstance(value, float | np.floating):
        raise ValueError(f"{value!r} is no integer")
    return np.array(value, kind).tobytes()


def size_of(encoding: str) -> int | None:
    """How many bytes each value of an encoding has, if they all have as many."""
    kind = _SCALARS.get("int64" if encoding == "int" else encoding)
    return None if kind is None else kind.itemsize


def framed(sample: Mapping[str, Any], columns: Columns) -> bytes:
    """A sample as it stands in a shard. Raises Malformed."""
    parts: list[bytes] = []
    sizes: list[bytes] = []
    for name, encoding, size in zip(columns.names, columns.encodings, columns.sizes, strict=True):
        try:
            parts.append(encoded(encoding, sample[name]))
        except (ValueError, TypeError, OverflowError) as error:
            raise Malformed(f"column {name!r} is no {encoding}: {error}") from None
        if not size:
            sizes.append(_COUNT.pack(len(parts[-1])))
    return b"".join((*sizes, *parts))


def shard_head(sizes: Sequence[int]) -> bytes:
    """What stands before samples of these sizes."""
    ends = np.cumsum([_COUNT.size * (len(sizes) + 2), *sizes], dtype=np.int64)
    if int(ends[-1]) > 2**32 - 1:
        raise Malformed("a shard of MDS has less than 4 GiB: give a smaller --shard-size")
    return _COUNT.pack(len(sizes)) + ends.astype("<u4").tobytes()


def _is_known(encoding: str) -> bool:
    if encoding in _AS_BYTES or encoding in _TEXTS or encoding in _SCALARS or encoding == "int":
        return True
    name, _, kind = encoding.partition(":")
    return name == "ndarray" and (not kind or kind.split(":")[0] in _SCALARS)


def _scalar(data: bytes, kind: np.dtype[Any]) -> Any:
    if len(data) != kind.itemsize:
        raise ValueError(f"it has {len(data)} bytes, not {kind.itemsize}")
    return np.frombuffer(data, kind)[0]


def _array(data: bytes, encoding: str) -> npt.NDArray[Any]:
    parts = encoding.split(":")
    at = 0
    if len(parts) > 1:
        kind = parts[1]
    else:
        kind, at = _ARRAY_TYPES.get(data[0] if data else 0, ""), 1
        if not kind:
            raise ValueError("its type is unknown")
    if len(parts) > 2:
        shape = tuple(int(size) for size in parts[2].split(","))
    else:
        if at >= len(data):
            raise ValueError("it ends before its shape")
        shape_type = np.dtype(_SHAPE_TYPES[data[at] & 3]).newbyteorder("<")
        dimensions, at = data[at] >> 2, at + 1
        shape = tuple(
            int(size) for size in np.frombuffer(data[at : at + dimensions * shape_type.itemsize], shape_type)
        )
        at += dimensions * shape_type.itemsize
        if len(shape) != dimensions:
            raise ValueError("it ends inside its shape")
    return np.frombuffer(data[at:], np.dtype(kind).newbyteorder("<")).reshape(shape)


def _array_bytes(value: Any) -> bytes:
    if not isinstance(value, np.ndarray) or value.dtype.name not in _SCALARS:
        return _no(value, "an array of numbers")
    if not 0 < value.ndim < 64 or not value.size:
        raise ValueError("an array of MDS has 1 to 63 dimensions, and something in it")
    kind = next(number for number, name in _ARRAY_TYPES.items() if name == value.dtype.name)
    shape_kind = next(i for i, name in enumerate(_SHAPE_TYPES) if max(value.shape) <= np.iinfo(name).max)
    head = bytes([kind, value.ndim << 2 | shape_kind])
    return head + np.array(value.shape, _SHAPE_TYPES[shape_kind]).tobytes() + value.tobytes()


def _no(value: Any, wanted: str) -> bytes:
    raise ValueError(f"{type(value).__name__} is not {wanted}")
