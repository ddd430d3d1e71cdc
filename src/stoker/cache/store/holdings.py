"""What is held, in which files, and what it takes of the limit: the state that the parts of a store share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from stoker._native import FileProblem, Found, Piece
from stoker.base.clock import Clock
from stoker.cache.coming import ComingReads
from stoker.cache.layout import block_count
from stoker.cache.room import Lot, Room
from stoker.cache.segments import Segments, pages_bytes, segment_bytes_for, spare_bytes_for
from stoker.cache.store.block_writer import BlockWriter
from stoker.cache.store.containers import ContainerFiles
from stoker.cache.store.known import is_held
from stoker.cache.store.lots import KeptBucket, Lots
from stoker.cache.store.opening import blocks_bytes, open_index, reconcile
from stoker.errors import EnvironmentProblem

T = TypeVar("T")
THREADS = 8
PACKED_BYTES_MAX = 1024 * 1024
"""Objects up to this size are packed into segments; larger ones have a file of their own for each version."""


class Holdings:
    """Opening it takes the folder's lock and removes what a killed server left over; it touches no block.

    Raises EnvironmentProblem if the folder cannot be used or another server uses it.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        block_size_bytes: int,
        clock: Clock,
        open_files: Callable[[Path], ContainerFiles] = ContainerFiles,
    ) -> None:
        self.notes: list[str] = []
        self.coming: dict[int, ComingReads] = {}
        """By the numbers of buckets, where any are known."""
        self.block_size_bytes = block_size_bytes
        self._clock = clock
        self._threads = ThreadPoolExecutor(THREADS, "stoker-cache-disk")
        self.writer = BlockWriter()
        self._wall_offset_s = clock.wall() - clock.now()
        self.files = open_files(folder)
        try:
            self.index = open_index(folder, block_size_bytes, self.now_s(), self.notes)
            held = reconcile(self.index, self.files, block_size_bytes)
        except BaseException:
            self.files.close()
            raise
        self._next_container = self.index.container_max() + 1
        segment_bytes = segment_bytes_for(limit_bytes)
        self.packed_bytes_max = min(PACKED_BYTES_MAX, segment_bytes, block_size_bytes)
        self.room = Room(limit_bytes, spare_bytes_for(limit_bytes))
        self.segments = Segments(segment_bytes, self.new_container)
        self.lots = Lots(self.index, self.room)
        for number, (container, size_bytes) in sorted(
            held.segments.items(), key=lambda item: item[1][0].used_s
        ):
            lot = self.lots[container.bucket].lots[0].number
            self.room.take(lot, size_bytes)
            self.segments.adopt(number, lot, size_bytes, container.used_s)
        for bucket, size_bytes in held.large_bytes.items():
            self.room.take(self.lots[bucket].lots[0].number, size_bytes)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Use the disk in a thread of the store's own: origins that hang take none of them."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        """Let go of the folder, after all that was begun has ended."""
        self._threads.shutdown()
        self.files.close()

    def set_coming(self, bucket: KeptBucket, coming: ComingReads | None) -> None:
        """What is read next of a bucket is known from now on, or no more. What it holds may be replaced by what is read
        sooner, also where nothing is otherwise."""
        if coming is None:
            self.coming.pop(bucket.number, None)
        else:
            self.coming[bucket.number] = coming
        self.room.set_foreseen(bucket.name, is_foreseen=coming is not None)

    def now_s(self) -> int:
        """Seconds since 1970 as the index counts them: they go on evenly, whatever is done to the machine's clock."""
        return int(self._clock.now() + self._wall_offset_s)

    def now(self) -> float:
        """The clock's seconds."""
        return self._clock.now()

    def new_container(self) -> int:
        """A number that was never used."""
        number = self._next_container
        self._next_container += 1
        return number

    def lot_of(self, bucket: int, key: str) -> int:
        """The number of the lot that a key is counted in."""
        return self.lots[bucket].lot_of(key).number

    def lot_of_piece(self, piece: Piece) -> int:
        """The number of the lot that a piece is counted in."""
        bucket = self.lots[piece.bucket]
        if not bucket.has_rules:
            return bucket.lots[0].number
        key = ""
        with suppress(FileProblem):
            key = self.index.key_of(piece)
        return bucket.lot_of(key).number

    def is_pinned(self, piece: Piece) -> bool:
        """Whether a rule that the bucket has now pins it."""
        return self.lots[piece.bucket].has_rules and self.room.lot(self.lot_of_piece(piece)).is_pinned

    def charge_bytes(self, found: Found) -> int:
        """What the blocks of a large object take that are held; `found` is with its blocks."""
        return sum(pages_bytes(size_bytes) for size_bytes in self.held_sizes(found))

    def held_sizes(self, found: Found) -> list[int]:
        """How many bytes each block of a large object has that is held; `found` is with its blocks."""
        size = self.block_size_bytes
        held = (n for n in range(block_count(found.size_bytes, size)) if is_held(found, n))
        return [min(size, found.size_bytes - n * size) for n in held]

    def open_bucket(self, name: str, origin: str) -> int:
        """A bucket's number in the index. What is held of another origin under its name is given up.

        Raises EnvironmentProblem.
        """
        known = self.index.buckets().get(name)
        if known is not None and known[1] != origin:
            self._clear(self.lots[known[0]])
        try:
            return self.index.bucket(name, origin)
        except FileProblem as problem:
            raise EnvironmentProblem(f"cannot write to the cache index: {problem.strerror}") from problem

    def divide(self, bucket: KeptBucket, before: Iterable[Lot]) -> None:
        """Count what a bucket holds in the lots that it has now; `before`: those that it was counted in. What is being
        written, or waits to leave, stays in the lot in which its room was taken."""
        old = KeptBucket(bucket.name, bucket.number, list(before))
        if not old.lots or (not old.has_rules and not bucket.has_rules):
            return
        keys = self.index.container_keys()
        for number, container in self.index.containers().items():
            if container.bucket != bucket.number:
                continue
            key = keys.get(number, "")
            lot = bucket.lot_of(key).number
            if number in self.segments:
                was, size_bytes = self.segments.lot_of(number), self.segments.bytes_of(number)
                self.segments.set_lot(number, lot)
            else:
                was, size_bytes = old.lot_of(key).number, blocks_bytes(container, self.block_size_bytes)
            self.room.move(was, lot, size_bytes)
        kept = {lot.number for lot in bucket.lots}
        for number in self.segments.of_lots(lot.number for lot in old.lots if lot.number not in kept):
            # The index does not know what is in it: it is only now being written, or nothing is.
            was, first = self.segments.lot_of(number), bucket.lots[0].number
            self.segments.set_lot(number, first)
            self.room.move(was, first, self.segments.bytes_of(number))

    def drop_segment(self, number: int) -> None:
        """Give up a whole segment, of which the index knows nothing any more."""
        lot, size_bytes = self.segments.lot_of(number), self.segments.remove(number)
        self.files.unlink(number, size_bytes)
        self.room.give(lot, size_bytes)

    def drop_file(self, number: int, charges: Mapping[int, int]) -> None:
        """Give up a large object's file, of which the index knows nothing any more. `charges`: what is counted for it,
        by lot."""
        self.files.unlink(number, sum(charges.values()))
        for lot, size_bytes in charges.items():
            self.room.give(lot, size_bytes)

    def _clear(self, bucket: KeptBucket) -> None:
        keys = self.index.container_keys() if bucket.has_rules else {}
        held = {n: c for n, c in self.index.containers().items() if c.bucket == bucket.number}
        self.index.clear(bucket.number)
        lots = {lot.number for lot in bucket.lots}
        for number in self.segments.of_lots(lots):
            self.drop_segment(number)
        for number, container in held.items():
            if container.is_large:
                lot = bucket.lot_of(keys.get(number, "")).number
                self.drop_file(number, {lot: blocks_bytes(container, self.block_size_bytes)})
