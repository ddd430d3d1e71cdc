"""What one server knows and holds: small objects packed into segments, a sparse file for each version of a large one.

Lives on one event loop; files are written and read in threads. The native index is the only truth about what is held. A
write takes its room first, then writes, then says so in the index: who is killed in between leaves bytes that nobody
knows, which the next start removes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from stoker._native import FileProblem, Found, Name, Piece, crc32c
from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.evict import LRU
from stoker.cache.store.attributes import told_anew
from stoker.cache.store.block_writer import Data
from stoker.cache.store.clearing import Clearing
from stoker.cache.store.containers import ContainerFiles
from stoker.cache.store.departures import OPERATOR
from stoker.cache.store.holdings import Holdings
from stoker.cache.store.known import Known, is_held
from stoker.cache.store.large_files import LargeFiles
from stoker.cache.store.lots import KeptBucket, PrefixRule
from stoker.cache.store.writing import AT_ONCE_BYTES, Writing
from stoker.errors import CorruptBlock, EnvironmentProblem

log = logging.getLogger("stoker.cache")
UPKEEP_EVERY_S = 1.0
ABSENT_EVERY_S = 600.0
ABSENT_KEPT_S = 3600
NAMES_AT_ONCE = 500


class Store:
    """Raises EnvironmentProblem if the folder cannot be used or another server uses it. `notes` are for operators."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        block_size_bytes: int,
        clock: Clock,
        rng: Rng,
        open_files: Callable[[Path], ContainerFiles] = ContainerFiles,
    ) -> None:
        self.holdings = held = Holdings(folder, limit_bytes, block_size_bytes, clock, open_files)
        self.notes = held.notes
        self.index = held.index
        self.files = held.files
        self.room = held.room
        self.large_files = LargeFiles(held)
        self.clearing = Clearing(held, self.large_files, rng)
        self._writing = Writing(held, self.large_files, self.clearing)
        self._upkeep: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._forget_absent_at = 0.0

    async def start(self) -> None:
        """Keep to the limit, which may be lower than it was, and keep order from now on."""
        await self.clearing.shrink()
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_order())

    async def close(self) -> None:
        """Make all durable and let go."""
        self._stopping.set()
        if self._upkeep is not None:
            await self._upkeep
        await self._writing.close()
        with suppress(FileProblem):
            await self.holdings.run(self.index.sync)
        self.large_files.readers.close()
        self.holdings.close()

    def now_s(self) -> int:
        """Seconds since 1970, as the index counts them."""
        return self.holdings.now_s()

    @property
    def problem(self) -> str | None:
        """Why new blocks are not stored at the moment; None while they are."""
        return self._writing.problem

    def open_bucket(
        self,
        name: str,
        origin: str,
        *,
        policy: str = LRU,
        quota_bytes: int = 0,
        evict_after_s: float = 0.0,
        rules: Sequence[PrefixRule] = (),
    ) -> KeptBucket:
        """Open a bucket, or change what it may keep. What is held of another origin under its name is given up.

        Raises EnvironmentProblem, and ValueError for too many rules.
        """
        number = self.holdings.open_bucket(name, origin)
        lots = self.holdings.lots
        before = lots[number].lots if number in lots else []
        bucket = lots.set_bucket(
            name, number, policy=policy, quota_bytes=quota_bytes, evict_after_s=evict_after_s, rules=rules
        )
        self.holdings.divide(bucket, before)
        return bucket

    def find(self, bucket: int, key: str) -> Known | None:
        """What is known about an object, however old."""
        try:
            found = self.index.find(bucket, key)
        except FileProblem:
            return None  # its name cannot be read: the origin is asked
        return None if found is None else known_of(bucket, key, found)

    def learn(
        self,
        bucket: int,
        key: str,
        version: str,
        size_bytes: int,
        *,
        is_absent: bool = False,
        checked_s: int | None = None,
        attributes: str = "",
        stays_true: bool = False,
    ) -> Known:
        """Take in what the origin says. What is held of another version is given up, also if this cannot be written
        down, unless it `stays_true`.

        What is told besides of a version that is known already replaces what was told before. What the index cannot
        write down is served, and asked for again next time.
        """
        checked_s = self.now_s() if checked_s is None else checked_s
        before = None
        try:
            before = self.index.find(bucket, key, True)
            if before is not None and before.version == version:
                attributes = told_anew(attributes, before.attributes)
            is_new = self.index.learn(
                bucket, key, version, size_bytes, is_absent, checked_s, attributes, stays_true
            )
            if is_new and before is not None:
                self._release(bucket, key, before)
            found = self.index.find(bucket, key)
        except FileProblem as problem:
            self._writing.failed(problem)
            found = None
            if before is not None and not self._is_known(bucket, key):
                self._release(bucket, key, before)  # it was given up: what it was is not true any more
        if found is None or found.version != version:
            return Known(bucket, key, version, size_bytes, 0, checked_s, is_absent, attributes)
        return known_of(bucket, key, found)

    async def forget_absent(self) -> int:
        """Remember no longer of names that were asked for long ago that there is no such object: they are without end.
        How many those were."""
        return await self.holdings.run(self.index.forget_absent, self.now_s() - ABSENT_KEPT_S)

    def forget(self, bucket: int, key: str) -> bool:
        """Know nothing of an object any more; whether anything was known."""
        before = None
        with suppress(FileProblem):
            before = self.index.find(bucket, key, True)
        was_known = self.index.forget(bucket, key)
        if was_known and before is not None:
            self._release(bucket, key, before)
        return was_known

    async def refresh(self, bucket: int, prefix: str) -> int:
        """Have the origin asked before anything under the prefix is served again; how many keys that are."""
        return await self.holdings.run(self.index.refresh, bucket, prefix)

    async def doubt(self, container: int) -> None:
        """Have what is held of a container verified before it is served again."""
        await self.holdings.run(self.index.doubt, container)

    def held(self, known: Known, block: int) -> Piece | None:
        """Where a block is, if it is here; counts as a use. It may have to be verified."""
        return self.index.held(known.bucket, known.key, known.tag, block, self.now_s())

    def has(self, known: Known, block: int) -> bool:
        """Whether a block is here, which does not count as a use."""
        try:
            found = self.index.find(known.bucket, known.key, True)
        except FileProblem:
            return False
        return found is not None and found.tag == known.tag and is_held(found, block)

    def holds(self, bucket: int, key: str, version: str, block: int) -> bool:
        """Whether a block of that version is here, which does not count as a use."""
        known = self.find(bucket, key)
        return known is not None and known.version == version and block >= 0 and self.has(known, block)

    async def verified(self, known: Known, block: int) -> Piece | None:
        """A block that is here and right. One that was not looked at since the start is read first, and is given up
        where it does not match its checksum."""
        piece = self.held(known, block)
        if piece is None or piece.is_verified:
            return piece
        try:
            await self.read(piece)
        except (CorruptBlock, EnvironmentProblem):
            return None
        self.index.verified(known.bucket, known.key, piece.block, piece.container)
        return self.held(known, block)

    async def read(self, piece: Piece) -> bytes:
        """All bytes of a piece. Raises CorruptBlock, after it was given up, if they are not what was written;
        EnvironmentProblem if they cannot be read now."""
        if piece.size_bytes <= AT_ONCE_BYTES:
            data = self._read(piece)
        else:
            data = await self.holdings.run(self._read, piece)
        if data is None:
            self.clearing.lose(piece)
            raise CorruptBlock(f"a block in container {piece.container} does not match its checksum")
        return data

    async def put(
        self, known: Known, block: int, data: Data, *, is_loading: bool = False, is_foreseen: bool = False
    ) -> bool:
        """Store a block that was fetched; False if it is not stored, for whatever reason. `is_loading`: nobody waits
        for it, and nothing of another bucket leaves for it. `is_foreseen`: it is read soon."""
        if self.has(known, block):
            return True
        return await self._writing.put(known, block, data, is_loading=is_loading, is_foreseen=is_foreseen)

    async def names(self, bucket: int, prefix: str) -> AsyncGenerator[list[Name], None]:
        """All objects that are known under a prefix, in no order, some hundred at a time."""
        cursor = 0
        while True:
            found, cursor = await self.holdings.run(self.index.scan, bucket, prefix, cursor, NAMES_AT_ONCE)
            yield found
            if not cursor:
                return

    def give_up(self, bucket: int, key: str) -> tuple[int, int]:
        """Hold nothing of an object any more; how many blocks, and bytes, that were."""
        try:
            found = self.index.find(bucket, key, True)
        except FileProblem:
            return 0, 0
        if found is None or not found.container:
            return 0, 0
        if not found.is_large:
            known = known_of(bucket, key, found)
            piece = self.index.held(bucket, key, known.tag, 0, self.now_s())
            if piece is None or not self.index.lose(piece):
                return 0, 0
            self.clearing.departures.add(OPERATOR, bucket, 1, found.size_bytes)
            return 1, found.size_bytes
        sizes = self.holdings.held_sizes(found)
        self.clearing.departures.add(OPERATOR, bucket, len(sizes), sum(sizes))
        self.large_files.lose_file(found.container, self.holdings.lot_of(bucket, key))
        return len(sizes), sum(sizes)

    def _read(self, piece: Piece) -> bytes | None:
        try:
            data = self.files.read(piece.container, piece.offset, piece.size_bytes)
        except CorruptBlock:
            return None
        return data if crc32c(data) == piece.crc else None

    def _is_known(self, bucket: int, key: str) -> bool:
        try:
            return self.index.find(bucket, key) is not None
        except FileProblem:
            return True

    def _release(self, bucket: int, key: str, before: Found) -> None:
        """What was held of a version that is no more. Packed, its bytes stay until the segment is written anew."""
        if before.container and before.is_large:
            lot = self.holdings.lot_of(bucket, key)
            self.large_files.release(lot, before.container, self.holdings.charge_bytes(before))

    async def _keep_order(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(UPKEEP_EVERY_S):
                    await self._stopping.wait()
            except TimeoutError:
                pass
            else:
                return
            try:
                await self._upkeep_round()
            except (FileProblem, EnvironmentProblem) as error:
                log.warning("the cache's folder cannot be kept in order now: %s", error)
            except Exception:
                # A defect here must not end the upkeep: the next round may not meet it.
                log.exception("the upkeep of the cache's folder failed")

    async def _upkeep_round(self) -> None:
        self.large_files.mend()
        await self.clearing.give_up_old()
        while not self._stopping.is_set() and await self.clearing.rewrite_sparse():
            pass
        if self.holdings.now() >= self._forget_absent_at:
            self._forget_absent_at = self.holdings.now() + ABSENT_EVERY_S
            await self.forget_absent()
        await self.holdings.run(self.index.compact)


def known_of(bucket: int, key: str, found: Found) -> Known:
    """What the index has found of a key."""
    return Known(
        bucket,
        key,
        found.version,
        found.size_bytes,
        found.tag,
        found.checked_s,
        found.is_absent,
        found.attributes,
    )
