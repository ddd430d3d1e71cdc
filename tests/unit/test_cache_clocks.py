"""The machine's clock is set, while a store is open and between two of its lives: what was learnt keeps its meaning."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stoker.base.rng import Rng
from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.fetches import Ticket
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.peers import Peers
from stoker.cache.store.store import Store
from stoker.errors import ObjectNotFound, OriginError
from stoker.testing.cache_fakes import FaultyOrigin
from stoker.wire.cache_api import BucketSpec, FleetMember

BLOCK = 1000
HOURS = 3600.0
BACK = (-10 * HOURS, -30 * 365 * 24 * HOURS)
JUMPS = (*BACK, 10 * HOURS)


class SetClock:
    """Two clocks: one goes on evenly, the other can be set."""

    def __init__(self) -> None:
        self.even_s = 500.0
        self.set_s = 1.8e9

    def now(self) -> float:
        return self.even_s

    def wall(self) -> float:
        return self.set_s + self.even_s


class Outliving(FaultyOrigin):
    """Is there again in the next life."""

    async def close(self) -> None:
        return


class Life:
    """An engine over a folder, from one start to the next, and an origin that outlives it."""

    def __init__(self, folder: Path, clock: SetClock, memory: MemoryOrigin, **spec: float) -> None:
        self.clock = clock
        self.memory = memory
        self.origin = Outliving(memory)
        self.store = Store(folder, 200_000, BLOCK, clock, Rng(1))
        alone = Fleet(FleetMember("me", "http://me:1"), None, Peers(None), clock, Rng(3))
        self.engine = Engine(self.store, alone, lambda url: self.origin, clock, Rng(2))
        self.engine.add_bucket("b", BucketSpec("memory://m", **spec))
        self.asked_before = memory.counters.requests

    @property
    def bucket(self) -> Bucket:
        return self.engine.bucket("b")

    @property
    def asked(self) -> int:
        """How often the origin was asked since the last time that this was."""
        before, self.asked_before = self.asked_before, self.memory.counters.requests
        return self.asked_before - before

    def is_held(self, key: str) -> bool:
        known = self.store.find(self.bucket.number, key)
        return known is not None and self.store.has(known, 0)

    async def read(self, key: str = "k") -> bytes:
        """An object of one block."""
        known = await self.engine.locate(self.bucket, key)
        found = await self.engine.block(known, 0)
        if not isinstance(found, Ticket):
            return await self.store.read(found)
        data = bytes(await found.whole() or b"")
        found.leave()
        while self.engine.is_storing:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return data


class Folder:
    """One folder, one origin and one clock for all lives."""

    def __init__(self, path: Path, **spec: float) -> None:
        self.path = path
        self.spec = spec
        self.clock = SetClock()
        self.memory = MemoryOrigin("m")
        self.memory.put("k", b"old")

    def live(self, story: Callable[[Life], Awaitable[None]]) -> None:
        async def whole() -> None:
            life = Life(self.path, self.clock, self.memory, **self.spec)
            try:
                await story(life)
            finally:
                await life.engine.close()

        asyncio.run(whole())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, ttl_s=60.0, stale_if_error_s=600.0, negative_ttl_s=10.0)


async def read_both(life: Life) -> None:
    assert await life.read() == b"old"
    with pytest.raises(ObjectNotFound):
        await life.read("absent")


@pytest.mark.parametrize("jump_s", JUMPS)
def test_a_clock_that_is_set_while_it_runs_changes_nothing(folder: Folder, jump_s: float) -> None:
    async def story(life: Life) -> None:
        await read_both(life)
        assert life.asked > 0
        folder.clock.set_s += jump_s
        await read_both(life)
        assert life.asked == 0, "what is known is as fresh as it was"
        folder.clock.even_s += 11
        life.memory.put("absent", b"is there")
        assert await life.read("absent") == b"is there"
        folder.clock.even_s += 60
        life.memory.put("k", b"new")
        assert await life.read() == b"new", "and no fresher"
        folder.clock.even_s += 500
        folder.clock.set_s -= 2 * jump_s
        life.origin.stat_faults.extend([OriginError("down")] * 40)
        assert await life.read() == b"new"
        folder.clock.even_s += 200
        with pytest.raises(OriginError):
            await life.read()

    folder.live(story)


@pytest.mark.parametrize("jump_s", JUMPS)
def test_what_an_earlier_life_checked_is_asked_about_once_and_kept(folder: Folder, jump_s: float) -> None:
    folder.live(read_both)
    folder.clock.set_s += jump_s

    async def story(life: Life) -> None:
        await read_both(life)
        assert life.asked == 2, "of each its version, and no content"
        await read_both(life)
        assert life.asked == 0, "it is fresh by this life's clock"
        life.memory.put("k", b"new")
        life.memory.put("absent", b"is there")
        folder.clock.even_s += 61
        assert await life.read() == b"new", "but not for ever"
        assert await life.read("absent") == b"is there"

    folder.live(story)


@pytest.mark.parametrize("jump_s", JUMPS)
def test_nothing_of_an_earlier_life_is_taken_for_fresh(folder: Folder, jump_s: float) -> None:
    folder.live(read_both)
    folder.clock.set_s += jump_s
    folder.memory.put("k", b"new")
    folder.memory.put("absent", b"is there")

    async def story(life: Life) -> None:
        assert await life.read() == b"new"
        assert await life.read("absent") == b"is there"

    folder.live(story)


@pytest.mark.parametrize("jump_s", BACK)
def test_what_was_checked_in_the_future_serves_while_the_origin_is_down(
    folder: Folder, jump_s: float
) -> None:
    folder.live(read_both)
    folder.clock.set_s += jump_s

    async def story(life: Life) -> None:
        life.origin.stat_faults.extend([OriginError("down")] * 400)
        assert await life.read() == b"old"
        folder.clock.even_s += 700
        with pytest.raises(OriginError):
            await life.read()

    folder.live(story)


@pytest.mark.parametrize("size_bytes", [10, 150_000])
@pytest.mark.parametrize("jump_s", JUMPS)
def test_what_is_kept_for_a_time_leaves_also_after_the_clock_was_set(
    tmp_path: Path, jump_s: float, size_bytes: int
) -> None:
    folder = Folder(tmp_path, evict_after_s=100.0)
    folder.memory.put("k", bytes(size_bytes))

    async def fill(life: Life) -> None:
        await life.read()
        assert life.is_held("k")

    folder.live(fill)
    folder.clock.set_s += jump_s

    async def story(life: Life) -> None:
        folder.clock.even_s += 150
        await life.store.clearing.give_up_old()
        assert not life.is_held("k")

    folder.live(story)


@pytest.mark.parametrize("jump_s", JUMPS)
def test_room_is_made_whatever_the_clock_was(tmp_path: Path, jump_s: float) -> None:
    folder = Folder(tmp_path)
    for number in range(600):
        folder.memory.put(f"{number}", b"%04d" % number * 250)

    async def fill(life: Life) -> None:
        for number in range(300):
            assert await life.read(f"{number}") == b"%04d" % number * 250

    folder.live(fill)
    folder.clock.set_s += jump_s

    async def story(life: Life) -> None:
        for number in range(600):
            assert await life.read(f"{number}") == b"%04d" % number * 250
        assert life.is_held("599")
        assert life.store.room.used_bytes <= 200_000

    folder.live(story)
