"""The engine on an event loop, with origins and stores that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.server.budget import Budget
from stoker.cache.server.engine import Bucket, Engine, EngineSettings
from stoker.cache.server.flights import Flights
from stoker.cache.store.memory import MemoryStore
from stoker.cache.store.port import Store
from stoker.cache.store.shelf import Held
from stoker.errors import ConfigError, ObjectChanged, ObjectNotFound, OriginError, ShortBody
from stoker.testing.cache_fakes import FaultyOrigin, FullStore
from stoker.wire.cache_api import BucketSpec

BLOCK = 1000


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 1000.0

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s + 1e9


class World:
    """An engine over a memory origin that fails on demand."""

    def __init__(self, store: Store | None = None, capacity_bytes: int = 100_000, **spec: float) -> None:
        self.clock = FakeClock()
        self.memory = MemoryOrigin("m")
        self.origin = FaultyOrigin(self.memory)
        self.memory.put("k", bytes(2500))
        settings = EngineSettings(capacity_bytes, BLOCK, 0)
        self.engine = Engine(store or MemoryStore(), settings, lambda url: self.origin, self.clock)
        self.engine.load({"b": BucketSpec("memory://m", **spec)})

    @property
    def bucket(self) -> Bucket:
        return self.engine.bucket("b")

    async def read(self, key: str = "k") -> bytes:
        pointer = await self.engine.locate(self.bucket, key)
        whole = b""
        for index in range(-(-pointer.size_bytes // BLOCK)):
            block = await self.engine.block(pointer, index)
            whole += self.engine.shelf.bytes_of(block) if isinstance(block, Held) else block
        return whole


def run(world: World, test: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await test(world)
        finally:
            await world.engine.close()

    asyncio.run(whole())


def test_two_hundred_readers_cost_one_read() -> None:
    async def test(world: World) -> None:
        world.origin.delay_s = 0.01
        found = await asyncio.gather(*(world.read() for _ in range(200)))
        assert set(found) == {bytes(2500)}
        assert (world.memory.counters.bytes_read, world.memory.counters.requests) == (2500, 4)

    run(World(), test)


def test_readers_that_leave_disturb_nobody() -> None:
    async def test(world: World) -> None:
        world.origin.delay_s = 0.02
        tasks = [asyncio.ensure_future(world.read()) for _ in range(10)]
        await asyncio.sleep(0.005)
        for task in tasks[:9]:
            task.cancel()
        assert await tasks[9] == bytes(2500)
        assert world.memory.counters.bytes_read == 2500
        assert all(task.cancelled() for task in tasks[:9])

    run(World(), test)


def test_a_block_that_an_aborted_fetch_has_brought_is_not_fetched_again() -> None:
    async def test(world: World) -> None:
        pointer = await world.engine.locate(world.bucket, "k")
        await world.engine.block(pointer, 0)
        before = world.memory.counters.bytes_read
        assert await world.engine.fetch(pointer, 0) == bytes(world.engine.block_size_bytes)
        assert world.memory.counters.bytes_read == before

    run(World(), test)


def test_a_short_body_or_a_failure_is_read_once_more() -> None:
    async def test(world: World) -> None:
        world.origin.faults.extend([ShortBody("cut"), None, OriginError("reset"), None])
        assert await world.read() == bytes(2500)

    run(World(), test)


def test_an_origin_that_keeps_failing_fails_everyone_and_is_asked_again_later() -> None:
    async def test(world: World) -> None:
        world.origin.faults.extend([OriginError("down")] * 20)
        found = await asyncio.gather(*(world.read() for _ in range(5)), return_exceptions=True)
        assert [type(error) for error in found] == [OriginError] * 5
        assert len({id(error) for error in found}) == 5
        world.origin.faults.clear()
        with pytest.raises(OriginError, match=r"is left alone: it failed 8 times in a row \(last: down\)"):
            await world.read()
        world.clock.time_s += 2
        assert await world.read() == bytes(2500)
        assert world.engine.shelf.held_bytes == 2500

    run(World(), test)


def test_no_reader_gets_a_mixture() -> None:
    async def test(world: World) -> None:
        pointer = await world.engine.locate(world.bucket, "k")
        first = await world.engine.block(pointer, 0)
        world.memory.put("k", b"n" * 2500)
        assert first == bytes(1000)
        with pytest.raises(ObjectChanged):
            await world.engine.block(pointer, 1)
        assert world.engine.shelf.held_bytes == 0
        assert await world.read() == b"n" * 2500

    run(World(), test)


def test_a_missing_object_is_forgotten() -> None:
    async def test(world: World) -> None:
        with pytest.raises(ObjectNotFound):
            await world.read("none")
        await world.read()
        world.memory.delete("k")
        assert await world.read() == bytes(2500)
        world.engine.refresh(world.bucket, "")
        with pytest.raises(ObjectNotFound):
            await world.read()
        assert world.engine.shelf.held_bytes == 0

    run(World(), test)


def test_old_pointers_serve_while_the_origin_is_down_but_not_for_ever() -> None:
    async def test(world: World) -> None:
        await world.read()
        world.origin.stat_faults.extend([OriginError("down")] * 40)
        world.clock.time_s += 70
        assert await world.read() == bytes(2500)
        world.clock.time_s += 40
        with pytest.raises(OriginError):
            await world.read()
        world.origin.stat_faults.clear()
        world.clock.time_s += 31
        assert await world.read() == bytes(2500)
        world.engine.refresh(world.bucket, "")
        world.origin.stat_faults.extend([OriginError("down")] * 4)
        with pytest.raises(OriginError):
            await world.read()

    run(World(ttl_s=60.0, stale_if_error_s=40.0), test)


def test_a_pointer_is_checked_once_its_time_is_over() -> None:
    async def test(world: World) -> None:
        await world.read()
        world.memory.put("k", b"n" * 10)
        assert await world.read() == bytes(2500)
        world.clock.time_s += 61
        assert await world.read() == b"n" * 10
        assert world.engine.shelf.held_bytes == 10

    run(World(ttl_s=60.0), test)


def test_a_full_disk_is_passed_through_until_there_is_room() -> None:
    store = FullStore()

    async def test(world: World) -> None:
        assert await world.read() == bytes(2500)
        assert "No space left" in str(world.engine.shelf.problem)
        assert world.engine.shelf.held_bytes == 0
        store.is_full = False
        world.clock.time_s += 60
        assert await world.read() == bytes(2500)
        assert world.engine.shelf.problem is None
        assert world.engine.shelf.held_bytes == 2500

    run(World(store), test)


def test_a_cache_smaller_than_a_block_still_serves() -> None:
    async def test(world: World) -> None:
        assert await world.read() == bytes(2500)
        assert world.engine.shelf.held_bytes <= 600

    run(World(capacity_bytes=600), test)


def test_a_bucket_is_added_once() -> None:
    async def test(world: World) -> None:
        assert not world.engine.add_bucket("b", BucketSpec("memory://m"))
        with pytest.raises(ConfigError):
            world.engine.add_bucket("b", BucketSpec("memory://other"))
        with pytest.raises(ObjectNotFound, match="there are: b"):
            world.engine.bucket("c")

    run(World(), test)


def test_a_defect_in_a_fetch_is_told_to_those_who_wait() -> None:
    async def whole() -> None:
        async def fetch(key: str) -> int:
            raise ZeroDivisionError(key)

        flights: Flights[str, int] = Flights(fetch)
        seen: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))
        with pytest.raises(OriginError, match="ZeroDivisionError"):
            await flights.get("k")
        await asyncio.sleep(0)
        assert len(flights) == 0

    asyncio.run(whole())


def test_the_budget_is_first_come_first_served_and_survives_cancellation() -> None:
    async def whole() -> None:
        budget = Budget(2, 100)
        await budget.take(60)
        order: list[str] = []

        async def user(name: str, size: int) -> None:
            await budget.take(size)
            order.append(name)
            budget.give(size)

        tasks = [asyncio.ensure_future(user(*pair)) for pair in [("large", 500), ("gone", 1), ("small", 1)]]
        await asyncio.sleep(0)
        assert order == []
        tasks[1].cancel()
        budget.give(60)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["large", "small"]
        await budget.take(100)

    asyncio.run(whole())
