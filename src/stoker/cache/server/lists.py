"""Pages of lists that were asked for lately, in bounded memory."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Container
from typing import NamedTuple

import msgspec

from stoker.wire.cache_api import ObjectPage

BYTES_MAX = 256 * 1024 * 1024
"""Some three million objects, as they are sent; as Python's they would take three times as much."""
_PAGE_BYTES = 512
"""What each takes beside what it says, and the names that it is asked by."""
_CHARACTER_BYTES = 4
_REFRESHES_KEPT = 256
_HIGHEST = chr(0x10FFFF)


class _Asked(NamedTuple):
    bucket: str
    prefix: str
    after: str | None
    limit: int
    delimiter: str


class _Kept(NamedTuple):
    """A page as it is sent, and of which keys it tells: those up to `last`, or (None) to the end."""

    said: bytes
    last: str | None
    asked_at: float
    size_bytes: int


class _Refreshed(NamedTuple):
    bucket: str
    prefix: str
    at: float

    def concerns(self, bucket: str, prefix: str) -> bool:
        return bucket == self.bucket and (self.prefix.startswith(prefix) or prefix.startswith(self.prefix))


class Lists:
    """What `ask` was answered with, until it is too old, refreshed, or others were asked for since. Pure."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._pages: OrderedDict[_Asked, _Kept] = OrderedDict()
        self._refreshed: deque[_Refreshed] = deque(maxlen=_REFRESHES_KEPT)
        self._of_prefix: dict[str, dict[str, set[_Asked]]] = {}
        """By bucket and prefix: whoever writes has none of the others looked through."""
        self.size_bytes = 0

    def get(
        self,
        bucket: str,
        prefix: str,
        after: str | None,
        limit: int,
        ttl_s: float,
        now: float,
        *,
        delimiter: str = "",
    ) -> tuple[ObjectPage, float] | None:
        """A page, and how many seconds old it is; None if there is none that is younger than `ttl_s`."""
        known = self._young(_Asked(bucket, prefix, after, limit, delimiter), ttl_s, now)
        if known is None:
            return None
        return msgspec.msgpack.decode(known.said, type=ObjectPage), now - known.asked_at

    def said(
        self, bucket: str, prefix: str, after: str | None, limit: int, ttl_s: float, now: float
    ) -> bytes | None:
        """What stands for such a page: the very same object as long as that page is remembered."""
        known = self._young(_Asked(bucket, prefix, after, limit, ""), ttl_s, now)
        return None if known is None else known.said

    def _young(self, asked: _Asked, ttl_s: float, now: float) -> _Kept | None:
        known = self._pages.get(asked)
        if known is None or now - known.asked_at > ttl_s:
            return None
        self._pages.move_to_end(asked)
        return known

    def put(
        self,
        bucket: str,
        prefix: str,
        after: str | None,
        limit: int,
        page: ObjectPage,
        asked_at: float,
        *,
        delimiter: str = "",
    ) -> None:
        """Remember a page that the origin was asked for then; not one from before a refresh."""
        if asked_at <= self._refreshed_at(bucket, prefix):
            return
        asked = _Asked(bucket, prefix, after, limit, delimiter)
        self._drop(asked)
        said = msgspec.msgpack.encode(page)
        name_bytes = _CHARACTER_BYTES * (len(prefix) + len(after or "") + len(page.after or ""))
        size_bytes = len(said) + name_bytes + _PAGE_BYTES
        self._pages[asked] = _Kept(said, page.after, asked_at, size_bytes)
        self._of_prefix.setdefault(bucket, {}).setdefault(prefix, set()).add(asked)
        self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max:
            self._drop(next(iter(self._pages)))

    def refresh(self, bucket: str, prefix: str, now: float, *, is_key: bool = False) -> None:
        """Forget all pages that may tell of keys under the prefix; of that key alone, if it is one."""
        self._refreshed.append(_Refreshed(bucket, prefix, now))
        prefixes = self._of_prefix.get(bucket, {})
        if is_key:
            found = _beginnings(prefix, prefixes)
        else:
            found = [one for one in prefixes if one.startswith(prefix) or prefix.startswith(one)]
        for one in found:
            for asked in list(prefixes[one]):
                if not is_key or self._tells_of(asked, prefix):
                    self._drop(asked)

    def _refreshed_at(self, bucket: str, prefix: str) -> float:
        """When anything under a prefix was refreshed last, as far as it is known."""
        times = [one.at for one in self._refreshed if one.concerns(bucket, prefix)]
        if len(self._refreshed) == _REFRESHES_KEPT:
            times.append(self._refreshed[0].at)  # what was before is forgotten
        return max(times, default=-math.inf)

    def _tells_of(self, asked: _Asked, key: str) -> bool:
        last = self._pages[asked].last
        if asked.delimiter and last is not None:
            last += _HIGHEST  # of a folder it tells that something is in it
        return (asked.after is None or asked.after < key) and (last is None or key <= last)

    def _drop(self, asked: _Asked) -> None:
        known = self._pages.pop(asked, None)
        if known is None:
            return
        self.size_bytes -= known.size_bytes
        prefixes = self._of_prefix[asked.bucket]
        prefixes[asked.prefix].discard(asked)
        if not prefixes[asked.prefix]:
            del prefixes[asked.prefix]
        if not prefixes:
            del self._of_prefix[asked.bucket]


def _beginnings(key: str, prefixes: Container[str]) -> list[str]:
    """Those with which the key begins."""
    beginnings = (key[:end] for end in range(len(key) + 1))
    return [one for one in beginnings if one in prefixes]
