"""Heads of answers with an object, or a part of one."""

from __future__ import annotations

from stoker.base.ranges import ByteRange, parse_http_range
from stoker.cache.server.port import Answer, Request
from stoker.cache.store.attributes import headers_of
from stoker.cache.store.known import Known
from stoker.wire.http import etag_of


def range_of(request: Request, known: Known, etag: str) -> ByteRange | None:
    """The part that is asked for; None: all of it. Raises UnsatisfiableRange."""
    header = request.header(b"range")
    if header is None or request.header(b"if-range") not in (None, etag):
        return None
    return parse_http_range(header, known.size_bytes)


def start_object(answer: Answer, known: Known, part: ByteRange | None) -> None:
    """Write the head."""
    headers = [("ETag", etag_of(known.version)), ("Accept-Ranges", "bytes"), *headers_of(known.attributes)]
    if part is None:
        answer.start(200, headers, known.size_bytes)
        return
    headers.append(("Content-Range", f"bytes {part.start}-{part.stop - 1}/{known.size_bytes}"))
    answer.start(206, headers, part.size_bytes)
