"""An origin that says nothing: who is answered by what was known waits once, and soon again for what is so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stoker.cache.reach import NAMES_MIN
from stoker.cache.server import last_known
from stoker.cache.server.last_known import LastKnown
from stoker.errors import OriginError
from tests.unit.test_cache_engine import World, run

WAIT_S = 0.2


class Silence:
    """An origin whose questions about names wait until it is over."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(last_known, "WAIT_S", WAIT_S)
        self.over = asyncio.Event()
        self.asked = 0
        self._stat = world.memory.stat
        monkeypatch.setattr(world.memory, "stat", self.stat)

    async def stat(self, key: str) -> Any:
        self.asked += 1
        await self.over.wait()
        return await self._stat(key)


def test_one_waits_and_the_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        loop, keys = asyncio.get_running_loop(), [f"{n}" for n in range(20)]
        for key in keys:
            world.memory.put(key, b"1")
            await world.engine.locate(world.bucket, key)
        silence = Silence(world, monkeypatch)
        world.clock.at += 70
        for key in keys:
            world.memory.put(key, b"22")
        began = loop.time()
        assert [(await world.engine.locate(world.bucket, key)).size_bytes for key in keys] == [1] * 20
        assert loop.time() - began < 10 * WAIT_S
        await asyncio.sleep(0.01)
        assert silence.asked == NAMES_MIN + 1, "the first, and one that tries it"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * WAIT_S):
                await world.engine.locate(world.bucket, "new")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * WAIT_S):
                await world.engine.locate(world.bucket, keys[5], is_refreshing=True)
        silence.over.set()
        await asyncio.sleep(WAIT_S)
        for key in keys:
            assert (await world.engine.locate(world.bucket, key)).size_bytes == 2, key

    run(World(tmp_path, ttl_s=60.0, stale_if_error_s=600.0), test)


def test_pages_are_told_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        async def keys() -> list[str]:
            page = await world.engine.metadata.page(world.bucket, "", None, 10)
            return [info.key for info in page.objects]

        assert await keys() == ["k"]
        monkeypatch.setattr(last_known, "WAIT_S", WAIT_S)
        over, listed = asyncio.Event(), world.memory.list

        async def slow(*which: Any) -> Any:
            await over.wait()
            async for page in listed(*which):
                yield page

        monkeypatch.setattr(world.memory, "list", slow)
        world.memory.put("l", b"")
        world.clock.at += 70
        assert await keys() == ["k"]
        await world.engine.metadata.refresh(world.bucket, "")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * WAIT_S):
                await keys()
        over.set()
        await asyncio.sleep(WAIT_S)
        assert await keys() == ["k", "l"]

    run(World(tmp_path, ttl_s=60.0, stale_if_error_s=600.0), test)


def test_where_questions_wait_for_each_other_that_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World) -> None:
        monkeypatch.setattr(last_known, "WAIT_S", 0.0)

        async def ask() -> str:
            await asyncio.sleep(0.05)
            return "new"

        asked = LastKnown(world.clock)
        assert await asked.now_or_last(world.bucket, "k", ask, lambda: "old") == "new"

        async def fail() -> str:
            raise OriginError("down")

        assert await asked.now_or_last(world.bucket, "k", fail, lambda: "old") == "old"
        with pytest.raises(OriginError):
            await asked.now_or_last(world.bucket, "k", fail, lambda: None)
        await asked.close()

    run(World(tmp_path, origin_requests_per_s=1000.0), test)
