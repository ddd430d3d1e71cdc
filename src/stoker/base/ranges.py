"""Half-open byte ranges and their HTTP form."""

from __future__ import annotations

from typing import NamedTuple


class ByteRange(NamedTuple):
    """Bytes `[start, stop)` of an object."""

    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class UnsatisfiableRange(ValueError):
    """The range lies outside the object (HTTP 416), which has `size_bytes`."""

    def __init__(self, header: str, size_bytes: int) -> None:
        super().__init__(f"{header!r} of {size_bytes} bytes")
        self.size_bytes = size_bytes


def parse_http_range(header: str, size_bytes: int) -> ByteRange | None:
    """Resolve a `Range` header against an object's size.

    None means: serve the whole object (no valid single byte range, as RFC 9110 section 14.2 allows).
    Raises UnsatisfiableRange.
    """
    unit, _, spec = header.partition("=")
    if unit.strip().lower() != "bytes" or "," in spec:
        return None
    first, dash, last = spec.strip().partition("-")
    if not dash or not all(part == "" or (part.isascii() and part.isdigit()) for part in (first, last)):
        return None
    if first == "":
        if last == "":
            return None
        suffix = _number(last)
        if suffix == 0 or size_bytes == 0:
            raise UnsatisfiableRange(header, size_bytes)
        return ByteRange(max(0, size_bytes - suffix), size_bytes)
    start = _number(first)
    if last != "" and _number(last) < start:
        return None
    if start >= size_bytes:
        raise UnsatisfiableRange(header, size_bytes)
    return ByteRange(start, size_bytes if last == "" else min(_number(last) + 1, size_bytes))


def _number(digits: str) -> int:
    """What is beyond all sizes may be as long as it likes."""
    return int(digits) if len(digits) <= 18 else 10**18
