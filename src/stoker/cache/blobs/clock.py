"""Versions of blobs: a hybrid logical clock (Kulkarni, Demirbas, Madappa, Avva, Leone: "Logical Physical Clocks",
OPODIS 2014), by which what is written later is newer, also where machines' clocks differ. Pure.

A version is text: milliseconds since 1970 and a counter in hexadecimal digits of fixed width, what it is, and who wrote
it. Of two versions of a key the one whose text is greater is newer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MS_DIGITS, _COUNT_DIGITS = 12, 4
_COUNT_MAX = 16**_COUNT_DIGITS - 1
_TEXT = re.compile(r"([0-9a-f]{12})\.([0-9a-f]{4})([bx])\.([^\x00-\x20\x7f]{1,512})")
BLOB, REMOVED = "b", "x"


class Version(NamedTuple):
    """`kind`: a blob, or that there is none any more. `writer`: the server that gave it."""

    ms: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    kind: str
    writer: str

    @property
    def is_removed(self) -> bool:
        return self.kind == REMOVED

    def __str__(self) -> str:
        return f"{self.ms:0{_MS_DIGITS}x}.{self.count:0{_COUNT_DIGITS}x}{self.kind}.{self.writer}"


def parse_version(text: str) -> Version:
    """Raises ValueError for what is no version."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no version of a blob")
    ms, count, kind, writer = found.groups()
    return Version(int(ms, 16), int(count, 16), kind, writer)


class HybridClock:
    """Of one server, whose name is in the versions that it gives."""

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self._last = (0, 0)

    def next(self, now_s: float, kind: str = BLOB) -> Version:
        """A version that is newer than all that were given or observed."""
        ms, count = self._last
        now_ms = int(now_s * 1000)
        if now_ms > ms:
            self._last = now_ms, 0
        elif count < _COUNT_MAX:
            self._last = ms, count + 1
        else:
            self._last = ms + 1, 0
        return Version(*self._last, kind, self._writer)

    def observe(self, version: Version) -> None:
        """Another server gave it, or this one before it was started anew."""
        self._last = max(self._last, (version.ms, version.count))
