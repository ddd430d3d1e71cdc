"""What leaves of buckets whose coming reads are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stoker._native import Piece
from stoker.base.rng import Rng
from stoker.cache.coming import ComingReads, Due
from stoker.cache.farthest import Sample, latest
from stoker.cache.store.holdings import Holdings
from stoker.cache.store.large_files import LargeFiles

BLOCKS_DRAWN = 128
PIECES_DRAWN = 32
SEGMENTS_DRAWN = 512
NEWEST = 32
"""What came last is looked at always: most of what was fetched to be read once is among it."""
REST_S = 5


class Newcomer(NamedTuple):
    """What is to be stored: when it is read next, and whether it was fetched because that is soon."""

    due_s: float
    is_foreseen: bool = False


ANY = Newcomer(-1.0)
"""One of another bucket: whatever is foreseen may leave for it."""


class Choice(NamedTuple):
    """What leaves: a block, or a segment after pieces of it were written anew: all that are kept, or, where there is no
    time, those that are pinned. `due_s`: when it is read next."""

    due_s: float
    block: Piece | None
    segment: int
    kept: Sequence[Piece]
    lost: Sequence[Piece]
    pinned: Sequence[Piece] = ()


class Foreseen:
    """Lives on the store's event loop; one choice is made at a time."""

    def __init__(self, held: Holdings, large: LargeFiles, rng: Rng) -> None:
        self._held = held
        self._large = large
        self._rng = rng
        self._drawn: dict[int, npt.NDArray[np.uint64] | None] = {}
        """Some pieces of each segment; None where all are pinned."""

    def lots(self, lots: Collection[int]) -> frozenset[int]:
        """Those of these lots whose bucket's coming reads are known."""
        coming = self._held.coming
        return frozenset(lot for lot in lots if coming and self._held.lots.bucket_of(lot) in coming)

    def newcomer(self, bucket: int, key: str, block: int | None, *, is_foreseen: bool) -> Newcomer | None:
        """What is to be stored; None where nothing is known of its bucket's coming reads."""
        coming = self._held.coming.get(bucket)
        if coming is None:
            return None
        ids = self._id(bucket, key)
        due = coming.due(ids, np.array([-1 if block is None else block]))
        return Newcomer(float(due.seconds[0]), is_foreseen)

    def kind_of(self, bucket: int, key: str) -> int:
        """With what an object is packed: see ComingReads.kind_of."""
        coming = self._held.coming.get(bucket)
        return 0 if coming is None else coming.kind_of(int(self._id(bucket, key)[0]), self._held.now())

    def kind_of_piece(self, piece: Piece) -> int:
        """The same, of a piece that is packed already."""
        coming = self._held.coming.get(piece.bucket)
        return 0 if coming is None else coming.kind_of(int(_ids([piece])[0]), self._held.now())

    async def choose(self, lots: frozenset[int], newcomer: Newcomer) -> Choice | None:
        """What is read latest of these lots; None if it is worth more than the newcomer."""
        held = self._held
        numbers = held.segments.at_rest(lots, held.now_s() - REST_S)
        self._drawn = {number: ids for number, ids in self._drawn.items() if number in held.segments}
        buckets: dict[int, list[int]] = {}
        for number in self._some(numbers):
            buckets.setdefault(held.lots.bucket_of(held.segments.lot_of(number)), []).append(number)
        coming = {
            bucket: held.coming[bucket].as_of_now()
            for bucket in held.lots.buckets_of(lots)
            if bucket in held.coming
        }
        return await held.run(self._choose, lots, buckets, newcomer, coming)

    def _choose(
        self,
        lots: frozenset[int],
        segments: dict[int, list[int]],
        newcomer: Newcomer,
        coming: Mapping[int, ComingReads],
    ) -> Choice | None:
        """In a thread. `segments`: by bucket."""
        block = self._block(lots, newcomer, coming)
        segment = self._segment(segments, newcomer, coming)
        if block is None or segment is None:
            return block or segment
        return block if block.due_s >= segment.due_s else segment

    def _id(self, bucket: int, key: str) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._held.index.ids(bucket, [key]), dtype=np.uint64)

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

    def _segment(
        self, segments: dict[int, list[int]], newcomer: Newcomer, coming: Mapping[int, ComingReads]
    ) -> Choice | None:
        samples = self._samples(segments, coming)
        leaving = latest(samples, newcomer.due_s, is_forced=newcomer.is_foreseen)
        if leaving is None:
            return None
        pieces = [piece for piece, _ in self._held.index.pieces(leaving.number)]
        if not pieces or pieces[0].bucket not in coming:
            return Choice(leaving.due_s, None, leaving.number, (), pieces)
        is_late = leaving.is_lost(_due(coming[pieces[0].bucket], pieces).seconds)
        pinned = [piece for piece in pieces if self._held.is_pinned(piece)]
        stays = {piece.id for piece in pinned}
        lost = [piece for piece, late in zip(pieces, is_late, strict=True) if late and piece.id not in stays]
        gone = {piece.id for piece in lost}
        kept = [piece for piece in pieces if piece.id not in gone]
        return Choice(leaving.due_s, None, leaving.number, kept, lost, pinned) if lost else None

    def _some(self, numbers: list[int]) -> list[int]:
        """Of many segments, those that came last and some of the others."""
        if len(numbers) <= SEGMENTS_DRAWN:
            return numbers
        older = numbers[:-NEWEST]
        picked = {older[self._rng.below(len(older))] for _ in range(SEGMENTS_DRAWN - NEWEST)}
        return [*sorted(picked), *numbers[-NEWEST:]]

    def _samples(self, segments: dict[int, list[int]], coming: Mapping[int, ComingReads]) -> list[Sample]:
        """A few pieces of each segment."""
        samples: list[Sample] = []
        for bucket, known in coming.items():
            drawn = {number: self._draw(number) for number in segments.get(bucket, ())}
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

    def _draw(self, number: int) -> npt.NDArray[np.uint64] | None:
        if number not in self._drawn:
            pieces = [piece for piece, _ in self._held.index.pieces(number)]
            if len(pieces) > PIECES_DRAWN:
                pieces = [pieces[self._rng.below(len(pieces))] for _ in range(PIECES_DRAWN)]
            free = [piece for piece in pieces if not self._held.is_pinned(piece)]
            self._drawn[number] = _ids(free) if free or not pieces else None
        return self._drawn[number]


def _due(coming: ComingReads, pieces: Sequence[Piece]) -> Due:
    """Of pieces of one bucket."""
    blocks = np.array([-1 if piece.block is None else piece.block for piece in pieces], dtype=np.int64)
    return coming.due(_ids(pieces), blocks)


def _ids(pieces: Sequence[Piece]) -> npt.NDArray[np.uint64]:
    """The numbers that announced reads know the pieces' objects by."""
    return np.frombuffer(b"".join(piece.id for piece in pieces), dtype=np.uint64)[1::2]
