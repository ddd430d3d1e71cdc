"""RecordIO of dmlc and MXNet: a magic number, flag and length (u32, little endian), the bytes, padding to four.

Bytes that look like the magic number are left out of a record where they stand at a multiple of four: there it is
divided into parts, each with a head of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from stoker.data.framing.scan import Malformed, Scan, Spans, Want

MAGIC = 0xCED7230A
PART_BYTES_MAX = (1 << 29) - 1
_HEAD = struct.Struct("<II")
_MAGIC = struct.pack("<I", MAGIC)
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


def scan(size_bytes: int, spans: Spans) -> Scan:
    """Find the records of an object; only the heads of their parts are looked at."""
    at = 0
    begun: int | None = None
    while at < size_bytes:
        data = yield Want(at, _HEAD.size)
        base, end = at, at + len(data)
        while at + _HEAD.size <= end:
            flag, length = _head(data, at - base, at, begun is not None)
            stop = at + _HEAD.size + length
            if stop > size_bytes:
                raise Malformed(
                    f"a record ends at byte {stop}, the object at {size_bytes}: it was cut off",
                    at if begun is None else begun,
                )
            if flag in (_WHOLE, _LAST):
                spans.add(at if begun is None else begun, stop)
                begun = None
            elif begun is None:
                begun = at
            at = min(size_bytes, stop + -length % 4)
        if at == base:
            raise Malformed("the object ends inside a record's head: it was cut off", at)
    if begun is not None:
        raise Malformed("the object ends inside a record of several parts: it was cut off", begun)
    return ""


def payload(record: bytes) -> bytes:
    """The bytes of one record, its parts put together. Raises Malformed."""
    parts: list[bytes] = []
    at, is_done = 0, False
    while at < len(record):
        if is_done or at + _HEAD.size > len(record):
            raise Malformed("its parts are not what their heads say", at)
        flag, length = _head(record, at, at, bool(parts))
        at += _HEAD.size
        if at + length > len(record):
            raise Malformed("its parts are not what their heads say", at)
        parts.append(record[at : at + length])
        is_done = flag in (_WHOLE, _LAST)
        at += length + -length % 4
    if not is_done:
        raise Malformed("its last part is missing", at)
    return _MAGIC.join(parts)


def framed(body: bytes) -> bytes:
    """A record as it stands in a file. Raises Malformed for one that is too large."""
    if len(body) > PART_BYTES_MAX:
        raise Malformed(f"RecordIO has records of at most {PART_BYTES_MAX} bytes, this one has {len(body)}")
    parts = list(_divided(body))
    out: list[bytes] = []
    for number, part in enumerate(parts):
        if len(parts) == 1:
            flag = _WHOLE
        else:
            flag = _FIRST if number == 0 else _LAST if number == len(parts) - 1 else _MIDDLE
        out += (_HEAD.pack(MAGIC, flag << 29 | len(part)), part, bytes(-len(part) % 4))
    return b"".join(out)


def _divided(body: bytes) -> Iterator[bytes]:
    start = at = 0
    while (at := body.find(_MAGIC, at)) >= 0:
        if at % 4 == 0:
            yield body[start:at]
            start = at = at + 4
        else:
            at += 1
    yield body[start:]


def _head(data: bytes, place: int, offset: int, is_within: bool) -> tuple[int, int]:
    """Flag and length of a part."""
    magic, said = _HEAD.unpack_from(data, place)
    if magic != MAGIC:
        raise Malformed(f"there is no record: it begins with {magic:#010x}, not {MAGIC:#010x}", offset)
    flag = said >> 29
    if flag not in ((_MIDDLE, _LAST) if is_within else (_WHOLE, _FIRST)):
        raise Malformed(f"a part is of kind {flag}, which cannot stand here", offset)
    return flag, said & PART_BYTES_MAX
