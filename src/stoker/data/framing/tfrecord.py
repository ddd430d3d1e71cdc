"""TFRecord: each record is its length (u64), a checksum of that, its bytes, a checksum of them; little endian.

The checksums are CRC-32C, turned and with a constant added ("masked").
"""

from __future__ import annotations

import struct

from stoker._native import crc32c
from stoker.data.framing.scan import Compressed, Malformed, Scan, Spans, Want

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_AROUND = _HEAD.size + _CRC.size
_GZIP = b"\x1f\x8b\x08"


def masked_crc(data: bytes | memoryview) -> int:
    """The checksum as it stands in files."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def scan(size_bytes: int, spans: Spans) -> Scan:
    """Find the records of an object; only their lengths are looked at."""
    at = 0
    while at < size_bytes:
        data = yield Want(at, _HEAD.size)
        base, end = at, at + len(data)
        while at + _HEAD.size <= end:
            stop = at + _length(data, at - base, at) + _AROUND
            if stop > size_bytes:
                raise Malformed(
                    f"a record ends at byte {stop}, the object at {size_bytes}: it was cut off", at
                )
            spans.add(at, stop)
            at = stop
        if at == base:
            raise Malformed("the object ends inside a record's length: it was cut off", at)
    return ""


def payload(record: bytes) -> bytes:
    """The bytes of one record, both checksums checked. Raises Malformed."""
    if len(record) < _AROUND:
        raise Malformed("it is too short to be a record")
    length = _length(record, 0, 0)
    if length != len(record) - _AROUND:
        raise Malformed(f"its length says {length} bytes, there are {len(record) - _AROUND}")
    body = memoryview(record)[_HEAD.size : _HEAD.size + length]
    if masked_crc(body) != _CRC.unpack_from(record, _HEAD.size + length)[0]:
        raise Malformed("the checksum of its bytes is wrong", _HEAD.size)
    return bytes(body)


def framed(body: bytes) -> bytes:
    """A record as it stands in a file."""
    length = struct.pack("<Q", len(body))
    return b"".join((length, _CRC.pack(masked_crc(length)), body, _CRC.pack(masked_crc(body))))


def _length(data: bytes, place: int, offset: int) -> int:
    length, crc = _HEAD.unpack_from(data, place)
    if masked_crc(data[place : place + 8]) != crc:
        if offset == 0 and data[:3] == _GZIP:
            raise Compressed("it is compressed with gzip")
        raise Malformed("the checksum of a record's length is wrong", offset)
    return int(length)
