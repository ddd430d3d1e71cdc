"""Which of the announced reads to look at next, and how far ahead. Pure.

Reads are looked at in the order in which they are due, over all streams, no further ahead of what their readers have
asked for than a window of bytes: what lies in it is here, on its way, or cannot be had. A larger one would take
room from what is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker.cache.coming import Stream

LOOKED_AT_ONCE = 256
_SIZE_SHARE = 1 / 16
_SIZE_BYTES_FIRST = 128 * 1024
_READS_MIN = 2
_SHARE_MIN = 1e-6


class Look(NamedTuple):
    """The reads `[start, stop)` of a stream are next to be looked at, and why."""

    stream: str
    start: int
    stop: int
    why: str


@dataclass(slots=True)
class _Ahead:
    plan: int
    at: int
    barred_until: int = 0
    large: dict[int, int] = field(default_factory=dict)
    """Bytes of reads of several blocks that are fetched ahead, by position."""


class Prefetch:
    """What is looked at of all streams of a server. They are told apart by name."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._ahead: dict[str, _Ahead] = {}
        self._read_bytes = float(_SIZE_BYTES_FIRST)

    def next(self, streams: Mapping[str, Stream]) -> Look | None:
        """Of the stream whose next read is due first; None if all have looked as far ahead as they may."""
        self._ahead = {name: ahead for name, ahead in self._ahead.items() if name in streams}
        best: tuple[float, str, int] | None = None
        # Those of which nothing is to come take nothing of the window.
        window = self.window_reads(sum(stream.asked < stream.stop for stream in streams.values()))
        for name, stream in streams.items():
            ahead = self._ahead.get(name)
            if ahead is None or ahead.plan != stream.plan:
                ahead = self._ahead[name] = _Ahead(stream.plan, stream.asked)
            ahead.at = max(ahead.at, stream.asked)
            if ahead.barred_until > stream.asked:
                continue
            stop = min(stream.stop, stream.asked + _positions(window, stream))
            if ahead.at < stop:
                due_s = (ahead.at - stream.cursor) * stream.read_s
                if best is None or due_s < best[0]:
                    best = due_s, name, stop
        if best is None:
            return None
        due_s, name, stop = best
        ahead = self._ahead[name]
        start = ahead.at
        ahead.at = min(stop, start + _positions(LOOKED_AT_ONCE, streams[name]))
        return Look(name, start, ahead.at, f"due in {due_s:.1f} s, before all others")

    def share_of(self, name: str, position: int, size_bytes: int, streams: Mapping[str, Stream]) -> int:
        """How many bytes of a read of several blocks may be fetched: what is left of its stream's part of the window,
        of which the number of reads is too coarse a measure."""
        ahead, stream = self._ahead.get(name), streams.get(name)
        if ahead is None or stream is None:
            return 0
        ahead.large = {
            at: taken for at, taken in ahead.large.items() if at >= stream.asked and at != position
        }
        left_bytes = self.window_bytes // len(streams) - sum(ahead.large.values())
        taken = ahead.large[position] = max(0, min(size_bytes, left_bytes))
        return taken

    def came(self, size_bytes: int) -> None:
        """A read that was fetched was of so many bytes."""
        self._read_bytes += (size_bytes - self._read_bytes) * _SIZE_SHARE

    def bar(self, name: str, streams: Mapping[str, Stream]) -> None:
        """What was fetched for a stream could not be kept: fetch no more for it until half of what is here is read."""
        ahead, stream = self._ahead.get(name), streams.get(name)
        if ahead is not None and stream is not None and ahead.barred_until <= stream.asked:
            ahead.barred_until = (stream.asked + ahead.at + 1) // 2
            ahead.at = min(ahead.at, max(ahead.barred_until, stream.asked))

    def back(self, name: str, position: int) -> None:
        """Look at what is read from this position on once more: a stream was announced anew from there."""
        ahead = self._ahead.get(name)
        if ahead is not None:
            ahead.at = min(ahead.at, position)

    def ahead(self, name: str, stream: Stream) -> int:
        """How many reads after the cursor were looked at."""
        known = self._ahead.get(name)
        return 0 if known is None or known.plan != stream.plan else max(0, known.at - stream.cursor)

    def window_reads(self, streams: int) -> int:
        """How many reads ahead each of so many streams may look."""
        share_bytes = self.window_bytes / max(1, streams)
        return max(_READS_MIN, int(share_bytes / max(1.0, self._read_bytes)))


def _positions(reads: int, stream: Stream) -> int:
    """Over how many positions a stream has about so many reads that are known here."""
    return math.ceil(reads / max(stream.share, _SHARE_MIN))
