"""The engine on an event loop, with origins and stores that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from stoker.base.rng import Rng
from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.origin.port import Origin
from stoker.cache.server.beginnings import BEGINNINGS_MAX
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.budget import Budget
from stoker.cache.server.engine import FETCHES_MAX, Engine
from stoker.cache.server.fetches import Ticket
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.flights import Flights
from stoker.cache.server.peers import Peers
from stoker.cache.store.containers import ContainerFiles
from stoker.cache.store.known import Known
from stoker.cache.store.store import Store
from stoker.errors import ConfigError, ObjectChanged, ObjectNotFound, OriginError, ShortBody
from stoker.testing.cache_fakes import FaultyOrigin, FullFiles
from stoker.wire.cache_api import BucketSpec, FleetMember, PrefixSpec
from tests.clocks import HandClock

BLOCK = 1000


class World:
    """An engine over a memory origin that fails on demand."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int = 200_000,
        open_files: Callable[[Path], ContainerFiles] = ContainerFiles,
        **spec: float,
    ) -> None:
        self.clock = HandClock()
        self.memory = MemoryOrigin("m")
        self.origin = FaultyOrigin(self.memory)
        self.memory.put("k", bytes(2500))
        self.store = Store(folder, capacity_bytes, BLOCK, self.clock, Rng(1), open_files)
        alone = Fleet(FleetMember("me", "http://me:1"), None, Peers(None), self.clock, Rng(3))
        self.engine = Engine(self.store, alone, lambda url: self.origin, self.clock, Rng(2))
        self.engine.add_bucket("b", BucketSpec("memory://m", **spec))

    @property
    def bucket(self) -> Bucket:
        return self.engine.bucket("b")

    @property
    def held_bytes(self) -> int:
        return sum(figures.size_bytes for figures in self.store.index.figures().values())

    async def read(self, key: str = "k", *, begins: bool = False) -> bytes:
        known = await self.engine.locate(self.bucket, key, begins=begins)
        count = -(-known.size_bytes // BLOCK)
        return b"".join([await self.read_block(known, index) for index in range(count)])

    async def read_block(self, known: Known, index: int) -> bytes:
        found = await self.engine.block(known, index)
        if not isinstance(found, Ticket):
            return await self.store.read(found)
        try:
            return bytes(await found.whole() or await world_piece(self, known, index))
        finally:
            found.leave()


async def world_piece(world: World, known: Known, index: int) -> bytes:
    """A block that was stored meanwhile."""
    piece = world.store.held(known, index)
    assert piece is not None
    return await world.store.read(piece)


async def settled(world: World) -> None:
    """Wait until what was fetched is stored."""
    while world.engine.is_storing:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def run(world: World, test: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await test(world)
        finally:
            await world.engine.close()

    asyncio.run(whole())


def test_two_hundred_readers_cost_one_read(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.origin.delay_s = 0.01
        found = await asyncio.gather(*(world.read() for _ in range(200)))
        assert set(found) == {bytes(2500)}
        assert (world.memory.counters.bytes_read, world.memory.counters.requests) == (2500, 4)

    run(World(tmp_path), test)


@pytest.mark.parametrize("size_bytes", [1, 999, BLOCK, 1001, 2500])
def test_a_new_object_is_asked_for_and_read_in_one(tmp_path: Path, size_bytes: int) -> None:
    async def story(world: World) -> None:
        world.memory.put("new", b"x" * size_bytes)
        readers = (world.read("new", begins=True) for _ in range(20))
        assert await asyncio.gather(*readers) == [b"x" * size_bytes] * 20
        await world.engine.settle()
        assert world.memory.counters.requests == -(-size_bytes // BLOCK)
        assert world.memory.counters.bytes_read == size_bytes
        await world.read("new", begins=True)
        assert world.memory.counters.bytes_read == size_bytes

    run(World(tmp_path), story)


def test_an_empty_object_is_begun_and_nothing_comes(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.memory.put("new", b"")
        assert await world.read("new", begins=True) == b""
        assert world.memory.counters.requests == 1

    run(World(tmp_path), story)


def test_a_beginning_that_fails_is_gone_on_with(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.memory.put("new", bytes(range(250)) * 10)
        world.origin.stat_faults.append(OriginError("no"))
        world.origin.faults.append(OriginError("no"))
        assert await world.read("new", begins=True) == bytes(range(250)) * 10
        world.memory.put("other", bytes(range(250)) * 4)
        world.origin.cut_after_bytes = 700
        assert await world.read("other", begins=True) == bytes(range(250)) * 4

    run(World(tmp_path), story)


def test_what_was_begun_and_left_is_stored(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.memory.put("new", bytes(2500))
        known = await world.engine.locate(world.bucket, "new", begins=True)
        for _ in range(50):
            await asyncio.sleep(0)
        await world.engine.settle()
        assert world.store.has(known, 0)
        assert not world.store.has(known, 1)
        assert world.memory.counters.requests == 1

    run(World(tmp_path), story)


def test_many_beginnings_are_bounded_and_all_are_read(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        names = [f"n{n:03}" for n in range(3 * BEGINNINGS_MAX)]
        for name in names:
            world.memory.put(name, name.encode())
        world.origin.delay_s = 0.01
        read = await asyncio.gather(*(world.read(name, begins=True) for name in names))
        assert read == [name.encode() for name in names]
        assert world.memory.counters.requests <= 2 * len(names)

    run(World(tmp_path, 10_000_000), story)


def test_who_reads_on_finds_what_was_fetched_ahead(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        content = bytes(range(250)) * 160
        world.memory.put("long", content)
        world.origin.delay_s = 0.002
        assert await world.read("long") == content
        assert world.memory.counters.bytes_read == len(content)
        await world.engine.settle()
        known = await world.engine.locate(world.bucket, "k")
        await world.read_block(known, 0)
        await world.engine.settle()
        assert not world.store.has(known, 1), "one block is no sign that more is wanted"

    run(World(tmp_path, 10_000_000), story)


@pytest.mark.parametrize("what", ["full", "off"])
def test_nothing_is_fetched_ahead_that_cannot_be_kept(tmp_path: Path, what: str) -> None:
    async def story(world: World) -> None:
        world.memory.put("long", bytes(40_000))
        known = await world.engine.locate(world.bucket, "long")
        for index in range(3):
            await world.read_block(known, index)
        await asyncio.sleep(0.05)
        await world.engine.settle()
        assert world.memory.counters.bytes_read <= (3 if what == "off" else 3 + 4) * BLOCK

    files = FullFiles if what == "full" else ContainerFiles
    run(World(tmp_path, 10_000_000, files, read_ahead_streams=0 if what == "off" else 4), story)


def test_readers_that_leave_disturb_nobody(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.origin.delay_s = 0.02
        tasks = [asyncio.ensure_future(world.read()) for _ in range(10)]
        await asyncio.sleep(0.005)
        for task in tasks[:9]:
            task.cancel()
        assert await tasks[9] == bytes(2500)
        assert world.memory.counters.bytes_read == 2500
        assert all(task.cancelled() for task in tasks[:9])

    run(World(tmp_path), test)


def test_a_block_that_an_aborted_fetch_has_brought_is_not_fetched_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        pointer = await world.engine.locate(world.bucket, "k")
        await world.read()
        await settled(world)
        before = world.memory.counters.bytes_read
        again = world.engine.fetch(pointer, 0)
        assert await again.whole() == bytes(world.engine.block_size_bytes)
        assert world.memory.counters.bytes_read == before

    run(World(tmp_path), test)


def test_a_short_body_or_a_failure_is_read_once_more(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.origin.faults.extend([ShortBody("cut"), None, OriginError("reset"), None])
        assert await world.read() == bytes(2500)

    run(World(tmp_path), test)


def test_an_origin_that_keeps_failing_fails_everyone_and_is_asked_again_later(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.origin.faults.extend([OriginError("down")] * 20)
        found = await asyncio.gather(*(world.read() for _ in range(5)), return_exceptions=True)
        assert [type(error) for error in found] == [OriginError] * 5
        assert len({id(error) for error in found}) == 5
        world.origin.faults.clear()
        with pytest.raises(OriginError, match=r"is left alone: it failed 8 times in a row \(last: down\)"):
            await world.read()
        world.clock.at += 2
        assert await world.read() == bytes(2500)
        await settled(world)
        assert world.held_bytes == 2500

    run(World(tmp_path), test)


def test_no_reader_gets_a_mixture(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        pointer = await world.engine.locate(world.bucket, "k")
        assert await world.engine.fetch(pointer, 0).whole() == bytes(1000)
        world.memory.put("k", b"n" * 2500)
        await settled(world)
        assert world.held_bytes == 1000
        with pytest.raises(ObjectChanged):
            await world.engine.fetch(pointer, 1).whole()
        assert world.held_bytes == 0
        assert await world.read() == b"n" * 2500

    run(World(tmp_path), test)


def test_a_missing_object_is_forgotten(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        with pytest.raises(ObjectNotFound):
            await world.read("none")
        await world.read()
        world.memory.delete("k")
        assert await world.read() == bytes(2500)
        await world.engine.metadata.refresh(world.bucket, "")
        with pytest.raises(ObjectNotFound):
            await world.read()
        assert world.held_bytes == 0

    run(World(tmp_path), test)


def test_old_pointers_serve_while_the_origin_is_down_but_not_for_ever(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.read()
        world.origin.stat_faults.extend([OriginError("down")] * 40)
        world.clock.at += 70
        assert await world.read() == bytes(2500)
        world.clock.at += 40
        with pytest.raises(OriginError):
            await world.read()
        world.origin.stat_faults.clear()
        world.clock.at += 31
        assert await world.read() == bytes(2500)
        await world.engine.metadata.refresh(world.bucket, "")
        world.origin.stat_faults.extend([OriginError("down")] * 4)
        with pytest.raises(OriginError):
            await world.read()

    run(World(tmp_path, ttl_s=60.0, stale_if_error_s=40.0), test)


def test_a_pointer_is_checked_once_its_time_is_over(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.read()
        world.memory.put("k", b"n" * 10)
        assert await world.read() == bytes(2500)
        world.clock.at += 61
        assert await world.read() == b"n" * 10
        await settled(world)
        assert world.held_bytes == 10

    run(World(tmp_path, ttl_s=60.0), test)


def test_a_full_disk_is_passed_through_until_there_is_room(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        files = world.store.files
        assert isinstance(files, FullFiles)
        assert await world.read() == bytes(2500)
        await settled(world)
        assert "No space left" in str(world.store.problem)
        assert world.held_bytes == 0
        files.is_full = False
        world.clock.at += 60
        assert await world.read() == bytes(2500)
        await settled(world)
        assert world.store.problem is None
        assert world.held_bytes == 2500

    run(World(tmp_path, open_files=FullFiles), test)


def test_a_cache_smaller_than_a_block_still_serves(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        assert await world.read() == bytes(2500)
        await settled(world)
        assert world.held_bytes <= 600

    run(World(tmp_path, capacity_bytes=600), test)


def test_a_bucket_is_added_once(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        assert not world.engine.add_bucket("b", BucketSpec("memory://m"))
        with pytest.raises(ConfigError):
            world.engine.add_bucket("b", BucketSpec("memory://other"))
        with pytest.raises(ObjectNotFound, match="there are: b"):
            world.engine.bucket("c")

    run(World(tmp_path), test)


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


class SlowToEnd:
    """An origin whose streams take a while to be given up."""

    def __init__(self, origin: FaultyOrigin) -> None:
        self._origin = origin
        self.url = origin.url
        self.counters = origin.counters
        self.stat = origin.stat
        self.list = origin.list
        self.close = origin.close
        self.hangs = True

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        return await self._origin.read(key, start, stop, version)

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[bytes, None]:
        try:
            while self.hangs:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
        yield await self._origin.read(key, start, stop, version)


def test_fetches_that_are_given_up_take_nothing_of_the_budget_with_them(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        known = await world.engine.locate(world.bucket, "k")
        slow = SlowToEnd(world.origin)
        world.bucket.origin._origin = slow
        for _ in range(2 * FETCHES_MAX):
            first = world.engine.fetch(known, 0)
            await asyncio.sleep(0.002)
            first.leave()
            second = world.engine.fetch(known, 0)
            await asyncio.sleep(0)
            second.leave()
        slow.hangs = False
        assert await asyncio.wait_for(world.read(), 60) == bytes(2500)

    run(World(tmp_path), test)


def test_what_is_stored_is_kept_in_memory_no_longer(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        known = await world.engine.locate(world.bucket, "k")
        ticket = world.engine.fetch(known, 0)
        assert await ticket.whole() == bytes(1000)
        await settled(world)
        assert ticket.landing.data == b""
        assert await ticket.whole() is None, "it is in the store"
        late = world.engine.fetch(known, 1)
        late.leave()
        assert await world.read() == bytes(2500)

    run(World(tmp_path), test)


class HalfWay:
    """An origin that sends half of a block, and the rest when it is told to."""

    def __init__(self, origin: FaultyOrigin) -> None:
        self._origin = origin
        self.url = origin.url
        self.counters = origin.counters
        self.stat = origin.stat
        self.list = origin.list
        self.close = origin.close
        self.read = origin.read
        self.go_on = asyncio.Event()

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[bytes, None]:
        data = await self._origin.read(key, start, stop, version)
        yield data[: len(data) // 2]
        await self.go_on.wait()
        yield data[len(data) // 2 :]


def test_what_has_begun_to_come_is_stored_though_nobody_waits(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        known = await world.engine.locate(world.bucket, "k")
        origin = HalfWay(world.origin)
        world.bucket.origin._origin = origin
        ticket = world.engine.fetch(known, 0)
        assert await ticket.more(0) == 500
        ticket.leave()
        await asyncio.sleep(0.01)
        origin.go_on.set()
        again = world.engine.fetch(known, 0)
        assert await again.whole() == bytes(1000)
        again.leave()
        await settled(world)
        assert world.memory.counters.bytes_read == 1000
        assert world.store.has(known, 0)

    run(World(tmp_path), test)


def test_names_of_what_there_is_not_are_remembered_for_a_while(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.read()
        for number in range(50):
            with pytest.raises(ObjectNotFound):
                await world.engine.locate(world.bucket, f"none{number}")
        assert len(world.store.index) == 51
        assert await world.store.forget_absent() == 0
        world.clock.at += 3601
        with pytest.raises(ObjectNotFound):
            await world.engine.locate(world.bucket, "none7")
        assert await world.store.forget_absent() == 49
        assert len(world.store.index) == 2
        assert world.store.find(world.bucket.number, "k") is not None

    run(World(tmp_path), story)


class ClosedOrigin(MemoryOrigin):
    """Says whether it was closed."""

    is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def test_the_origin_of_a_bucket_that_cannot_be_added_is_closed(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        opened: list[ClosedOrigin] = []

        def open_origin(url: str) -> Origin:
            opened.append(ClosedOrigin(url))
            return opened[-1]

        world.engine._origins._open_origin = open_origin
        rules = tuple(PrefixSpec(f"p{n}/", pinned=True) for n in range(256))
        with pytest.raises(ConfigError, match="more than 255 prefixes"):
            world.engine.add_bucket("c", BucketSpec("memory://c", prefixes=rules))
        assert world.engine.add_bucket("d", BucketSpec("memory://d"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [origin.is_closed for origin in opened] == [True, False]
        assert not world.engine._closing

    run(World(tmp_path), test)
