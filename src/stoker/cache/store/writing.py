"""Writing what was fetched: room first, then the bytes, then the index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from stoker._native import FileProblem, crc32c
from stoker.cache.segments import pages_bytes
from stoker.cache.store.block_writer import Data
from stoker.cache.store.clearing import Clearing
from stoker.cache.store.holdings import Holdings
from stoker.cache.store.known import Known
from stoker.cache.store.large_files import LargeFiles
from stoker.errors import EnvironmentProblem

AT_ONCE_BYTES = 64 * 1024
"""Up to this size the disk is used without a hop to a thread."""
RETRY_S = 5.0


class Writing:
    """Lives on the store's event loop. `problem`: why nothing is stored at the moment; None while it is."""

    def __init__(self, held: Holdings, large: LargeFiles, clearing: Clearing) -> None:
        self._held = held
        self._large = large
        self._clearing = clearing
        self._filling: dict[tuple[int, str, int], int] = {}
        self._running: dict[tuple[int, str, int, int], asyncio.Future[bool]] = {}
        self._retry_at = 0.0
        self.problem: str | None = None

    async def put(
        self, known: Known, block: int, data: Data, *, is_loading: bool = False, is_foreseen: bool = False
    ) -> bool:
        """Store a block. False if it is not stored, for whatever reason. The caller is never cancelled: what is begun
        is written to its end."""
        if known.tag == 0 or (self.problem is not None and self._held.now() < self._retry_at):
            return False
        identity = known.bucket, known.key, known.tag, block
        running = self._running.get(identity)
        if running is not None:
            return await asyncio.shield(running)
        is_packed = known.size_bytes <= self._held.packed_bytes_max
        running = self._running[identity] = asyncio.get_running_loop().create_future()
        is_held = False
        try:
            if is_packed:
                is_held = await self._put_packed(known, data, is_loading, is_foreseen)
            else:
                is_held = await self._put_block(known, block, data, is_loading, is_foreseen)
        finally:
            del self._running[identity]
            running.set_result(is_held)
        return is_held

    async def close(self) -> None:
        """Wait until all is written."""
        while self._running:
            await asyncio.wait(self._running.values())

    def failed(self, problem: Exception) -> None:
        """The disk refused something: nothing is stored for a while. A name that the index does not take is nothing of
        the disk's."""
        if isinstance(problem, FileProblem) and not problem.errno:
            return
        self.problem = str(problem)
        self._retry_at = self._held.now() + RETRY_S

    async def _put_packed(self, known: Known, data: Data, is_loading: bool, is_foreseen: bool) -> bool:
        held, size_bytes = self._held, len(data)
        apart = self._clearing.foreseen.kind_of(known.bucket, known.key)

        def growth_bytes(lot: int) -> int:
            return held.segments.growth_bytes(lot, size_bytes, apart=apart)

        lot = await self._make_room(known, None, growth_bytes, is_loading, is_foreseen)
        if lot is None:
            return False
        held.room.take(lot, growth_bytes(lot))
        placement = held.segments.place(lot, size_bytes, held.now_s(), apart=apart)
        if placement.sealed is not None:
            held.files.finish(placement.sealed)
        try:
            # What does not become held stays charged, as a part of the segment that nobody knows.
            return await self._write(
                known, None, placement.segment, placement.offset, data, is_new=placement.is_new
            )
        finally:
            held.segments.settle(placement.segment)
            if self.problem is not None and held.segments.is_open(placement.segment):
                held.segments.seal_segment(placement.segment)  # its file may be gone, or was never made
                held.files.finish(placement.segment)

    async def _put_block(
        self, known: Known, block: int, data: Data, is_loading: bool, is_foreseen: bool
    ) -> bool:
        held, size_bytes = self._held, len(data)
        lot = await self._make_room(known, block, lambda _: pages_bytes(size_bytes), is_loading, is_foreseen)
        if lot is None:
            return False
        try:
            container, is_new = self._file_of(known)
        except FileProblem as problem:
            self.failed(problem)
            return False
        held.room.take(lot, pages_bytes(size_bytes))
        offset = block * held.block_size_bytes
        self._large.begin_write(lot, container, offset)
        is_held = False
        try:
            is_held = await self._write(known, block, container, offset, data, is_new=is_new)
            if is_held:  # its bucket may have been divided anew meanwhile
                held.room.move(lot, held.lot_of(known.bucket, known.key), pages_bytes(size_bytes))
        finally:
            self._large.end_write(lot, container, offset, size_bytes, is_held=is_held)
            identity = known.bucket, known.key, known.tag
            if self._filling.get(identity) == container and not self._large.is_written(container):
                del self._filling[identity]
        return is_held

    async def _make_room(
        self,
        known: Known,
        block: int | None,
        size_bytes: Callable[[int], int],
        is_loading: bool,
        is_foreseen: bool,
    ) -> int | None:
        """The lot that it is counted in, where so much fits now; None if it does not."""
        held = self._held
        lot = held.lot_of(known.bucket, known.key)
        leaving_bytes = held.files.sending.leaving_bytes()
        if held.room.ask(lot, size_bytes(lot), leaving_bytes, is_loading=is_loading).fits:
            return lot
        # When it is read next is looked up only where something has to leave for it.
        newcomer = self._clearing.foreseen.newcomer(known.bucket, known.key, block, is_foreseen=is_foreseen)
        while True:
            if not await self._clearing.make_room(
                lot, partial(size_bytes, lot), is_loading=is_loading, newcomer=newcomer
            ):
                return None
            before, lot = lot, held.lot_of(known.bucket, known.key)
            if lot == before:  # else it was divided anew meanwhile
                return lot

    async def _write(
        self, known: Known, block: int | None, container: int, offset: int, data: Data, *, is_new: bool
    ) -> bool:
        held = self._held
        try:
            if is_new:  # at once: others may write to it as soon as this one waits
                held.files.create(container)
            if len(data) <= AT_ONCE_BYTES:
                held.files.write(container, offset, data)
                crc = crc32c(data)
            else:
                crc = await held.writer.write(held.files.to_write(container), offset, data)
            if block is not None and self._large.is_doomed(container):
                return False  # what was held of its file has left meanwhile, and the file leaves
            is_held = held.index.hold(
                known.bucket, known.key, known.version, block, container,
                0 if block is not None else offset, crc, held.now_s(),
            )  # fmt: skip
        except (EnvironmentProblem, FileProblem) as problem:
            self.failed(problem)
            return False
        except OSError as error:
            self.failed(held.files.cannot_write(error))
            return False
        self.problem = None
        return is_held

    def _file_of(self, known: Known) -> tuple[int, bool]:
        """The file of a large object's version, and whether it is to be made first."""
        identity = known.bucket, known.key, known.tag
        container = self._filling.get(identity)
        if container is None:
            found = self._held.index.find(known.bucket, known.key)
            if found is not None and found.tag == known.tag and found.container and found.is_large:
                container = found.container
        is_new = container is None or self._large.is_doomed(container)
        if container is None or is_new:
            container = self._held.new_container()
        # Kept while anything is written to it: the index may lose all that it knows of it meanwhile.
        self._filling[identity] = container
        return container, is_new
