"""Where small objects are written, and which of them leave. Pure.

Objects are appended to the open segment of their lot (a bucket, or a part of one that is counted apart); a segment that
is full is sealed and never changes again. Room is made by giving up the oldest sealed segment: what was used since it
was written gets a second chance in the open segment (the most recently used of it, up to KEPT_MAX of a segment), the
rest is gone, the file is unlinked. That is CLOCK (Corbato 1968) over segments: no list of recency is kept, and nothing
is written in place. What is written anew may be placed apart from newcomers: where last copies are to outlive copies,
their segments are then seldom the ones that leave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

SEGMENT_BYTES_MAX = 64 * 1024 * 1024
SEGMENTS_MIN = 256
"""With segments of more than a hundredth of the room, giving one up costs hits."""
KEPT_MAX = 0.5
SPARSE_BELOW = 0.5
PAGE_BYTES = 4096
ALIGNED_FROM_BYTES = 64 * 1024
"""From here on an object begins at a page: else sending it takes one page more."""


_Stream = tuple[int, int]
"""What shares an open segment: what of a lot lies together."""


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
    __slots__ = ("filled_bytes", "lot", "stream", "writes", "written_s")

    def __init__(self, lot: int, stream: _Stream, filled_bytes: int, written_s: int) -> None:
        self.lot = lot
        self.stream = stream
        self.filled_bytes = filled_bytes
        self.written_s = written_s
        self.writes = 0

    @property
    def size_bytes(self) -> int:
        """What its file takes of the disk."""
        return pages_bytes(self.filled_bytes)


def segment_bytes_for(limit_bytes: int) -> int:
    """How large segments may become in a store with this limit."""
    return max(PAGE_BYTES, min(SEGMENT_BYTES_MAX, limit_bytes // SEGMENTS_MIN // PAGE_BYTES * PAGE_BYTES))


def spare_bytes_for(limit_bytes: int) -> int:
    """What a store with this limit keeps free to write segments anew."""
    return min(segment_bytes_for(limit_bytes) // 2, limit_bytes // 4)


def pages_bytes(size_bytes: int) -> int:
    """Whole pages, which is what the disk loses."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Segments:
    """The segments of one store. Numbers come from `next_number` and are never used again."""

    def __init__(self, segment_bytes: int, next_number: Callable[[], int]) -> None:
        if segment_bytes < 1:
            raise ValueError(f"a segment has at least one byte, not {segment_bytes}")
        self._segment_bytes = segment_bytes
        self._next_number = next_number
        self._open: dict[_Stream, int] = {}
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

    def lot_of(self, number: int) -> int:
        """Whose segment it is. Raises KeyError if there is none."""
        return self._segments[number].lot

    def set_lot(self, number: int, lot: int) -> None:
        """Count it with another lot. One that is open is sealed."""
        self.seal_segment(number)
        self._segments[number].lot = lot

    def of_lots(self, lots: Iterable[int]) -> list[int]:
        """All of these lots, open ones too."""
        among = set(lots)
        return [number for number, segment in self._segments.items() if segment.lot in among]

    def is_open(self, number: int) -> bool:
        """Whether it is still written to."""
        segment = self._segments.get(number)
        return segment is not None and self._open.get(segment.stream) == number

    def is_at_rest(self, number: int) -> bool:
        """Whether it is sealed and nothing is being written to it: it may leave."""
        segment = self._segments.get(number)
        return segment is not None and self._is_at_rest(number, segment)

    def at_rest(self, lots: Iterable[int] | None = None, written_s: int = 0) -> list[int]:
        """All of these lots (None: of any) to which nothing is being written, and that are sealed or were not written
        to since `written_s`."""
        among = None if lots is None else set(lots)
        return [
            number
            for number, segment in self._segments.items()
            if (among is None or segment.lot in among)
            and not segment.writes
            and (segment.written_s < written_s or self._open.get(segment.stream) != number)
        ]

    def adopt(self, number: int, lot: int, size_bytes: int, written_s: int) -> None:
        """Take in a segment from before; sealed, and the oldest first."""
        self._segments[number] = _Segment(lot, (lot, 0), size_bytes, written_s)

    def growth_bytes(self, lot: int, size_bytes: int, *, apart: int = 0) -> int:
        """By how much the lot's files grow when an object of this size is placed now."""
        return self._offset((lot, apart), size_bytes)[1]

    def place(self, lot: int, size_bytes: int, now_s: int, *, apart: int = 0) -> Placement:
        """Where an object goes whose room was taken. One that is larger than a segment has one of its own. `apart`:
        what has another number lies in other segments.

        Every placement is settled once it is written, or was not.
        """
        sealed: int | None = None
        stream = (lot, apart)
        offset, _ = self._offset(stream, size_bytes)
        number = self._open.get(stream)
        if number is not None and offset == 0:
            self.seal_segment(number)
            sealed, number = number, None
        is_new = number is None
        if number is None:
            number = self._next_number()
            self._segments[number] = _Segment(lot, stream, 0, now_s)
            self._open[stream] = number
        segment = self._segments[number]
        segment.filled_bytes = offset + size_bytes
        segment.written_s = now_s
        segment.writes += 1
        return Placement(number, offset, is_new, sealed)

    def settle(self, number: int) -> None:
        """A placement is written, or will not be."""
        segment = self._segments.get(number)
        if segment is not None:
            segment.writes -= 1

    def seal_segment(self, number: int) -> None:
        """Write no more to this one, if it is open."""
        if self.is_open(number):
            del self._open[self._segments[number].stream]
            self._segments.move_to_end(number)

    def remove(self, number: int) -> int:
        """Its file is gone; how many bytes it had."""
        segment = self._segments.pop(number)
        if self._open.get(segment.stream) == number:
            del self._open[segment.stream]
        return segment.size_bytes

    def oldest(self, lots: Iterable[int] | None = None) -> int | None:
        """The sealed segment that was written first, of these lots (None: of any)."""
        among = None if lots is None else set(lots)
        for number, segment in self._segments.items():
            if self._is_at_rest(number, segment) and (among is None or segment.lot in among):
                return number
        return None

    def largest_open(self, lots: Iterable[int]) -> int | None:
        """Of the open segments of these lots that are at rest, the one with the most in it; None if there is none."""
        among = set(lots)
        sizes = {
            number: segment.size_bytes
            for number in self._open.values()
            if (segment := self._segments[number]).lot in among and not segment.writes
        }
        return max(sizes, key=lambda number: sizes[number]) if sizes else None

    def written_before(self, lots: Iterable[int], written_s: int) -> list[int]:
        """Segments of these lots to which nothing was written since."""
        among = set(lots)
        return [number for number in self._segments if self.was_written_before(number, among, written_s)]

    def was_written_before(self, number: int, lots: Collection[int], written_s: int) -> bool:
        """Whether it is one of these lots to which nothing was written since."""
        segment = self._segments.get(number)
        return (
            segment is not None
            and segment.lot in lots
            and not segment.writes
            and segment.written_s < written_s
        )

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
            if not self._is_at_rest(number, segment) or segment.size_bytes == 0:
                continue
            share = live_bytes(number) / segment.size_bytes
            if share < SPARSE_BELOW and (best is None or share < best[0]):
                best = share, number
        return None if best is None else best[1]

    def _is_at_rest(self, number: int, segment: _Segment) -> bool:
        return self._open.get(segment.stream) != number and not segment.writes

    def _offset(self, stream: _Stream, size_bytes: int) -> tuple[int, int]:
        """Where in its segment the stream's next object goes, and by how much files grow; 0: into a new one."""
        number = self._open.get(stream)
        if number is not None:
            segment = self._segments[number]
            offset = segment.filled_bytes
            if size_bytes >= ALIGNED_FROM_BYTES:
                offset = pages_bytes(offset)
            if offset + size_bytes <= self._segment_bytes:
                return offset, pages_bytes(offset + size_bytes) - segment.size_bytes
        return 0, pages_bytes(size_bytes)
