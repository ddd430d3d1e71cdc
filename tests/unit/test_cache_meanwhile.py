"""What comes while a store is at work: other rules and pins, other versions, and what is to be kept."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stoker._native import Index
from stoker.base.rng import Rng
from stoker.cache.store.block_writer import BlockWriter
from stoker.cache.store.known import Known
from stoker.cache.store.lots import PrefixRule
from stoker.cache.store.rewriting import AT_ONCE_OBJECTS
from stoker.cache.store.store import Store
from tests.clocks import HandClock

BLOCK = 128 * 1024
PINNED = [PrefixRule("p/", 0, True)]


T = TypeVar("T")


class Held:
    """An index of which a call returns once it may."""

    def __init__(self, index: Index, name: str, goes: threading.Event) -> None:
        self._index = index
        self._name = name
        self._goes = goes

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._index, name)
        if name != self._name:
            return real

        def call(*arguments: Any) -> Any:
            found = real(*arguments)
            assert self._goes.wait(30)
            return found

        return call

    def __len__(self) -> int:
        return AT_ONCE_OBJECTS + 1  # where it is asked in a thread, meanwhile other things may happen


class SlowWriter(BlockWriter):
    """Its writes wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.goes = threading.Event()
        self.is_full = False

    async def write(self, fd: int, offset: int, data: bytes | bytearray | memoryview) -> int:
        self.begun.set()
        assert await asyncio.to_thread(self.goes.wait, 30)
        if self.is_full:
            os.close(fd)
            raise OSError(errno.ENOSPC, "no room")
        return await super().write(fd, offset, data)


class Slowed:
    """A store whose writes wait until they may go on."""

    def __init__(self, folder: Path, limit_bytes: int = 64 << 20) -> None:
        self.clock = HandClock()
        self.store = Store(folder, limit_bytes, BLOCK, self.clock, Rng(1))
        self.bucket = self.store.open_bucket("b", "memory://b").number
        self.store.holdings.writer = self.writer = SlowWriter()
        self.begun, self.goes = self.writer.begun, self.writer.goes

    def open(self, rules: list[PrefixRule], evict_after_s: float = 0.0) -> None:
        self.store.open_bucket("b", "memory://b", rules=rules, evict_after_s=evict_after_s)

    def learn(self, key: str, version: str = "v", size_bytes: int = 4 * BLOCK) -> Known:
        return self.store.learn(self.bucket, key, version, size_bytes)

    async def put(self, key: str, size_bytes: int = 60_000) -> Known:
        known = self.learn(key, size_bytes=size_bytes)
        assert await self.store.put(known, 0, bytes(min(BLOCK, size_bytes)))
        return known

    async def fill(self) -> list[Known]:
        """Small objects until there is an open segment beside one that is full."""
        put: list[Known] = []
        while len(self.store.holdings.segments) < 2:
            put.append(await self.put(f"old{len(put)}"))
        return put

    async def begin(self, known: Known, block: int = 0) -> asyncio.Task[bool]:
        """Begin to write a block; returns while it is written."""
        self.begun.clear()
        task = asyncio.ensure_future(self.store.put(known, block, bytes(min(BLOCK, known.size_bytes))))
        await asyncio.to_thread(self.begun.wait, 30)
        return task

    def used(self) -> dict[str, int]:
        """By prefix; what is of none that the bucket has now is under a question mark."""
        room, lots = self.store.room, self.store.holdings.lots[self.bucket].lots
        used = {lot.prefix: room.used_by(lot.number) for lot in lots}
        used["?"] = room.used_bytes - sum(used.values())
        return {prefix: size_bytes for prefix, size_bytes in used.items() if size_bytes}


def run(folder: Path, test: Callable[[Slowed], Awaitable[None]]) -> None:
    async def whole() -> None:
        slowed = Slowed(folder)
        try:
            await test(slowed)
        finally:
            slowed.goes.set()
            await slowed.store.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_a_block_is_counted_by_the_rules_that_came_while_it_was_written(tmp_path: Path) -> None:
    async def test(slowed: Slowed) -> None:
        known = slowed.learn("p/x")
        writing = await slowed.begin(known)
        slowed.open(PINNED)
        slowed.goes.set()
        assert await writing
        assert slowed.used() == {"p/": BLOCK}
        assert slowed.store.give_up(slowed.bucket, "p/x") == (1, BLOCK)
        assert slowed.used() == {}

    run(tmp_path, test)


@pytest.mark.parametrize("is_changed_first", [False, True])
def test_a_version_and_rules_that_change_while_a_block_is_written_leave_nothing(
    tmp_path: Path, is_changed_first: bool
) -> None:
    async def test(slowed: Slowed) -> None:
        slowed.goes.set()
        known = slowed.learn("p/x")
        assert await slowed.store.put(known, 1, bytes(BLOCK))
        slowed.goes.clear()
        writing = await slowed.begin(known)
        if is_changed_first:
            slowed.learn("p/x", "other")
            slowed.open(PINNED)
        else:
            slowed.open(PINNED)
            slowed.learn("p/x", "other")
        slowed.goes.set()
        assert not await writing
        assert slowed.used() == {}

    run(tmp_path, test)


def test_what_waits_to_leave_is_given_back_where_it_was_counted(tmp_path: Path) -> None:
    async def test(slowed: Slowed) -> None:
        slowed.goes.set()
        known = slowed.learn("p/x")
        assert await slowed.store.put(known, 0, bytes(BLOCK))
        held = slowed.store.held(known, 0)
        assert held is not None
        slowed.store.large_files.hand_out(held.container)
        slowed.writer.is_full = True
        assert not await slowed.store.put(known, 1, bytes(BLOCK))
        assert slowed.used() == {"": 2 * BLOCK}, "of a file that somebody has open nothing is given back"
        slowed.open(PINNED)
        assert slowed.used() == {"": BLOCK, "p/": BLOCK}
        assert slowed.store.give_up(slowed.bucket, "p/x") == (1, BLOCK)
        assert slowed.used() == {}

    run(tmp_path, test)


def test_pins_that_were_taken_off_take_no_place(tmp_path: Path) -> None:
    async def test(slowed: Slowed) -> None:
        slowed.goes.set()
        for n in range(300):
            size_bytes = 4 * BLOCK if n % 2 else 1000
            slowed.open([PrefixRule(f"p{n}/", 0, True)])
            assert await slowed.store.put(
                slowed.learn(f"p{n}/x", size_bytes=size_bytes), 0, bytes(min(BLOCK, size_bytes))
            )
            assert slowed.used().keys() <= {"", f"p{n}/"}
            assert len(slowed.used()) == min(2, n + 1)
        slowed.open([])
        assert slowed.used() == {"": slowed.store.room.used_bytes}

    run(tmp_path, test)


@pytest.mark.parametrize("size_bytes", [BLOCK, 4 * BLOCK])
def test_what_is_written_while_its_pin_is_taken_off_is_pinned_no_more(
    tmp_path: Path, size_bytes: int
) -> None:
    """A small object lies in a segment of which the index knows nothing until it is written."""

    async def test(slowed: Slowed) -> None:
        slowed.open(PINNED)
        known = slowed.learn("p/x", size_bytes=size_bytes)
        writing = await slowed.begin(known)
        slowed.open([])
        slowed.open([PrefixRule("q/", 0, True)])
        slowed.goes.set()
        assert await writing
        assert slowed.used() == {"": BLOCK}

    run(tmp_path, test)


async def give_up_old_while(slowed: Slowed, call: str, what: Callable[[], Awaitable[T]]) -> T:
    """Give up what is old, and do something while its first such call of the index is under way."""
    goes = threading.Event()

    async def soon() -> T:
        await asyncio.sleep(0)
        try:
            return await what()
        finally:
            goes.set()

    held = slowed.store.holdings
    held.index = Held(slowed.store.index, call, goes)  # type: ignore[assignment]
    task = asyncio.ensure_future(soon())
    await slowed.store.clearing.give_up_old()
    held.index = slowed.store.index
    return await task


def test_what_comes_while_what_is_old_leaves_stays(tmp_path: Path) -> None:
    async def test(slowed: Slowed) -> None:
        slowed.goes.set()
        slowed.open([], evict_after_s=100.0)
        old = await slowed.fill()
        slowed.clock.at += 200
        fresh = await give_up_old_while(slowed, "lose_container", lambda: slowed.put("fresh"))
        assert slowed.store.has(fresh, 0)
        assert not slowed.store.has(old[0], 0)
        slowed.clock.at += 200
        await slowed.store.clearing.give_up_old()
        assert slowed.used() == {}

    run(tmp_path, test)


def test_what_is_being_written_while_what_is_old_leaves_is_counted(tmp_path: Path) -> None:
    async def test(slowed: Slowed) -> None:
        slowed.goes.set()
        slowed.open([], evict_after_s=100.0)
        await slowed.fill()
        slowed.clock.at += 200
        slowed.goes.clear()
        known = slowed.learn("fresh", size_bytes=100_000)
        writing = await give_up_old_while(slowed, "lose_container", lambda: slowed.begin(known, 0))
        slowed.goes.set()
        assert await writing
        assert slowed.store.has(known, 0)
        assert slowed.used()[""] >= 100_000
        slowed.clock.at += 200
        await slowed.store.clearing.give_up_old()
        assert slowed.used() == {}

    run(tmp_path, test)


def test_a_file_that_is_written_to_while_what_is_old_leaves_stays(tmp_path: Path) -> None:
    async def test(slowed: Slowed) -> None:
        slowed.goes.set()
        slowed.open([], evict_after_s=100.0)
        known = await slowed.put("large", 4 * BLOCK)
        gone = await slowed.put("gone", 4 * BLOCK)
        slowed.clock.at += 200
        assert await give_up_old_while(slowed, "containers", lambda: slowed.store.put(known, 1, bytes(BLOCK)))
        assert slowed.store.has(known, 1)
        assert not slowed.store.has(gone, 0)

    run(tmp_path, test)


def test_what_is_pinned_while_what_is_old_leaves_stays(tmp_path: Path) -> None:
    async def test(slowed: Slowed) -> None:
        slowed.goes.set()
        slowed.open([], evict_after_s=100.0)
        old = await slowed.fill()

        async def pin() -> None:
            slowed.open([PrefixRule("old", 0, True)], evict_after_s=100.0)

        slowed.clock.at += 200
        await give_up_old_while(slowed, "lose_container", pin)
        assert slowed.store.has(old[-1], 0)
        assert not slowed.store.has(old[0], 0)

    run(tmp_path, test)


def test_what_was_pinned_later_stays_though_its_segment_is_old(tmp_path: Path) -> None:
    async def test(slowed: Slowed) -> None:
        slowed.goes.set()
        pinned = await slowed.put("p/x")
        old = await slowed.fill()
        slowed.open(PINNED, evict_after_s=100.0)
        slowed.clock.at += 200
        await slowed.store.clearing.give_up_old()
        assert slowed.store.has(pinned, 0)
        assert not any(slowed.store.has(known, 0) for known in old)

    run(tmp_path, test)


def test_a_segment_in_which_all_is_pinned_stays_as_it_is(tmp_path: Path) -> None:
    async def test(slowed: Slowed) -> None:
        slowed.goes.set()
        slowed.open(PINNED, evict_after_s=100.0)
        pinned = [await slowed.put(f"p/{n}") for n in range(3)]
        gone = await slowed.put("q")
        for _ in range(3):
            slowed.clock.at += 200
            await slowed.store.clearing.give_up_old()
        assert all(slowed.store.has(known, 0) for known in pinned)
        assert not slowed.store.has(gone, 0)
        assert slowed.store.clearing.rewritten_bytes == 0
        slowed.open([], evict_after_s=100.0)
        slowed.clock.at += 200
        await slowed.store.clearing.give_up_old()
        assert not any(slowed.store.has(known, 0) for known in pinned)
        assert slowed.used() == {}

    run(tmp_path, test)
