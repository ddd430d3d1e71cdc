"""The shelf: a store driven by the residency and eviction cores. Lives on one event loop."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable

from stoker.base.clock import Clock
from stoker.cache.block import Residency
from stoker.cache.evict import Evictor
from stoker.cache.layout import BlockId
from stoker.cache.store.port import Folder, OpenFile, Store
from stoker.errors import CorruptBlock, EnvironmentProblem

HOT_BLOCK_BYTES_MAX = 64 * 1024
"""Blocks up to this size may be kept in memory as well, and are written without a hop to a thread."""

_RETRY_S = 5.0


class Held:
    """A block that is here.

    `hot` are its bytes where they are also in memory; `path_frame` is how a server tells of its file, once it did.
    """

    __slots__ = ("block", "crc", "hot", "is_verified", "path_frame", "recently_used", "size_bytes")

    def __init__(self, block: BlockId, size_bytes: int, crc: int, is_verified: bool) -> None:
        self.block = block
        self.size_bytes = size_bytes
        self.crc = crc
        self.is_verified = is_verified
        self.hot: bytes | None = None
        self.path_frame: bytes | None = None
        self.recently_used = False


class Shelf:
    """All blocks of one server. `policy_of` gives a bucket's eviction policy."""

    def __init__(
        self,
        store: Store,
        limit_bytes: int,
        hot_bytes_max: int,
        policy_of: Callable[[str], str],
        clock: Clock,
    ) -> None:
        self._store = store
        self._residency: Residency[BlockId] = Residency(limit_bytes)
        self._evictor: Evictor[BlockId] = Evictor()
        self._held: dict[BlockId, Held] = {}
        # Discarded while they were being served: they leave with their last reader.
        self._doomed: set[BlockId] = set()
        self._hot: deque[Held] = deque()
        self._hot_bytes = 0
        self._hot_bytes_max = hot_bytes_max
        self._policy_of = policy_of
        self._clock = clock
        self._problem: str | None = None
        self._retry_at = 0.0

    @property
    def held_bytes(self) -> int:
        """What the held blocks take of the limit, with those being written."""
        return self._residency.held_bytes + self._residency.reserved_bytes

    @property
    def limit_bytes(self) -> int:
        """The hard limit."""
        return self._residency.limit_bytes

    @property
    def problem(self) -> str | None:
        """Why new blocks are not stored at the moment; None while they are."""
        return self._problem or self._store.problem()

    def __len__(self) -> int:
        return len(self._held)

    def held_by_bucket(self) -> dict[str, tuple[int, int]]:
        """Blocks and bytes held of each bucket."""
        found: dict[str, tuple[int, int]] = {}
        for block in self._held:
            blocks, size_bytes = found.get(block.bucket, (0, 0))
            found[block.bucket] = blocks + 1, size_bytes + self._residency.size_bytes(block)
        return found

    def adopt(self, block: BlockId, size_bytes: int, crc: int) -> None:
        """Take in a block that the store brought from before. Its bytes are checked when first served."""
        charge_bytes = self._store.charge_bytes(size_bytes)
        if block in self._residency:
            return
        verdict = self._evictor.make_room(
            charge_bytes, self._residency.free_bytes, "lru", self._residency.is_pinned
        )
        # The limit may be smaller than it was: the oldest blocks leave, whatever their policy.
        for victim in verdict.victims:
            self.discard(victim)
        if not self._residency.reserve(block, charge_bytes):
            self._store.delete(block)
            return
        self._publish(Held(block, size_bytes, crc, is_verified=False))

    def find(self, block: BlockId) -> Held | None:
        """The block if it is here; counts as a use."""
        held = self._held.get(block)
        if self._doomed and block in self._doomed:
            return None
        if held is not None:
            held.recently_used = True
            self._evictor.on_hit(block)
        return held

    def bytes_of(self, held: Held) -> bytes:
        """All bytes of a held block, verified. For small blocks: it reads where it stands.

        Raises CorruptBlock, after the block was discarded.
        """
        if held.hot is not None:
            return held.hot
        data = self._read_checked(held, 0, held.size_bytes)
        if held.size_bytes <= HOT_BLOCK_BYTES_MAX:
            self._keep_hot(held, data)
        return data

    def doubt(self, block: BlockId) -> None:
        """Have a block checked again before it is served from its file."""
        held = self._held.get(block)
        if held is not None:
            held.is_verified = False

    async def verify(self, held: Held) -> None:
        """Check a block from before this server's time, once. Raises CorruptBlock, after it was discarded."""
        if held.is_verified:
            return
        self.pin(held)
        try:
            data = await asyncio.to_thread(self._store.read, held.block, 0, held.size_bytes)
            is_right = zlib.crc32(data) == held.crc
        except CorruptBlock:
            is_right = False
        finally:
            self.unpin(held)
        if not is_right:
            self.discard(held.block)
            raise CorruptBlock(f"{held.block} does not match its checksum")
        held.is_verified = True

    def file_of(self, held: Held) -> OpenFile | None:
        """A descriptor to send a verified block from. Raises CorruptBlock, after it was discarded."""
        try:
            return self._store.open(held.block)
        except CorruptBlock:
            self.discard(held.block)
            raise

    @property
    def folder(self) -> Folder | None:
        """The folder that `path_of` starts from; None where there are no files."""
        return self._store.folder()

    def path_of(self, held: Held) -> bytes:
        """The file of a verified block, for a reader who can bear that it leaves at any time."""
        return self._store.path_of(held.block)

    def pin(self, held: Held) -> None:
        """Keep it until the matching `unpin`."""
        self._residency.pin(held.block)

    def unpin(self, held: Held) -> None:
        """One use less."""
        self._residency.unpin(held.block)
        if self._doomed and held.block in self._doomed:
            self.discard(held.block)

    async def put(self, block: BlockId, data: bytes) -> Held | None:
        """Store a block that was fetched. None if it is not stored, for whatever reason; never raises."""
        if block in self._residency or (self._problem is not None and self._clock.now() < self._retry_at):
            return self._held.get(block)
        policy = self._policy_of(block.bucket)
        charge_bytes = self._store.charge_bytes(len(data))
        verdict = self._evictor.make_room(
            charge_bytes, self._residency.free_bytes, policy, self._residency.is_pinned
        )
        for victim in verdict.victims:
            self.discard(victim)
        if verdict.refused or not self._residency.reserve(block, charge_bytes):
            return None
        held = Held(block, len(data), zlib.crc32(data), is_verified=True)
        if len(data) <= HOT_BLOCK_BYTES_MAX:
            try:
                self._store.write(block, data, held.crc)
            except EnvironmentProblem as error:
                return self._written(held, error)
            self._keep_hot(held, data)
            return self._written(held, None)
        writing = asyncio.ensure_future(asyncio.to_thread(self._store.write, block, data, held.crc))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The thread goes on; the reservation is settled when it is done.
            writing.add_done_callback(lambda done: self._settle(held, done))
            raise
        except EnvironmentProblem as error:
            return self._written(held, error)
        return self._written(held, None)

    def discard(self, block: BlockId) -> bool:
        """Forget a block, at the latest when it is served no more. False if it is not gone yet, or not here."""
        held = self._held.get(block)
        if held is None:
            return False
        if self._residency.is_pinned(block):
            self._doomed.add(block)
            return False
        self._doomed.discard(block)
        del self._held[block]
        self._residency.evict(block)
        self._evictor.on_gone(block)
        if held.hot is not None:
            self._hot_bytes -= held.size_bytes
            held.hot = None
        self._store.delete(block)
        return True

    def _settle(self, held: Held, done: asyncio.Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        self._written(held, error if isinstance(error, EnvironmentProblem) else None)

    def _written(self, held: Held, error: EnvironmentProblem | None) -> Held | None:
        if error is None:
            self._problem = None
            self._publish(held)
            return held
        self._residency.abandon(held.block)
        self._problem = str(error)
        self._retry_at = self._clock.now() + _RETRY_S
        return None

    def _publish(self, held: Held) -> None:
        self._residency.fill(held.block)
        self._held[held.block] = held
        self._evictor.on_fill(
            held.block, self._residency.size_bytes(held.block), self._policy_of(held.block.bucket)
        )

    def _read_checked(self, held: Held, start: int, stop: int) -> bytes:
        try:
            data = self._store.read(held.block, start, stop)
        except CorruptBlock:
            self.discard(held.block)
            raise
        if zlib.crc32(data) != held.crc:
            self.discard(held.block)
            raise CorruptBlock(f"{held.block} does not match its checksum")
        held.is_verified = True
        return data

    def _keep_hot(self, held: Held, data: bytes) -> None:
        """Second chance (clock): what was used since it was last looked at stays for another round."""
        if held.size_bytes > self._hot_bytes_max:
            return
        while self._hot and self._hot[0].hot is None:
            self._hot.popleft()
        held.hot = data
        self._hot.append(held)
        self._hot_bytes += held.size_bytes
        while self._hot_bytes > self._hot_bytes_max:
            oldest = self._hot.popleft()
            if oldest.hot is None:
                continue
            if oldest.recently_used:
                oldest.recently_used = False
                self._hot.append(oldest)
            else:
                oldest.hot = None
                self._hot_bytes -= oldest.size_bytes
