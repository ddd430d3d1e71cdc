"""Lots that are a small part of their bucket: what leaves is drawn by chance, and chance finds nothing in them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from stoker.base.rng import Rng
from stoker.cache.store.lots import PrefixRule
from stoker.cache.store.store import Store
from tests.clocks import HandClock

BLOCK = 16 * 1024
BLOCKS = 5
SIZE_BYTES = BLOCKS * BLOCK
OTHERS = 1200
FEW = 10


class Shop:
    """A store of large objects; `looks`: how often all were looked through, which takes a tenth of a second."""

    def __init__(self, folder: Path, limit_bytes: int, rules: Sequence[PrefixRule]) -> None:
        self.clock = HandClock()
        self.looks = 0
        self.store = Store(folder, limit_bytes, BLOCK, self.clock, Rng(1))
        self.open(rules)
        look = self.store.clearing._lot_files._look

        def count(*arguments: object) -> object:
            self.looks += 1
            self.clock.at += 0.1
            return look(*arguments)  # type: ignore[arg-type]

        self.store.clearing._lot_files._look = count  # type: ignore[method-assign, assignment]

    def open(self, rules: Sequence[PrefixRule]) -> None:
        self.bucket = self.store.open_bucket("b", "memory://b", rules=rules).number

    async def put(self, key: str) -> int:
        """How many of its blocks are stored."""
        known = self.store.learn(self.bucket, key, "v", SIZE_BYTES)
        return sum([await self.store.put(known, n, bytes(BLOCK)) for n in range(BLOCKS)])

    def held(self, key: str) -> int:
        known = self.store.find(self.bucket, key)
        return 0 if known is None else sum(self.store.has(known, n) for n in range(BLOCKS))

    def used(self, key: str) -> int:
        """What the lot uses that a key is counted in."""
        return self.store.room.used_by(self.store.holdings.lot_of(self.bucket, key))


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 100))


def test_a_small_quota_is_filled_anew_as_a_large_one_is(tmp_path: Path) -> None:
    async def test() -> None:
        shop = Shop(tmp_path, 256 << 20, [PrefixRule("q/", FEW * SIZE_BYTES)])
        for n in range(OTHERS):
            assert await shop.put(f"o/{n}") == BLOCKS
        for n in range(FEW):
            assert await shop.put(f"q/{n}") == BLOCKS
        for n in range(FEW, 10 * FEW):
            shop.clock.at += 10
            assert await shop.put(f"q/{n}") == BLOCKS
            assert shop.used("q/") <= FEW * SIZE_BYTES
        assert shop.used("q/") == FEW * SIZE_BYTES
        assert sum(shop.held(f"q/{n}") for n in range(FEW)) == 0, "the oldest have left"
        assert shop.looks == 1, "what comes later is known"
        assert shop.store.room.used_bytes == (OTHERS + FEW) * SIZE_BYTES
        for n in range(10 * FEW):
            shop.store.give_up(shop.bucket, f"q/{n}")
        assert shop.used("q/") == 0
        assert not any(shop.store.large_files.of_lots.values())
        await shop.store.close()

    run(test)


def test_what_is_not_pinned_leaves_where_nearly_all_is(tmp_path: Path) -> None:
    async def test() -> None:
        shop = Shop(tmp_path, (OTHERS + 2 * FEW) * SIZE_BYTES, [PrefixRule("o/", 0, True)])
        for n in range(OTHERS):
            assert await shop.put(f"o/{n}") == BLOCKS
        for n in range(10 * FEW):
            shop.clock.at += 10
            assert await shop.put(f"x/{n}") == BLOCKS
        assert sum(shop.held(f"o/{n}") for n in range(OTHERS)) == OTHERS * BLOCKS
        await shop.store.close()

    run(test)


@pytest.mark.parametrize("prefix", ["q/", "q/1"])
def test_rules_that_change_have_all_looked_through_again(tmp_path: Path, prefix: str) -> None:
    async def test() -> None:
        shop = Shop(tmp_path, 256 << 20, [PrefixRule("q/", FEW * SIZE_BYTES)])
        for n in range(OTHERS):
            assert await shop.put(f"o/{n}") == BLOCKS
        for n in range(100, 100 + 2 * FEW):
            assert await shop.put(f"q/{n}") == BLOCKS
        assert shop.looks == 1
        shop.open([PrefixRule(prefix, FEW * SIZE_BYTES)])
        shop.clock.at += 100
        for n in range(120, 120 + 2 * FEW):
            shop.clock.at += 10
            assert await shop.put(f"q/{n}") == BLOCKS
        assert shop.looks == 2
        assert shop.used("q/1") == FEW * SIZE_BYTES
        await shop.store.close()

    run(test)


def test_where_there_is_nothing_to_find_looking_takes_little_of_the_time(tmp_path: Path) -> None:
    async def test() -> None:
        shop = Shop(tmp_path, 256 << 20, [PrefixRule("q/", SIZE_BYTES)])
        for n in range(OTHERS):
            assert await shop.put(f"o/{n}") == BLOCKS
        lot = shop.store.holdings.lot_of(shop.bucket, "q/x")
        shop.store.room.take(lot, SIZE_BYTES)  # as for what is being written
        began = shop.clock.at
        while shop.clock.at < began + 100:
            shop.clock.at += 1
            assert await shop.put("q/x") == 0
        assert 5 <= shop.looks <= 15
        shop.store.room.give(lot, SIZE_BYTES)
        assert await shop.put("q/x") == BLOCKS
        await shop.store.close()

    run(test)
