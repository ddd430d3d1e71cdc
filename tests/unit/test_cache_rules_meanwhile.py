"""Rules and pins that come and go while a store is at work: what is counted stays what is used."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stoker.base.rng import Rng
from stoker.cache.store.known import Known
from stoker.cache.store.lots import PrefixRule
from stoker.cache.store.store import Store
from stoker.errors import EnvironmentProblem
from tests.clocks import HandClock

BLOCK = 128 * 1024
PINNED = [PrefixRule("p/", 0, True)]


class Slowed:
    """A store whose writes wait in their thread until they may go on."""

    def __init__(self, folder: Path, limit_bytes: int = 64 << 20) -> None:
        self.store = Store(folder, limit_bytes, BLOCK, HandClock(), Rng(1))
        self.bucket = self.store.open_bucket("b", "memory://b").number
        self.begun = threading.Event()
        self.goes = threading.Event()
        self.is_full = False
        self._write = self.store.files.write
        self.store.files.write = self._write_slowly  # type: ignore[method-assign]

    def _write_slowly(self, number: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        self.begun.set()
        assert self.goes.wait(30)
        if self.is_full:
            raise EnvironmentProblem("no room")
        self._write(number, offset, data)

    def open(self, rules: list[PrefixRule]) -> None:
        self.store.open_bucket("b", "memory://b", rules=rules)

    def learn(self, key: str, version: str = "v", size_bytes: int = 4 * BLOCK) -> Known:
        return self.store.learn(self.bucket, key, version, size_bytes)

    async def begin(self, known: Known, block: int = 0) -> asyncio.Task[bool]:
        """Begin to write a block; returns while it is written."""
        self.begun.clear()
        task = asyncio.ensure_future(self.store.put(known, block, bytes(BLOCK)))
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
        slowed.is_full = True
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
