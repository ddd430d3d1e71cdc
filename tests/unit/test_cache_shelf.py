"""The shelf against a naive twin, and what happens to blocks that are being served."""

from __future__ import annotations

import asyncio
import zlib

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.clock import SystemClock
from stoker.cache.layout import BlockId
from stoker.cache.store.memory import MemoryStore
from stoker.cache.store.shelf import Shelf

SIZES = [10, 200, 3000, 70_000]
moves = st.lists(
    st.tuples(st.sampled_from(["put", "get", "drop", "pin", "unpin"]), st.integers(0, 7)), max_size=80
)


def block_of(number: int) -> BlockId:
    return BlockId("ub"[number % 2], f"k{number}", "v", 0)


def content_of(number: int) -> bytes:
    return bytes([number]) * SIZES[number % 4]


def policy_of(bucket: str) -> str:
    return "uniform" if bucket == "u" else "lru"


@settings(max_examples=200, deadline=None)
@given(moves, st.integers(0, 150_000), st.integers(0, 4000))
def test_a_shelf_serves_only_what_was_put_and_keeps_its_limits(
    todo: list[tuple[str, int]], limit: int, hot: int
) -> None:
    async def whole() -> None:
        shelf = Shelf(MemoryStore(), limit, hot, policy_of, SystemClock())
        pins: dict[int, list] = {}
        for move, number in todo:
            held = shelf.find(block_of(number))
            if move == "put":
                put = await shelf.put(block_of(number), content_of(number))
                assert put is None or put.crc == zlib.crc32(content_of(number))
            elif move == "drop":
                shelf.discard(block_of(number))
                assert shelf.find(block_of(number)) is None
            elif move == "pin" and held is not None:
                shelf.pin(held)
                pins.setdefault(number, []).append(held)
            elif move == "unpin" and pins.get(number):
                shelf.unpin(pins[number].pop())
            elif held is not None:
                assert shelf.bytes_of(held) == content_of(number)
            assert shelf.held_bytes <= limit
        for number, taken in pins.items():
            for held in taken:
                assert shelf.bytes_of(held) == content_of(number)
                shelf.unpin(held)

    asyncio.run(whole())


def test_a_block_that_is_dropped_while_served_leaves_with_its_last_reader() -> None:
    async def whole() -> None:
        shelf = Shelf(MemoryStore(), 1000, 0, policy_of, SystemClock())
        held = await shelf.put(block_of(0), content_of(0))
        assert held is not None
        shelf.pin(held)
        assert not shelf.discard(block_of(0))
        assert shelf.find(block_of(0)) is None
        assert shelf.held_bytes == 10
        shelf.unpin(held)
        assert shelf.held_bytes == 0

    asyncio.run(whole())
