"""What leaves because a bucket keeps it for a time only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from stoker._native import Piece
from stoker.cache.room import Lot
from stoker.cache.store.departures import AGE, Departures
from stoker.cache.store.holdings import Holdings
from stoker.cache.store.large_files import LargeFiles
from stoker.cache.store.lots import KeptBucket
from stoker.cache.store.rewriting import Rewriting

LOOK_SHARE = 0.01
"""What is kept for a time is looked at again after such a part of it."""


class _Sifted(NamedTuple):
    """What of a segment is pinned, and whether that is all there is in it."""

    pinned: list[Piece]
    is_whole: bool


class Aging:
    """Lives on the store's event loop. `lock`: held while something leaves."""

    def __init__(
        self,
        held: Holdings,
        large: LargeFiles,
        rewriting: Rewriting,
        lock: asyncio.Lock,
        departures: Departures,
    ) -> None:
        self._held = held
        self._large = large
        self._rewriting = rewriting
        self._lock = lock
        self._departures = departures
        self._look_from: dict[int, float] = {}
        self._wholly_pinned: dict[int, Sequence[Lot]] = {}
        """Segments in which all is pinned by the rules for these lots."""

    async def give_up_old(self) -> None:
        """See Clearing.give_up_old."""
        held = self._held
        for bucket in [bucket for bucket in held.lots.all() if bucket.evict_after_s > 0]:
            if held.now() < self._look_from.get(bucket.number, 0.0):
                continue
            self._look_from[bucket.number] = held.now() + bucket.evict_after_s * LOOK_SHARE
            before_s = int(held.now_s() - bucket.evict_after_s)
            async with self._lock:
                await self._give_up_segments(bucket, before_s)
                await self._give_up_files(bucket, before_s)

    async def _give_up_segments(self, bucket: KeptBucket, before_s: int) -> None:
        held = self._held
        self._wholly_pinned = {n: lots for n, lots in self._wholly_pinned.items() if n in held.segments}
        # One that was filled before there were rules may be counted as pinned for the sake of some of what is in it.
        for number in held.segments.written_before([lot.number for lot in bucket.lots], before_s):
            # Each wait may have brought something new to those that come later, or other rules.
            lots = bucket.lots
            numbers = [lot.number for lot in lots]
            if self._wholly_pinned.get(number) is lots:
                continue
            if not held.segments.was_written_before(number, numbers, before_s):
                continue
            if held.segments.is_open(number):
                held.segments.seal_segment(number)
                held.files.finish(number)
            sifted = _Sifted([], False)
            if bucket.has_rules:
                sifted = await held.run(self._sift, number)
            if sifted.is_whole:
                self._wholly_pinned[number] = lots
            else:
                whole = held.index.container(number)
                if whole is not None:
                    kept_bytes = sum(piece.size_bytes for piece in sifted.pinned)
                    blocks, size_bytes = whole.pieces - len(sifted.pinned), whole.size_bytes - kept_bytes
                    self._departures.add(AGE, bucket.number, blocks, size_bytes)
                await self._rewriting.leave(number, sifted.pinned)

    def _sift(self, number: int) -> _Sifted:
        """In a thread: it may have been packed before it was pinned."""
        pieces = [piece for piece, _ in self._held.index.pieces(number)]
        pinned = [piece for piece in pieces if self._held.is_pinned(piece)]
        return _Sifted(pinned, bool(pieces) and len(pinned) == len(pieces))

    async def _give_up_files(self, bucket: KeptBucket, before_s: int) -> None:
        for number, container in (await self._held.run(self._held.index.containers)).items():
            is_due = container.bucket == bucket.number and container.used_s < before_s
            if is_due and container.is_large and not self._large.is_busy(number):
                await self._give_up_file(bucket, number, before_s)

    async def _give_up_file(self, bucket: KeptBucket, number: int, before_s: int) -> None:
        held = self._held
        pieces = [piece for piece, _ in await held.run(held.index.pieces, number)]
        now = held.index.container(number)  # something may have been written to it meanwhile
        if not pieces or now is None or now.used_s >= before_s or self._large.is_busy(number):
            return
        lot = held.lot_of_piece(pieces[0])
        if lot in bucket.ordinary_lots:
            self._departures.left(AGE, pieces, held.now_s())
            self._large.lose_file(number, lot)
