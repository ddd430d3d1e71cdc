"""Which reads are to come: the orders that jobs announce, and when each thing is read next. Pure.

A *stream* is one reader's coming reads, in order; a position in it is a read. What is read is an *item*: a number that
stands for an object, or for one block of it. Streams of a job's ranks are one *group*.

Belady's rule (1966) gives up what is read latest. Within a *round*, in which nothing is read twice (an epoch), a place
in the cache can give one hit, whatever lies there: which of the items of a round leaves makes no difference, and moving
them about costs writes for nothing. So where all reads of a bucket are one group's, an item counts as due at the end of
the round in which it is read next. Shuffled epochs are then kept as `uniform` would (the optimum: that part of the
dataset that fits), and what the next round does not read leaves first.

What is looked up may be while another thread announces: all state is replaced as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker._native import Reads, next_reads, next_reads_of
from stoker.base.rng import GOLDEN_GAMMA, MASK64

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]
NEVER = int(np.iinfo(np.int64).max)
_GAMMA = np.uint64(GOLDEN_GAMMA)
_KINDS = 16
_PACE_SHARE = 0.25
_PACE_S_MAX = 3600.0
_NEXT_READ = np.dtype([("stream", "<u4"), ("item", "<u4"), ("position", "<i8"), ("again", "<i8")])


def items_of(ids: U64, blocks: I64) -> U64:
    """The items of blocks of the objects with these ids; block -1: of whole objects."""
    numbers = (blocks + 1).astype(np.uint64)
    return ids ^ (numbers * _GAMMA)


def item_of(number: int, block: int) -> int:
    """The same, of one."""
    return number ^ ((block + 1) * GOLDEN_GAMMA & MASK64)


class _Said(NamedTuple):
    """What is known of a stream's reads. It is replaced as a whole."""

    reads: Reads
    stop: int
    rounds: tuple[tuple[int, int], ...]
    """Where each begins, and its number; none, where it is not known of all reads in which they are."""

    def round_at(self, position: int) -> tuple[int, int]:
        """The number of the round that a read is in, and its end."""
        stop = self.stop
        for first, number in reversed(self.rounds):
            if first <= position:
                return number, stop
            stop = first
        return 0, stop

    def rounds_from(self, position: int) -> tuple[tuple[int, int], ...]:
        """Those that do not end before it."""
        first = len(self.rounds)
        while first and (first == len(self.rounds) or self.rounds[first][0] > position):
            first -= 1
        return self.rounds[first:]


class Stream:
    """One reader's coming reads. `plan`: what is announced under a higher number replaces all of a lower one."""

    def __init__(self, group: str, plan: int, *, read_s: float, now: float) -> None:
        self.group = group
        self.plan = plan
        self.cursor = 0
        self.asked = 0
        """What is before it is asked for by now, if not read."""
        self.reach: int | None = None
        """What is read so many reads after those that are asked for counts for nothing; None: all counts."""
        self.read_s = read_s
        """Seconds a read takes, as was said at first and is seen since."""
        self.said = _Said(Reads(), 0, ())
        self._moved_at = now

    @property
    def stop(self) -> int:
        """The position after the last that is known."""
        return self.said.stop

    @property
    def size(self) -> int:
        """How many items of reads are kept."""
        return len(self.said.reads)

    @property
    def share(self) -> float:
        """At which part of the positions that are known anything is read here."""
        reads = self.said.reads
        return min(1.0, len(reads) / reads.positions) if reads.positions else 1.0

    @property
    def until(self) -> int:
        """What is read from there on counts for nothing."""
        return NEVER if self.reach is None else self.asked + self.reach

    @property
    def has_rounds(self) -> bool:
        """Whether it is known of all reads in which round they are."""
        return bool(self.said.rounds)

    def announce(
        self, start: int, count: int, items: U64, positions: I64, round_number: int | None = None
    ) -> None:
        """The `count` reads from `start` on: what is read at which position, ascending. What was announced from there
        on is forgotten. Raises ValueError where some in between are not known."""
        reads, stop, rounds = self.said
        if not 0 <= start <= stop:
            raise ValueError(f"reads are known up to {stop}, not up to {start}")
        if start < stop:
            reads = reads.until(start, self.cursor)
            rounds = tuple(entry for entry in rounds if entry[0] < start)
        if round_number is None:
            rounds = ()
        elif (start == 0 or rounds) and (not rounds or rounds[-1][1] != round_number):
            rounds = (*rounds, (start, round_number))
        if count:
            items, positions = np.ascontiguousarray(items), np.ascontiguousarray(positions)
            reads = reads.with_reads(items, positions, start, start + count)
        self.said = _Said(reads, start + count, rounds)

    def advance(self, cursor: int, now: float, asked: int = 0) -> None:
        """Reads before `cursor` are done, and those before `asked` are under way."""
        self.asked = max(self.asked, min(asked, self.stop), min(cursor, self.stop))
        if cursor <= self.cursor:
            return
        pace_s = (now - self._moved_at) / (cursor - self.cursor)
        if 0 < pace_s < _PACE_S_MAX:
            self.read_s += (pace_s - self.read_s) * _PACE_SHARE
        self.cursor = min(cursor, self.stop)
        self._moved_at = now
        self.said = self.said._replace(reads=self.said.reads.since(self.cursor))

    def next_of(self, items: U64, start: int = 0) -> I64:
        """The position, of those from `start` on, at which each item is read next; NEVER, if that is not known."""
        found = np.full(len(items), NEVER, dtype=np.int64)
        known = _next_reads([self.said.reads], [max(start, self.cursor)], [self.until], items)
        found[known["item"]] = known["position"]
        return found

    def as_of_now(self) -> Stream:
        """A copy that stays as it is."""
        made = Stream.__new__(Stream)
        made.__dict__.update(self.__dict__)
        return made


class Due(NamedTuple):
    """When items are read next, in seconds from now (infinite: nobody has said that they are), and up to when it is
    known what is read."""

    seconds: F64
    horizon_s: float


class Next(NamedTuple):
    """When one item is read next, in seconds from now, and its kind."""

    seconds: float
    kind: int


class ComingReads:
    """All streams of one bucket, by name."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, name: str) -> Stream | None:
        """A stream that was announced."""
        return self._streams.get(name)

    def put(self, name: str, stream: Stream) -> None:
        """Add a stream, or replace it."""
        self._streams = {**self._streams, name: stream}

    def as_of_now(self) -> ComingReads:
        """A copy that stays as it is."""
        kept = ComingReads()
        kept._streams = {name: stream.as_of_now() for name, stream in self._streams.items()}
        return kept

    def remove(self, name: str) -> None:
        """A stream goes on no more."""
        self._streams = {other: stream for other, stream in self._streams.items() if other != name}

    @property
    def is_in_rounds(self) -> bool:
        """Whether all that is read is one group's, which reads nothing twice in a round."""
        return _Now(self._streams.values()).in_rounds

    def next_of(self, number: int, block: int, now_s: float) -> Next:
        """As `due` and `kind_of` say of one block (-1: object)."""
        now = _Now(self._streams.values())
        other = number if block >= 0 else item_of(number, 0)
        found = now.next_of([item_of(number, block), other])
        stops = now.round_stop if now.in_rounds else _itself
        seconds = [now.seconds(stream, stops(stream, position)) for stream, _, position, _ in found]
        # What is due later need not be looked at.
        again = [
            (now.seconds(stream, after), stream, after)
            for stream, which, _, after in found
            if which == 0 and after != NEVER
        ]
        first_s = min(again)[0] if again else 0.0
        kinds = [now.kind_of(stream, after, now_s) for due_s, stream, after in again if due_s == first_s]
        return Next(min(seconds, default=math.inf), min(kinds, default=0))

    def kind_of(self, item: int, now_s: float) -> int:
        """What is read at about the same time after its next reading is of one kind, which is never 0; 0: what is not
        read again, as far as is known."""
        return self.next_of(item, -1, now_s).kind

    def kinds_of(self, items: U64, now_s: float) -> list[int]:
        """The same, of many."""
        now = _Now(self._streams.values())
        found = now.next_of_all(items, with_again=True)
        found = found[found["again"] != NEVER]
        due_s = now.seconds_until(found["stream"], found["again"])
        kinds = now.kinds_of(found["stream"], found["again"], now_s)
        order = np.lexsort((kinds, due_s, found["item"]))
        asked, first = np.unique(found["item"][order], return_index=True)
        best = np.zeros(len(items), dtype=np.int64)
        best[asked] = kinds[order][first]
        return best.tolist()

    def due(self, ids: U64, blocks: I64) -> Due:
        """When each block (-1: object) is read next by any stream, itself or as a part of its object."""
        now = _Now(self._streams.values())
        # What is read as a whole counts for each block, and what is read of its first one for an object of one block.
        others = np.where(blocks >= 0, ids, items_of(ids, np.zeros_like(blocks)))
        found = now.next_of_all(np.stack([items_of(ids, blocks), others], axis=1).ravel())
        positions = found["position"]
        if now.in_rounds:
            positions = now.rounds_at(found["stream"], positions)[1]
        seconds = np.full(len(ids), np.inf)
        np.minimum.at(seconds, found["item"] // 2, now.seconds_until(found["stream"], positions))
        return Due(seconds, max(((said.stop - at) * read_s for said, at, read_s in now.each()), default=0.0))


class _Now:
    """What is known of some streams at this moment: they go by their places here."""

    def __init__(self, streams: Collection[Stream]) -> None:
        self.said = [stream.said for stream in streams]
        self.cursors = [stream.cursor for stream in streams]
        self.untils = [stream.until for stream in streams]
        self.read_s = [stream.read_s for stream in streams]
        self.in_rounds = len({stream.group for stream in streams}) == 1 and all(
            said.rounds for said in self.said
        )

    def each(self) -> Iterable[tuple[_Said, int, float]]:
        """What is known of each stream, its cursor, and the seconds that a read takes it."""
        return zip(self.said, self.cursors, self.read_s, strict=True)

    def next_of(self, items: list[int]) -> list[tuple[int, int, int, int]]:
        """Who reads a few items next: the stream, the item's place, the position, and where it does again."""
        return next_reads_of([said.reads for said in self.said], self.cursors, self.untils, items)

    def next_of_all(self, items: U64, *, with_again: bool = False) -> npt.NDArray[np.void]:
        """The same, of many: see `_NEXT_READ`."""
        reads = [said.reads for said in self.said]
        return _next_reads(reads, self.cursors, self.untils, items, with_again=with_again)

    def seconds_until(self, streams: U32, positions: I64) -> F64:
        """When these streams are at these positions."""
        cursors, read_s = np.array(self.cursors, dtype=np.int64), np.array(self.read_s, dtype=np.float64)
        return (positions - cursors[streams]) * read_s[streams]

    def rounds_at(self, streams: U32, positions: I64) -> tuple[I64, I64]:
        """As _Said.round_at."""
        known = [said.rounds_from(cursor) for said, cursor, _ in self.each()]
        longest = max(map(len, known), default=0)
        # Numbers, starts and ends, by stream and round.
        table = np.full((3, len(known), longest + 1), NEVER, dtype=np.int64)
        for number, (said, rounds) in enumerate(zip(self.said, known, strict=True)):
            if rounds:
                starts, numbers = zip(*rounds, strict=True)
                table[:, number, : len(rounds)] = numbers, starts, (*starts[1:], said.stop)
        at = np.maximum((table[1][streams] <= positions[:, None]).sum(axis=1) - 1, 0)
        return table[0][streams, at], table[2][streams, at]

    def seconds(self, stream: int, position: int) -> float:
        """When a stream is at a position."""
        return (position - self.cursors[stream]) * self.read_s[stream]

    def round_stop(self, stream: int, position: int) -> int:
        """The end of the round that a position is in."""
        return self.said[stream].round_at(position)[1]

    def kind_of(self, stream: int, position: int, now_s: float) -> int:
        """What a position has in common with those that are read at about the same time: a number above 0."""
        if self.in_rounds:
            return 1 + self.said[stream].round_at(position)[0] % _KINDS
        return 1 + int((now_s + self.seconds(stream, position)) / self._width_s(stream)) % _KINDS

    def kinds_of(self, streams: U32, positions: I64, now_s: float) -> I64:
        """The same, of many."""
        if self.in_rounds:
            return 1 + self.rounds_at(streams, positions)[0] % _KINDS
        due_s = self.seconds_until(streams, positions)
        widths_s = np.array([self._width_s(stream) for stream in range(len(self.said))], dtype=np.float64)
        return 1 + ((now_s + due_s) / widths_s[streams]).astype(np.int64) % _KINDS

    def _width_s(self, stream: int) -> float:
        known_s = (self.said[stream].stop - self.cursors[stream]) * self.read_s[stream]
        return 2.0 ** math.ceil(math.log2(max(1e-6, known_s / _KINDS)))


def _next_reads(
    reads: list[Reads], starts: list[int], stops: list[int], items: U64, *, with_again: bool = False
) -> npt.NDArray[np.void]:
    found = next_reads(reads, starts, stops, np.ascontiguousarray(items), with_again)
    return np.frombuffer(found, dtype=_NEXT_READ)


def _itself(_: int, position: int) -> int:
    return position
