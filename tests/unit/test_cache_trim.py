"""Copies beyond what a bucket allows leave, and while they are looked for everybody else has their turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stoker.base.rng import Rng
from stoker.cache.coming import ComingReads, Stream, items_of
from stoker.cache.maglev import block_owner_name
from stoker.cache.server.peers import Block
from stoker.cache.server.summaries import Summaries
from stoker.cache.server.trim import Trim
from stoker.wire.cache_api import HeldAnswer
from tests.unit.test_cache_summaries import BLOCK, Server, World, run

BLOCKS = 5000


async def all_but_block_4(url: str, bucket: str, blocks: Sequence[Block]) -> HeldAnswer:
    """What peers say that they hold."""
    return HeldAnswer([index != 4 for _, _, index in blocks])


def owner(server: Server, key: str, index: int) -> str:
    found = server.fleet.view.placement().owner(block_owner_name("b", key, index))
    assert found is not None
    return found.name


def test_what_others_hold_leaves_and_nobody_waits_meanwhile(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        x = world.servers["x"]
        world.peers.held = all_but_block_4  # type: ignore[method-assign]
        known = x.known("huge", BLOCKS * BLOCK)
        held = [*range(8), BLOCKS - 1]
        for index in held:
            assert await x.store.put(known, index, bytes(BLOCK))
        for n in range(20):
            await x.put(f"k{n}", 1000)
        trim = Trim(x.engine, Rng(5))
        turns: list[int] = []

        async def watch() -> None:
            while True:
                turns.append(trim._sorted_blocks)
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0)
        await trim.trim(x.engine.bucket("b"))
        turns.append(trim._sorted_blocks)
        watching.cancel()
        stays = [index for index in held if owner(x, "huge", index) == "x" or index == 4]
        assert [index for index in held if x.store.has(known, index)] == stays
        assert 0 < len(stays) < len(held)
        for n in range(20):
            assert x.holds(f"k{n}") == (owner(x, f"k{n}", 0) == "x")
        assert turns[-1] > BLOCKS
        assert max(after - before for before, after in itertools.pairwise(turns)) <= 256

    run(World(tmp_path, policy="lru", max_replicas=1), story)


def test_what_is_announced_to_be_read_here_soon_stays_until_it_is(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        x = world.servers["x"]
        world.peers.held = all_but_block_4  # type: ignore[method-assign]
        large = x.known("large", 40 * BLOCK)
        for index in range(40):
            assert await x.store.put(large, index, bytes(BLOCK))
        keys = [f"k{n}" for n in range(40)]
        for key in keys:
            await x.put(key, 1000)
        ids = np.frombuffer(x.store.index.ids(x.number, [*keys, "large"]), dtype=np.uint64)
        # 20 small objects, ten blocks of the large one, and the other 20: the first 30 reads count.
        items = np.concatenate([ids[:20], items_of(np.repeat(ids[40:], 10), np.arange(10)), ids[20:40]])
        stream, coming = Stream("job", 0, read_s=1.0, now=0.0), ComingReads()
        stream.announce(0, 50, items, np.arange(50))
        stream.reach = 30
        coming.put("s", stream)
        x.store.holdings.set_coming(x.store.holdings.lots[x.number], coming)
        trim = Trim(x.engine, Rng(5))

        async def here() -> tuple[set[str], set[int]]:
            await trim.trim(x.engine.bucket("b"))
            return {key for key in keys if x.holds(key)}, {n for n in range(40) if x.store.has(large, n)}

        own = {key for key in keys if owner(x, key, 0) == "x"}
        # What another says that it does not have stays as well.
        own_blocks = {n for n in range(40) if owner(x, "large", n) == "x"} | {4}
        assert await here() == (own | set(keys[:20]), own_blocks | set(range(10)))
        stream.advance(25, 1.0)
        assert await here() == (own, own_blocks | set(range(5, 10)))

    run(World(tmp_path, 100_000_000, policy="lru", max_replicas=1), story)


def test_servers_trim_at_different_times(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        waits: list[float] = []
        sleep = asyncio.sleep

        async def note(wait_s: float) -> None:
            waits.append(wait_s)
            await sleep(3600)

        trims = [Trim(server.engine, Rng(n), 1.0) for n, server in enumerate(world.servers.values())]
        asyncio.sleep = note  # type: ignore[assignment]
        try:
            for trim in trims:
                trim._changed.set()
                trim.start()
            for _ in range(5):
                await sleep(0)
        finally:
            asyncio.sleep = sleep
            for trim in trims:
                await trim.stop()
        assert len(set(waits)) == 3
        assert all(1.0 <= wait_s <= 6.0 for wait_s in waits)

    run(World(tmp_path, policy="lru", max_replicas=1), story)


def test_who_is_stopped_as_something_changes_stops(tmp_path: Path) -> None:
    """A cancellation that comes with what was waited for is not lost, or the server would never end."""

    async def story(world: World) -> None:
        server = world.servers["x"]
        for part in (Trim(server.engine, Rng(5)), Summaries(server.engine, world.clock, Rng(3))):
            part.start()
            for _ in range(3):
                await asyncio.sleep(0)
            part._changed.set()
            async with asyncio.timeout(20):
                await part.stop()
            assert part._task is not None
            assert part._task.cancelled()

    run(World(tmp_path, policy="lru", max_replicas=1), story)


def test_nonsense_of_another_server_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        x = world.servers["x"]
        asked = asyncio.Event()

        async def too_few(url: str, bucket: str, blocks: Sequence[Block]) -> HeldAnswer:
            asked.set()
            return HeldAnswer([])

        world.peers.held = too_few  # type: ignore[method-assign]
        for n in range(20):
            await x.put(f"k{n}", 1000)
        trim = Trim(x.engine, At0(5), after_s=0.0)
        trim.start()
        for _ in range(2):
            x.engine.fleet.on_change()
            await asyncio.wait_for(asked.wait(), 20)
            asked.clear()
        await trim.stop()

    run(World(tmp_path, policy="lru", max_replicas=1), story)
    assert "counting copies of b failed" in caplog.text


class At0(Rng):
    """Nobody waits for chance."""

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low
