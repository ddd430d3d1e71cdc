"""What leaves of buckets whose coming reads are known."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker._native import Piece
from stoker.base.rng import Rng
from stoker.cache.coming import ComingReads, Due
from stoker.cache.farthest import Leaving, Sample, latest
from stoker.cache.store.holdings import Holdings
from stoker.cache.store.large_files import LargeFiles

U64 = npt.NDArray[np.uint64]
ID_BYTES = 16
BLOCKS_DRAWN = 128
PIECES_DRAWN = 32
SEGMENTS_DRAWN = 512
SEGMENTS_DRAWN_MIN = 128
LOOKS_MAX = 1 << 18
"""So many pieces are looked up in one choice, in all streams together."""
NEWEST = 32
"""What came last is looked at always: most of what was fetched to be read once is among it."""
REST_S = 5
AT_ONCE_MAX = 16
AT_ONCE_SHARE = 1 / 64
AT_ONCE_DRAWN_SHARE = 1 / 32
PIECES_AT_ONCE = 1024
"""So many segments are chosen at once, at most: such a part of all, and of those that were looked at, and with so many
pieces. At the end of an epoch it is suddenly others that are worth least."""
AHEAD_S = 10.0
AHEAD_SHARE = 1 / 64
"""So long a choice counts, and such a part of the time until what leaves is read."""
REFUSED_S = 0.05
KINDS_KEPT = 1024
"""Few newcomers are on their way at a time; what was never packed is forgotten."""


class Newcomer(NamedTuple):
    """What is to be stored: when it is read next, and whether it was fetched because that is soon."""

    due_s: float
    is_foreseen: bool = False


ANY = Newcomer(-1.0)
"""One of another bucket: whatever is foreseen may leave for it."""


class Choice(NamedTuple):
    """What leaves: a block, or a segment after pieces of it were written anew: all that are kept, or, where there is no
    time, those that are pinned. `due_s`: when it is read next; `from_s`: of a segment only what is read from then on is
    lost. `kinds`: of those that are kept, see Foreseen.kinds_of."""

    due_s: float
    block: Piece | None
    segment: int
    kept: Sequence[Piece]
    lost: Sequence[Piece]
    pinned: Sequence[Piece] = ()
    from_s: float = -np.inf
    kinds: Sequence[int] = ()


@dataclass(slots=True)
class _Chosen:
    """What leaves next of some lots, for a time. `refused_s`: for what is read then or later, nothing does."""

    until: float
    next: deque[Choice]
    refused_s: float = np.inf


class Foreseen:
    """Lives on the store's event loop; one choice is made at a time."""

    def __init__(self, held: Holdings, large: LargeFiles, rng: Rng) -> None:
        self._held = held
        self._large = large
        self._rng = rng
        self._kinds: dict[tuple[int, str], int] = {}
        """Of newcomers that are about to be packed: one look finds both."""
        self._drawn: dict[int, bytes] = {}
        """The ids of some pieces of each segment that was at rest once."""
        self._chosen: dict[frozenset[int], _Chosen] = {}
        self._free: dict[int, U64 | None] = {}
        """Of those that were looked at, the numbers of what may leave; None where all that was drawn is pinned."""

    def lots(self, lots: Collection[int]) -> frozenset[int]:
        """Those of these lots whose bucket's coming reads are known."""
        coming = self._held.coming
        return frozenset(lot for lot in lots if coming and self._held.lots.bucket_of(lot) in coming)

    def newcomer(self, bucket: int, key: str, block: int | None, *, is_foreseen: bool) -> Newcomer | None:
        """What is to be stored; None where nothing is known of its bucket's coming reads."""
        coming = self._held.coming.get(bucket)
        if coming is None:
            return None
        found = coming.next_of(self._number(bucket, key), -1 if block is None else block, self._held.now())
        if block is None:
            if len(self._kinds) == KINDS_KEPT:
                self._kinds.clear()
            self._kinds[bucket, key] = found.kind
        return Newcomer(found.seconds, is_foreseen)

    def kind_of(self, bucket: int, key: str) -> int:
        """With what an object is packed: see ComingReads.kind_of."""
        kind = self._kinds.pop((bucket, key), None)
        coming = self._held.coming.get(bucket)
        if coming is None:
            return 0
        return coming.kind_of(self._number(bucket, key), self._held.now()) if kind is None else kind

    async def kinds_of(self, pieces: Sequence[Piece]) -> list[int]:
        """The same, of pieces of one bucket that are packed already."""
        coming = self._held.coming.get(pieces[0].bucket) if pieces else None
        if coming is None:
            return [0] * len(pieces)
        known, now_s = coming.as_of_now(), self._held.now()
        return await self._held.run(lambda: known.kinds_of(_numbers(pieces), now_s))

    async def are_to_come(self, pieces: Sequence[Piece]) -> list[bool]:
        """Which of these pieces of one bucket are announced to be read, as far ahead as it counts."""
        coming = self._held.coming.get(pieces[0].bucket) if pieces else None
        if coming is None:
            return [False] * len(pieces)
        known = coming.as_of_now()
        return await self._held.run(lambda: np.isfinite(_due(known, pieces).seconds).tolist())

    async def choose(self, lots: frozenset[int], newcomer: Newcomer) -> Choice | None:
        """What is read latest of these lots; None if it is worth more than the newcomer.

        Looking at so many segments that a good one is among them takes long, beside small segments even longer than
        filling one: so several are chosen at once.
        """
        held = self._held
        chosen = self._chosen.get(lots)
        if chosen is not None and held.now() < chosen.until:
            if chosen.refused_s <= newcomer.due_s and not newcomer.is_foreseen:
                return None
            if (choice := self._next_of(chosen, newcomer)) is not None:
                return choice
        numbers = held.segments.at_rest(lots, held.now_s() - REST_S)
        coming = {
            bucket: held.coming[bucket].as_of_now()
            for bucket in held.lots.buckets_of(lots)
            if bucket in held.coming
        }
        buckets: dict[int, list[int]] = {}
        for number in self._some(numbers, max(map(len, coming.values()), default=1)):
            buckets.setdefault(held.lots.bucket_of(held.segments.lot_of(number)), []).append(number)
        self._forget_gone()
        found = await held.run(self._choose, lots, numbers, buckets, newcomer, coming)
        return self._keep(lots, newcomer, found)

    def _next_of(self, chosen: _Chosen, newcomer: Newcomer) -> Choice | None:
        """One of those that were chosen before, if it is worth less than this newcomer, too."""
        while chosen.next:
            choice = chosen.next[0]
            is_free = self._held.segments.is_at_rest(choice.segment)
            if is_free:
                bucket = self._held.lots.bucket_of(self._held.segments.lot_of(choice.segment))
                is_free = not self._held.lots[bucket].has_rules  # else some of it may be pinned by now
            is_worth_less = newcomer.due_s < choice.from_s or choice.from_s == np.inf
            if is_free and not newcomer.is_foreseen and not is_worth_less:
                return None
            chosen.next.popleft()
            if is_free:
                return choice
        return None

    def _keep(self, lots: frozenset[int], newcomer: Newcomer, found: list[Choice]) -> Choice | None:
        """The first, and the others for who comes next."""
        now = self._held.now()
        self._chosen = {other: chosen for other, chosen in self._chosen.items() if now < chosen.until}
        if not found:
            if not newcomer.is_foreseen:
                self._chosen[lots] = _Chosen(now + REFUSED_S, deque(), newcomer.due_s)
            return None
        if len(found) > 1:
            until = now + min(AHEAD_S, found[-1].due_s * AHEAD_SHARE)
            self._chosen[lots] = _Chosen(until, deque(found[1:]))
        return found[0]

    def _choose(
        self,
        lots: frozenset[int],
        numbers: list[int],
        segments: dict[int, list[int]],
        newcomer: Newcomer,
        coming: Mapping[int, ComingReads],
    ) -> list[Choice]:
        """In a thread. `numbers`: of all segments that may leave; `segments`: of some of them, by bucket."""
        self._draw(numbers)
        block = self._block(lots, newcomer, coming)
        samples = self._samples(segments, coming)
        shares = len(numbers) * AT_ONCE_SHARE, len(samples) * AT_ONCE_DRAWN_SHARE, AT_ONCE_MAX
        leaving = latest(
            samples, newcomer.due_s, is_forced=newcomer.is_foreseen, most=max(1, int(min(shares)))
        )
        if block is not None and (not leaving or block.due_s >= leaving[0].due_s):
            return [block]
        return self._segments(leaving, coming)

    def _number(self, bucket: int, key: str) -> int:
        return int.from_bytes(self._held.index.ids(bucket, [key]), sys.byteorder)

    def _forget_gone(self) -> None:
        """Segments that have left; now and then, for there are many."""
        segments = self._held.segments
        if len(self._drawn) > 2 * len(segments) + SEGMENTS_DRAWN:
            self._drawn = {number: ids for number, ids in self._drawn.items() if number in segments}
            self._free = {number: free for number, free in self._free.items() if number in segments}

    def _block(
        self, lots: frozenset[int], newcomer: Newcomer, coming: Mapping[int, ComingReads]
    ) -> Choice | None:
        held = self._held
        best: Choice | None = None
        for bucket, known in coming.items():
            drawn = held.index.sample(BLOCKS_DRAWN, [bucket], True, self._rng.next64())
            free = [
                piece
                for piece in drawn
                if held.lot_of_piece(piece) in lots and not self._large.is_busy(piece.container)
            ]
            if not free:
                continue
            due = _due(known, free)
            ages_s = np.array([max(0, held.now_s() - piece.used_s) for piece in free])
            is_known = np.isfinite(due.seconds)
            order_s = np.where(is_known, due.seconds, due.horizon_s + ages_s)
            at = int(np.argmax(order_s))
            is_later = due.seconds[at] > newcomer.due_s or not is_known[at]
            if (is_later or newcomer.is_foreseen) and (best is None or order_s[at] > best.due_s):
                best = Choice(float(order_s[at]), free[at], 0, (), (free[at],))
        return best

    def _segments(self, leaving: Sequence[Leaving], coming: Mapping[int, ComingReads]) -> list[Choice]:
        """Those that leave, as far as anything of them is lost."""
        chosen: list[Choice] = []
        now_s, looked_at = self._held.now(), 0
        for one in leaving:
            pieces = [piece for piece, _ in self._held.index.pieces(one.number)]
            looked_at += len(pieces)
            choice = self._segment(one, pieces, coming, now_s)
            if choice.lost or not pieces:
                chosen.append(choice)
            if looked_at >= PIECES_AT_ONCE:
                break
        return chosen

    def _segment(
        self, leaving: Leaving, pieces: Sequence[Piece], coming: Mapping[int, ComingReads], now_s: float
    ) -> Choice:
        known = coming.get(pieces[0].bucket) if pieces else None
        if known is None:
            return Choice(leaving.due_s, None, leaving.number, (), pieces)
        is_late = leaving.is_lost(_due(known, pieces).seconds).tolist()
        if not self._held.lots[pieces[0].bucket].has_rules:
            is_pinned = [False] * len(pieces)
        else:
            is_pinned = [self._held.is_pinned(piece) for piece in pieces]
        kept: list[Piece] = []
        lost: list[Piece] = []
        pinned: list[Piece] = []
        for piece, late, stays in zip(pieces, is_late, is_pinned, strict=True):
            (lost if late and not stays else kept).append(piece)
            if stays:
                pinned.append(piece)
        kinds = known.kinds_of(_numbers(kept), now_s) if kept else []
        return Choice(leaving.due_s, None, leaving.number, kept, lost, pinned, leaving.from_s, kinds)

    def _some(self, numbers: list[int], streams: int) -> list[int]:
        """Of many segments, those that came last and some of the others; the fewer, the more streams there are, each of
        which is asked for all that is looked at."""
        drawn = segments_drawn(streams)
        if len(numbers) <= drawn:
            return numbers
        older = numbers[:-NEWEST]
        picked = {older[self._rng.below(len(older))] for _ in range(drawn - NEWEST)}
        return [*sorted(picked), *numbers[-NEWEST:]]

    def _samples(self, segments: dict[int, list[int]], coming: Mapping[int, ComingReads]) -> list[Sample]:
        """A few pieces of each segment."""
        samples: list[Sample] = []
        for bucket, known in coming.items():
            drawn = {number: self._free_of(bucket, number) for number in segments.get(bucket, ())}
            free = {number: own for number, own in drawn.items() if own is not None}
            if not free:
                continue
            ids = np.concatenate(list(free.values()))
            seconds = known.due(ids, np.full(len(ids), -1)).seconds
            at = 0
            for number, own in free.items():
                # An empty one leaves before all others.
                due_s = seconds[at : at + len(own)] if len(own) else np.array([np.inf])
                samples.append(Sample(number, due_s))
                at += len(own)
        return samples

    def _draw(self, numbers: list[int]) -> None:
        """All that are new at once: the index is gone through for it."""
        if new := [number for number in numbers if number not in self._drawn]:
            drawn = self._held.index.sample_ids(new, PIECES_DRAWN, self._rng.next64())
            self._drawn.update((number, drawn.get(number, b"")) for number in new)

    def _free_of(self, bucket: int, number: int) -> U64 | None:
        if number not in self._free:
            drawn = free = self._drawn[number]
            if self._held.lots[bucket].has_rules:
                ids = [drawn[at : at + ID_BYTES] for at in range(0, len(drawn), ID_BYTES)]
                free = b"".join(
                    one for one in ids if not self._held.is_pinned(Piece(bucket, one, None, number))
                )
            self._free[number] = _lows(free) if free or not drawn else None
        return self._free[number]


def segments_drawn(streams: int) -> int:
    """How many segments are looked at for a choice, at most."""
    return max(SEGMENTS_DRAWN_MIN, min(SEGMENTS_DRAWN, LOOKS_MAX // (PIECES_DRAWN * max(1, streams))))


def _due(coming: ComingReads, pieces: Sequence[Piece]) -> Due:
    """Of pieces of one bucket."""
    blocks = np.array([-1 if piece.block is None else piece.block for piece in pieces], dtype=np.int64)
    return coming.due(_numbers(pieces), blocks)


def _numbers(pieces: Sequence[Piece]) -> U64:
    """The numbers that announced reads know the pieces' objects by."""
    return _lows(b"".join(piece.id for piece in pieces))


def _lows(ids: bytes) -> U64:
    return np.frombuffer(ids, dtype=np.uint64)[1::2]
