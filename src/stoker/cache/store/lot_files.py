"""Large objects' blocks of lots of which chance draws too few.

What leaves is drawn by chance from whole buckets. Of lots that are a small part of theirs there may be nothing among
it: then all files are looked through once, and from then on it is known which are in these lots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from stoker._native import Piece
from stoker.base.rng import Rng
from stoker.cache.room import Lot
from stoker.cache.store.holdings import Holdings
from stoker.cache.store.large_files import LargeFiles
from stoker.cache.store.lots import KeptBucket

T = TypeVar("T")
LOOK_SHARE = 0.01
"""The part of the time that may go into looking through all files."""


class LotFiles:
    """Lives on the store's event loop."""

    def __init__(self, held: Holdings, large: LargeFiles, rng: Rng) -> None:
        self._held = held
        self._large = large
        self._rng = rng
        self._look_from = 0.0
        self._divided: dict[int, list[Lot]] = {}
        """The lots of each bucket that was looked through, as they were then."""

    async def draw(self, lots: Collection[int], count: int) -> list[Piece]:
        """Some of what is held in large files of these lots, drawn by chance."""
        of_lots = self._large.of_lots
        for bucket in self._held.lots.buckets_of(lots):
            await self._know(self._held.lots[bucket], lots)
        files = [container for lot in lots for container in of_lots.get(lot, ())]
        picked = self._some(files, count)
        found = await self._held.run(self._pieces, picked)
        for container, pieces in zip(picked, found, strict=True):
            if not pieces and not self._large.is_written(container):
                self._large.forget_lot(container)
        drawn = [piece for pieces in found for piece in pieces]
        if not drawn:  # they are looked for anew, when there is time to
            for lot in lots:
                of_lots.pop(lot, None)
        return self._some(drawn, count)

    async def _know(self, bucket: KeptBucket, lots: Collection[int]) -> None:
        """Know the files of those of these lots that are the bucket's, as far as there is time to look for them."""
        held, of_lots, divided = self._held, self._large.of_lots, bucket.lots
        if self._divided.get(bucket.number) is not divided:
            for lot in [lot for lot in of_lots if held.lots.bucket_of(lot) == bucket.number]:
                del of_lots[lot]
            self._divided[bucket.number] = divided
        new = {lot.number for lot in divided if lot.number in lots and lot.number not in of_lots}
        began = held.now()
        if not new or began < self._look_from:
            return
        of_lots.update({lot: set() for lot in new})  # what comes meanwhile is known as well
        found = await held.run(self._look, KeptBucket(bucket.name, bucket.number, divided), new)
        now = held.now()
        self._look_from = now + (now - began) * (1 / LOOK_SHARE - 1)
        if bucket.lots is divided:  # else it was divided anew meanwhile
            for container, lot in found:
                of_lots[lot].add(container)

    def _look(self, bucket: KeptBucket, lots: Collection[int]) -> list[tuple[int, int]]:
        """In a thread: the files of these lots."""
        keys = self._held.index.container_keys()
        return [
            (number, lot)
            for number, container in self._held.index.containers().items()
            if container.is_large and container.bucket == bucket.number
            if (lot := bucket.lot_of(keys.get(number, "")).number) in lots
        ]

    def _pieces(self, containers: Iterable[int]) -> list[list[Piece]]:
        """In a thread: there may be many of each."""
        return [[piece for piece, _ in self._held.index.pieces(container)] for container in containers]

    def _some(self, items: Sequence[T], count: int) -> list[T]:
        if len(items) <= count:
            return list(items)
        return [items[at] for at in {self._rng.below(len(items)) for _ in range(count)}]
