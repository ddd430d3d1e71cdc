"""Loads: what they bring stays for as long as they take."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from stoker.cache.server.keeping import LOAD_AGE_S_MAX, Keeping
from stoker.errors import ConfigError
from stoker.wire.cache_api import FAILED, LOADED, PASSED
from tests.unit.test_cache_engine import BLOCK, World, run


def test_a_long_load_pushes_out_nothing_of_what_it_has_brought_itself(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.memory.put("old", bytes(20 * BLOCK))
        world.memory.put("long", bytes(200 * BLOCK))
        keeping = Keeping(world.engine, tmp_path)
        (item,) = await keeping.load(world.bucket, ["old"], 0)
        assert item.state == LOADED
        world.clock.at += 10

        def pass_time(_: str) -> None:
            world.clock.at += 0.5

        world.origin.before_read = pass_time
        (item,) = await keeping.load(world.bucket, ["long"], 0, 1)
        assert item.state == PASSED, "there is room for some of it"
        known = await world.engine.locate(world.bucket, "long")
        held = [world.store.has(known, index) for index in range(200)]
        assert all(held[:64])
        assert sum(held) > 80
        old = await world.engine.locate(world.bucket, "old")
        assert not any(world.store.has(old, index) for index in range(20)), "what was there before has left"

    run(World(tmp_path, 400_000), story)


def test_a_load_is_as_old_as_may_be(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keeping, now_s = Keeping(world.engine, tmp_path), world.store.now_s()
        for age_s, since_s in ((-5, now_s), (7, now_s - 7), (2**63, now_s - LOAD_AGE_S_MAX)):
            assert keeping._since_s(age_s) == since_s
        (item,) = await keeping.load(world.bucket, ["k"], 0, 2**63)
        assert item.state == LOADED
        (item,) = await keeping.load(world.bucket, ["none"], 0)
        assert item.state == FAILED

    run(World(tmp_path), story)


def test_nothing_is_loaded_that_would_be_given_up_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        keeping = Keeping(world.engine, tmp_path)
        with pytest.raises(ConfigError, match=r"on 2 servers at most .* not on 3: .* raise max_replicas"):
            await keeping.load(world.bucket, ["k"], 3)
        assert [item.state for item in await keeping.load(world.bucket, ["k"], 2)] == [LOADED]

    run(World(tmp_path / "two", max_replicas=2), story)

    async def everywhere(world: World) -> None:
        keeping = Keeping(world.engine, tmp_path)
        assert [item.state for item in await keeping.load(world.bucket, ["k"], 3)] == [LOADED]

    run(World(tmp_path / "all", max_replicas=0), everywhere)


def test_others_have_their_turn_while_a_huge_object_is_placed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.memory.put("huge", bytes(5000 * BLOCK))
        keeping = Keeping(world.engine, tmp_path)
        placed: list[int] = []
        turns: list[int] = []
        keepers = keeping._keepers

        def count(*arguments: object) -> list[str]:
            placed.append(1)
            return keepers(*arguments)  # type: ignore[arg-type]

        keeping._keepers = count  # type: ignore[method-assign]

        async def watch() -> None:
            while True:
                turns.append(len(placed))
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        loading = asyncio.ensure_future(keeping.load(world.bucket, ["huge"], 0))
        while len(placed) < 5000:  # noqa: ASYNC110  the fetches are not of interest
            await asyncio.sleep(0)
        turns.append(len(placed))
        loading.cancel()
        watching.cancel()
        await asyncio.gather(loading, watching, return_exceptions=True)
        assert max(after - before for before, after in itertools.pairwise(turns)) <= 256

    run(World(tmp_path, 400_000), story)
