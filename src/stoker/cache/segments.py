"""Where small objects are written, and which of them leave. Pure.

Objects are appended to the open segment of their bucket; a segment that is full is sealed and never changes again. Room
is made by giving up the oldest sealed segment: what was used since it was written gets a second chance in the open
segment (the most recently used of it, up to KEPT_MAX of a segment), the rest is gone, the file is unlinked. That is
CLOCK (Corbato 1968) over segments: no list of recency is kept, and nothing is written in place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

SEGMENT_BYTES_MAX = 64 * 1024 * 1024
SEGMENTS_MIN = 128
"""With segments of more than a hundredth of the room, giving one up costs hits."""
KEPT_MAX = 0.5
SPARSE_BELOW = 0.5


class Placement(NamedTuple):
    """Where to write; `is_new`: the segment's file is to be made first. `sealed` will not change any more."""

    segment: int
    offset: int
    is_new: bool
    sealed: int | None


class Piece(NamedTuple):
    """An object that is held in a segment; `used_s` is when it was last asked for."""

    size_bytes: int
    used_s: int


class Sifting(NamedTuple):
    """Which pieces to write anew, most recently used first."""

    kept: tuple[int, ...]
    why: str


class _Segment:
    __slots__ = ("bucket", "size_bytes", "written_s")

    def __init__(self, bucket: int, size_bytes: int, written_s: int) -> None:
        self.bucket = bucket
        self.size_bytes = size_bytes
        self.written_s = written_s


def segment_bytes_for(limit_bytes: int) -> int:
    """How large segments may become in a store with this limit."""
    return max(1, min(SEGMENT_BYTES_MAX, limit_bytes // SEGMENTS_MIN))


class Segments:
    """The segments of one store. Numbers come from `next_number` and are never used again."""

    def __init__(self, segment_bytes: int, next_number: Callable[[], int]) -> None:
        if segment_bytes < 1:
            raise ValueError(f"a segment has at least one byte, not {segment_bytes}")
        self._segment_bytes = segment_bytes
        self._next_number = next_number
        self._open: dict[int, int] = {}
        self._segments: OrderedDict[int, _Segment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, number: object) -> bool:
        return number in self._segments

    @property
    def size_bytes(self) -> int:
        """Of all files, whatever is still held in them."""
        return sum(segment.size_bytes for segment in self._segments.values())

    def bytes_of(self, number: int) -> int:
        """Of a segment's file. Raises KeyError if there is none."""
        return self._segments[number].size_bytes

    def is_open(self, number: int) -> bool:
        """Whether it is still written to."""
        segment = self._segments.get(number)
        return segment is not None and self._open.get(segment.bucket) == number

    def adopt(self, number: int, bucket: int, size_bytes: int, written_s: int) -> None:
        """Take in a segment from before; sealed, and the oldest first."""
        self._segments[number] = _Segment(bucket, size_bytes, written_s)

    def place(self, bucket: int, size_bytes: int, now_s: int) -> Placement:
        """Where an object goes whose room was reserved. One that is larger than a segment has one of its own."""
        sealed: int | None = None
        number = self._open.get(bucket)
        if number is not None and self._segments[number].size_bytes + size_bytes > self._segment_bytes:
            sealed = self.seal(bucket)
            number = None
        is_new = number is None
        if number is None:
            number = self._next_number()
            self._segments[number] = _Segment(bucket, 0, now_s)
            self._open[bucket] = number
        segment = self._segments[number]
        offset = segment.size_bytes
        segment.size_bytes += size_bytes
        segment.written_s = now_s
        return Placement(number, offset, is_new, sealed)

    def seal(self, bucket: int) -> int | None:
        """Write no more to the bucket's open segment; its number."""
        number = self._open.pop(bucket, None)
        if number is not None:
            self._segments.move_to_end(number)
        return number

    def remove(self, number: int) -> int:
        """Its file is gone; how many bytes it had."""
        segment = self._segments.pop(number)
        if self._open.get(segment.bucket) == number:
            del self._open[segment.bucket]
        return segment.size_bytes

    def oldest(self, buckets: Iterable[int] | None = None) -> int | None:
        """The sealed segment that was written first, of these buckets (None: of any)."""
        among = None if buckets is None else set(buckets)
        for number, segment in self._segments.items():
            if self._open.get(segment.bucket) != number and (among is None or segment.bucket in among):
                return number
        return None

    def sift(self, number: int, pieces: Sequence[Piece], *, has_time: bool = True) -> Sifting:
        """What of a segment that is given up deserves to stay; nothing where there is no time to write it anew."""
        if not has_time:
            return Sifting((), "there is no time to write any of it anew")
        written_s = self._segments[number].written_s
        used = [i for i, piece in enumerate(pieces) if piece.used_s > written_s]
        used.sort(key=lambda i: -pieces[i].used_s)
        kept: list[int] = []
        left_bytes = int(self._segment_bytes * KEPT_MAX)
        for i in used:
            if pieces[i].size_bytes <= left_bytes:
                left_bytes -= pieces[i].size_bytes
                kept.append(i)
        return Sifting(tuple(kept), f"{len(used)} of {len(pieces)} were used since it was written")

    def sparsest(self, live_bytes: Callable[[int], int]) -> int | None:
        """The sealed segment with the least in it that is still held, if that is less than SPARSE_BELOW of it: to be
        written anew, all of it."""
        best: tuple[float, int] | None = None
        for number, segment in self._segments.items():
            if self._open.get(segment.bucket) == number or segment.size_bytes == 0:
                continue
            share = live_bytes(number) / segment.size_bytes
            if share < SPARSE_BELOW and (best is None or share < best[0]):
                best = share, number
        return None if best is None else best[1]
