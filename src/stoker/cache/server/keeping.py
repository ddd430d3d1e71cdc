"""What operators do to what is held: have it loaded, given up, or pinned."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from stoker.cache.layout import block_bounds, block_count
from stoker.cache.maglev import block_owner_name
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.peers import Block
from stoker.cache.server.written import read_file, write_file
from stoker.cache.store.known import Known
from stoker.errors import CacheUnavailable, ConfigError, EnvironmentProblem, StokerError
from stoker.wire.cache_api import (
    BEGUN,
    FAILED,
    HELD,
    LOADED,
    PASSED,
    Evicted,
    HeldAnswer,
    HeldObject,
    LoadItem,
    Pins,
)

log = logging.getLogger("stoker.cache")
PINS_FILE = "pins.json"
LOADS_MAX = 32
BEGUN_MAX = 256
LOAD_AGE_S_MAX = 7 * 86400
"""What a load has brought before that may leave for the rest of it."""
_BLOCKS_PER_TURN = 256
"""So many blocks are placed before others have their turn."""
_BLOCKS_AT_ONCE = 64


_Load = tuple[str, tuple[str, ...], int]


class Keeping:
    """For one engine. What is pinned is written down in the cache's folder."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._path = folder / PINS_FILE
        self._turns = asyncio.Semaphore(LOADS_MAX)
        self._begun: dict[_Load, asyncio.Task[list[LoadItem]]] = {}

    def restore(self) -> None:
        """Pin what was pinned. What cannot be read pins nothing, and is said."""
        pins = read_file(self._path, dict[str, list[str]], self._engine.store.notes, "nothing is pinned")
        for name, prefixes in (pins or {}).items():
            bucket = self._engine.buckets.get(name)
            if bucket is not None:
                bucket.pins = set(prefixes)
                self._engine.apply_rules(bucket)

    async def evict(self, bucket: Bucket, prefix: str) -> Evicted:
        """Give up what this server holds under a prefix, pinned or not."""
        blocks = size_bytes = 0
        async with aclosing(self._engine.store.names(bucket.number, prefix)) as pages:
            async for names in pages:
                for name in names:
                    if name.container:
                        lost_blocks, lost_bytes = self._engine.store.give_up(bucket.number, name.key)
                        blocks += lost_blocks
                        size_bytes += lost_bytes
        return Evicted(blocks, size_bytes)

    def pin(self, bucket: Bucket, prefix: str, *, is_pinned: bool) -> Pins:
        """Keep what lies under a prefix from being evicted, or no longer. Raises ConfigError, EnvironmentProblem."""
        if not prefix:
            raise ConfigError(f"say what to pin of {bucket.name!r}: a prefix that is not empty")
        before = set(bucket.pins)
        if is_pinned:
            bucket.pins.add(prefix)
        else:
            bucket.pins.discard(prefix)
        try:
            self._engine.apply_rules(bucket)
            self._write()
        except StokerError:
            bucket.pins = before
            self._engine.apply_rules(bucket)
            raise
        return Pins(sorted(bucket.pins))

    async def load(
        self, bucket: Bucket, keys: Sequence[str], replicas: int, age_s: int = 0
    ) -> list[LoadItem]:
        """Have objects held where they belong in the fleet, in the order of the keys, for a load that is so old.

        Raises ConfigError if it is to be more servers than the bucket allows: those beyond would give it up again.
        """
        allowed = bucket.spec.max_replicas
        if replicas > allowed > 0:
            raise ConfigError(
                f"{bucket.name!r} is held on {allowed} servers at most (its max_replicas), not on {replicas}: what is "
                "beyond that is given up again; raise max_replicas, which counts for what is loaded and what is read"
            )
        since_s = self._since_s(age_s)
        located = await asyncio.gather(*(self._locate(bucket, key) for key in keys))
        where: dict[str, list[Block]] = defaultdict(list)
        placed = 0
        for known in located:
            if isinstance(known, Known):
                for index in range(block_count(known.size_bytes, self._engine.block_size_bytes)):
                    for server in self._keepers(bucket, known, index, replicas):
                        where[server].append((known.key, known.version, index))
                    placed += 1
                    if placed % _BLOCKS_PER_TURN == 0:
                        await asyncio.sleep(0)
        held = await self._ask_all(bucket, where, None)
        missing = {
            server: [block for block in blocks if held[server, block] is not True]
            for server, blocks in where.items()
        }
        loaded = await self._ask_all(bucket, missing, since_s)
        wanted: dict[str, list[tuple[str, Block]]] = defaultdict(list)
        for server, blocks in where.items():
            for block in blocks:
                wanted[block[0]].append((server, block))
        return [
            _item(key, known, [(held[one], loaded.get(one)) for one in wanted[key]])
            for key, known in zip(keys, located, strict=True)
        ]

    def begin_load(self, bucket: Bucket, keys: Sequence[str], replicas: int) -> list[LoadItem]:
        """The same for nobody who waits; not, where too many are under way already, and the same one only once."""
        what = bucket.name, tuple(keys), replicas
        if what not in self._begun:
            if len(self._begun) >= BEGUN_MAX:
                return [LoadItem(key, PASSED, 0, "too much is being loaded already") for key in keys]
            task = asyncio.get_running_loop().create_task(self.load(bucket, keys, replicas))
            self._begun[what] = task
            task.add_done_callback(partial(self._end_load, what))
        return [LoadItem(key, BEGUN) for key in keys]

    def _end_load(self, what: _Load, task: asyncio.Task[list[LoadItem]]) -> None:
        del self._begun[what]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a load that nobody waits for has failed: %s", error)

    async def stop(self) -> None:
        """Give up what is being loaded and nobody waits for."""
        loads = list(self._begun.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    async def held(self, bucket: Bucket, key: str, hops: int) -> HeldObject:
        """How much of an object is held where it belongs in the fleet. Raises what `locate` does."""
        known = await self._engine.locate(bucket, key, hops)
        where: dict[str, list[Block]] = defaultdict(list)
        count = block_count(known.size_bytes, self._engine.block_size_bytes)
        for index in range(count):
            for server in self._keepers(bucket, known, index, 0):
                where[server].append((known.key, known.version, index))
            if index % _BLOCKS_PER_TURN == 0:
                await asyncio.sleep(0)
        said = await self._ask_all(bucket, where, None)
        there = {index for (_, (_, _, index)), is_held in said.items() if is_held is True}
        size = self._engine.block_size_bytes
        bounds = (block_bounds(known.size_bytes, size, index) for index in there)
        return HeldObject(known.version, known.size_bytes, sum(stop - start for start, stop in bounds))

    async def fetch(self, bucket: Bucket, blocks: Sequence[Block], age_s: int = 0) -> HeldAnswer:
        """Hold these blocks here, for a load that is so old; which of them are, and why others could not be fetched."""
        store = self._engine.store
        with store.clearing.loading(bucket.name, self._since_s(age_s)):
            said = await asyncio.gather(*(self._fetch(bucket, block) for block in blocks))
        why = {place: found for place, found in enumerate(said) if isinstance(found, str)}
        return HeldAnswer([found is True for found in said], why)

    def _since_s(self, age_s: int) -> int:
        """When a load of that age began, in the index's seconds."""
        return self._engine.store.now_s() - min(max(0, age_s), LOAD_AGE_S_MAX)

    async def _fetch(self, bucket: Bucket, block: Block) -> bool | str:
        key, version, index = block
        async with self._turns:
            try:
                known = await self._engine.locate(bucket, key, 1)
                count = block_count(known.size_bytes, self._engine.block_size_bytes)
                if known.version != version or not 0 <= index < count:
                    return f"{key!r} is another version now"
                return await self._engine.ensure(known, index)
            except StokerError as error:
                return str(error)

    async def _locate(self, bucket: Bucket, key: str) -> Known | StokerError:
        async with self._turns:
            try:
                return await self._engine.locate(bucket, key)
            except StokerError as error:
                return error

    def _keepers(self, bucket: Bucket, known: Known, index: int, replicas: int) -> list[str]:
        """The servers that are to hold a block."""
        fleet = self._engine.fleet
        count = max(1, replicas or bucket.spec.max_replicas)
        name = block_owner_name(bucket.name, known.key, index)
        owners = fleet.view.placement().owners(name, count)
        return [owner.name for owner in owners] or [fleet.me.name]

    async def _ask_all(
        self, bucket: Bucket, where: dict[str, list[Block]], since_s: int | None
    ) -> dict[tuple[str, Block], bool | str]:
        """Of each server, which of its blocks it holds, or why it could not get one; none, where it cannot be asked.
        For a load that began then they are fetched before."""
        said: dict[tuple[str, Block], bool | str] = {}

        async def ask(server: str, blocks: list[Block]) -> None:
            for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
                part = blocks[first : first + _BLOCKS_AT_ONCE]
                answer = await self._ask(bucket, server, part, since_s)
                said.update(zip(((server, block) for block in part), answer, strict=True))

        await asyncio.gather(*(ask(server, blocks) for server, blocks in where.items()))
        return said

    async def _ask(
        self, bucket: Bucket, server: str, blocks: list[Block], since_s: int | None
    ) -> list[bool | str]:
        fleet, store = self._engine.fleet, self._engine.store
        # The load grows older from part to part.
        age_s = None if since_s is None else store.now_s() - since_s
        try:
            if server == fleet.me.name:
                if age_s is not None:
                    return _said(await self.fetch(bucket, blocks, age_s))
                return [store.holds(bucket.number, key, version, index) for key, version, index in blocks]
            url = fleet.url(server)
            if url is None:
                return [False] * len(blocks)
            if age_s is not None:
                # Another server's seconds begin at other times.
                return _said(await fleet.peers.fetch(url, bucket.name, blocks, age_s + 1))
            return _said(await fleet.peers.held(url, bucket.name, blocks))
        except CacheUnavailable as error:
            fleet.lost(server, error)
        except StokerError as error:
            log.info("%s could not load all it was to: %s", server, error)
        return [False] * len(blocks)

    def _write(self) -> None:
        pins = {name: sorted(bucket.pins) for name, bucket in self._engine.buckets.items() if bucket.pins}
        try:
            write_file(self._path, pins)
        except OSError as error:
            raise EnvironmentProblem(f"cannot write {self._path}: {error.strerror}") from error


def _said(answer: HeldAnswer) -> list[bool | str]:
    return [answer.why.get(place, is_held) for place, is_held in enumerate(answer.held)]


def _item(
    key: str, known: Known | StokerError, blocks: list[tuple[bool | str, bool | str | None]]
) -> LoadItem:
    """`blocks`: of each, whether it was held before, and after, or why not (None: it was not asked again)."""
    if isinstance(known, StokerError):
        return LoadItem(key, FAILED, 0, str(known))
    if all(before is True for before, _ in blocks):
        return LoadItem(key, HELD, known.size_bytes)
    if all(before is True or after is True for before, after in blocks):
        return LoadItem(key, LOADED, known.size_bytes)
    why = next((after for _, after in blocks if isinstance(after, str)), None)
    if why is not None:
        return LoadItem(key, FAILED, known.size_bytes, why)
    return LoadItem(
        key, PASSED, known.size_bytes, "there is no room for all of it, or a server cannot be reached"
    )
