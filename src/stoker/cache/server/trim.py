"""Giving up copies that the fleet has beyond what a bucket allows.

While a server is away, others own and hold what is its. When it is back with what it held, there are more copies than
`max_replicas`: those who are not to hold a block give it up, once each of those who are says that it does. What was
fetched because it is read of this server soon stays until it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import aclosing

from stoker._native import FileProblem, Found, Name, Piece
from stoker.base.rng import Rng
from stoker.cache.layout import block_count
from stoker.cache.maglev import block_owner_name
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.peers import Block
from stoker.cache.store.departures import COPIES
from stoker.cache.store.known import is_held
from stoker.errors import CacheUnavailable, StokerError

log = logging.getLogger("stoker.cache")
AFTER_S = 5.0
LATER_S_MAX = 5.0
"""Up to so much later, by chance: all servers hear of a change at the same time."""
EVERY_S = 300.0
PAUSE_S = 0.02
BLOCKS_AT_ONCE = 500
_BLOCKS_PER_TURN = 256
"""So many blocks are sorted before others have their turn."""


class Trim:
    """Runs some seconds after each change of the fleet, and now and then: it takes its time."""

    def __init__(self, engine: Engine, rng: Rng, after_s: float = AFTER_S) -> None:
        self._engine = engine
        self._rng = rng
        self._sorted_blocks = 0
        self._after_s = after_s
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.trimmed_blocks = 0
        engine.fleet.on_change = self._changed.set

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            await asyncio.sleep(self._after_s + self._rng.uniform(0, LATER_S_MAX))
            if self._engine.fleet.is_alone:
                continue
            for bucket in list(self._engine.buckets.values()):
                if bucket.spec.max_replicas:
                    try:
                        await self.trim(bucket)
                    except StokerError as error:
                        log.info("copies of %s cannot be counted now: %s", bucket.name, error)
                    except Exception:
                        # A defect here, or nonsense of another server, must not end it.
                        log.exception("counting copies of %s failed", bucket.name)

    async def trim(self, bucket: Bucket) -> None:
        """Give up what others are to hold, and do."""
        async with aclosing(self._engine.store.names(bucket.number, "")) as pages:
            async for names in pages:
                asked: dict[tuple[str, ...], list[Block]] = defaultdict(list)
                for name in names:
                    if name.container:
                        await self._sort(bucket, name, asked)
                for keepers, blocks in asked.items():
                    for first in range(0, len(blocks), BLOCKS_AT_ONCE):
                        await self._give_up(bucket, keepers, blocks[first : first + BLOCKS_AT_ONCE])
                await asyncio.sleep(PAUSE_S)

    async def _sort(self, bucket: Bucket, name: Name, asked: dict[tuple[str, ...], list[Block]]) -> None:
        """Blocks that are here and belong to others, by whom they belong to."""
        engine = self._engine
        found = self._find(bucket, name)
        if found is None:
            return
        for index in range(block_count(name.size_bytes, engine.block_size_bytes)):
            self._sorted_blocks += 1
            if self._sorted_blocks % _BLOCKS_PER_TURN == 0:
                await asyncio.sleep(0)
            if not is_held(found, index):
                continue
            owner_name = block_owner_name(bucket.name, name.key, index)
            owners = engine.fleet.view.placement().owners(owner_name, bucket.spec.max_replicas)
            keepers = tuple(owner.name for owner in owners)
            if keepers and engine.fleet.me.name not in keepers:
                asked[keepers].append((name.key, name.version, index))

    def _find(self, bucket: Bucket, name: Name) -> Found | None:
        """What is here of an object, if it still is that version."""
        try:
            found = self._engine.store.index.find(bucket.number, name.key, True)
        except FileProblem:
            return None
        return found if found is not None and found.version == name.version and found.container else None

    async def _give_up(self, bucket: Bucket, keepers: tuple[str, ...], blocks: list[Block]) -> None:
        fleet, store = self._engine.fleet, self._engine.store
        blocks = await self._not_to_come(bucket, blocks)
        held = [True] * len(blocks)
        for keeper in keepers if blocks else ():
            url = fleet.url(keeper)
            try:
                if url is None:
                    return
                said = (await fleet.peers.held(url, bucket.name, blocks)).held
            except CacheUnavailable as error:
                fleet.lost(keeper, error)
                return
            held = [both and one for both, one in zip(held, said, strict=True)]
        for (key, version, index), is_elsewhere in zip(blocks, held, strict=True):
            piece = self._piece(bucket, key, version, index) if is_elsewhere else None
            if piece is not None:
                store.clearing.lose(piece, COPIES)
                self.trimmed_blocks += 1

    async def _not_to_come(self, bucket: Bucket, blocks: list[Block]) -> list[Block]:
        """Those that are still here, and that nobody has announced to read of this server soon."""
        pieces = {block: piece for block in blocks if (piece := self._piece(bucket, *block)) is not None}
        are_to_come = await self._engine.store.clearing.foreseen.are_to_come(list(pieces.values()))
        return [block for block, is_to_come in zip(pieces, are_to_come, strict=True) if not is_to_come]

    def _piece(self, bucket: Bucket, key: str, version: str, index: int) -> Piece | None:
        store = self._engine.store
        known = store.find(bucket.number, key)
        return None if known is None or known.version != version else store.held(known, index)
