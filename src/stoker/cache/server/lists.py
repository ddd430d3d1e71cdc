"""Pages of lists that were asked for lately, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from stoker.wire.cache_api import ObjectPage

BYTES_MAX = 256 * 1024 * 1024
"""Some three million objects, as they are sent; as Python's they would take three times as much."""
_PAGE_BYTES = 512
"""What each takes beside what it says."""


class _Asked(NamedTuple):
    bucket: str
    prefix: str
    after: str | None
    limit: int


class Lists:
    """What `ask` was answered with, until it is too old, refreshed, or others were asked for since. Pure."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._pages: OrderedDict[_Asked, tuple[bytes, float]] = OrderedDict()
        self.size_bytes = 0

    def get(
        self, bucket: str, prefix: str, after: str | None, limit: int, ttl_s: float, now: float
    ) -> tuple[ObjectPage, float] | None:
        """A page, and how many seconds old it is; None if there is none that is younger than `ttl_s`."""
        asked = _Asked(bucket, prefix, after, limit)
        known = self._pages.get(asked)
        if known is None:
            return None
        age_s = now - known[1]
        if age_s > ttl_s:
            return None
        self._pages.move_to_end(asked)
        return msgspec.msgpack.decode(known[0], type=ObjectPage), age_s

    def put(
        self, bucket: str, prefix: str, after: str | None, limit: int, page: ObjectPage, now: float
    ) -> None:
        """Remember a page."""
        asked = _Asked(bucket, prefix, after, limit)
        self._drop(asked)
        said = msgspec.msgpack.encode(page)
        self._pages[asked] = said, now
        self.size_bytes += len(said) + _PAGE_BYTES
        while self.size_bytes > self._bytes_max:
            self._drop(next(iter(self._pages)))

    def refresh(self, bucket: str, prefix: str) -> None:
        """Forget all pages that may tell of keys under the prefix."""
        for asked in list(self._pages):
            if asked.bucket == bucket and (
                asked.prefix.startswith(prefix) or prefix.startswith(asked.prefix)
            ):
                self._drop(asked)

    def _drop(self, asked: _Asked) -> None:
        known = self._pages.pop(asked, None)
        if known is not None:
            self.size_bytes -= len(known[0]) + _PAGE_BYTES
