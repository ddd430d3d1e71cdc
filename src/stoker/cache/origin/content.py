"""What origins say of an object's content in headers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from email.utils import parsedate_to_datetime

_USER_NAME = re.compile("x-amz-meta-[!#$%&'*+.^_`|~a-z0-9-]+")
HEADERS_BYTES_MAX = 4096
"""Of all of an object's together; S3 takes 2 KiB of the user's own."""
_NAMES = frozenset(
    (
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    )
)


def content_headers(fields: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Those of an answer's headers (names in lower case) that tell of the content, sorted. What cannot be said again in
    a header line is left out, and all of them if they are too many."""
    found = sorted(
        (name, value)
        for name, value in fields
        if (name in _NAMES or _USER_NAME.fullmatch(name)) and _is_sayable(value)
    )
    size_bytes = sum(len(name) + len(value) for name, value in found)
    return tuple(found) if size_bytes <= HEADERS_BYTES_MAX else ()


def seconds_of(date: str) -> float:
    """A date as HTTP or as ISO 8601 says it, as seconds since 1970; 0 if it is none."""
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return read(date).timestamp()
        except (ValueError, OverflowError):
            continue
    return 0.0


def _is_sayable(text: str) -> bool:
    return text.isprintable() and text.isascii()
