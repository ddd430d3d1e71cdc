"""Why blocks have left a store, as its figures tell it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stoker.cache.store.departures import AGE, LIMIT, LOST, OPERATOR, REASONS, ROOM, Departed
from tests.unit.test_cache_store import BLOCK, Twin, content


def left(twin: Twin, bucket: str = "a") -> dict[str, Departed]:
    departures = twin.store.clearing.departures
    found = {why: departures.of([twin.numbers[bucket]], why) for why in REASONS}
    return {why: one for why, one in found.items() if one.blocks}


def shortest(twin: Twin) -> int | None:
    return twin.store.clearing.departures.shortest_unused_s([twin.numbers["a"]], twin.store.now_s())


def keys_of(size_bytes: int, count: int) -> list[str]:
    return [key for n in range(1000) if len(content("a", key := f"k{n}", 0)) == size_bytes][:count]


def test_what_leaves_for_room_says_how_long_it_was_unused(tmp_path: Path) -> None:
    async def story() -> None:
        for size_bytes in (5000, 300_000):
            twin = Twin(tmp_path / str(size_bytes), 40 * (size_bytes + 4096))
            keys = keys_of(size_bytes, 60)
            for key in keys[:35]:
                assert await twin.put("a", key)
            assert (left(twin), shortest(twin)) == ({}, None)
            twin.clock.at += 500
            for key in keys[35:]:
                assert await twin.put("a", key)
            away = left(twin)
            assert list(away) == [ROOM]
            put_bytes = 60 * size_bytes
            figures = twin.store.index.figures()[twin.numbers["a"]]
            assert away[ROOM].size_bytes == put_bytes - figures.size_bytes
            assert away[ROOM].size_bytes == twin.store.clearing.evicted_bytes
            assert shortest(twin) == 500
            await twin.store.close()

    asyncio.run(story())


def test_what_operators_limits_and_damage_take(tmp_path: Path) -> None:
    async def story() -> None:
        twin = Twin(tmp_path, 10_000_000)
        small, large = keys_of(5000, 1)[0], keys_of(300_000, 3)
        for key in (small, *large):
            assert await twin.put("a", key)
        assert twin.store.give_up(twin.numbers["a"], small) == (1, 5000)
        assert twin.store.give_up(twin.numbers["a"], large[0]) == (5, 300_000)
        assert left(twin) == {OPERATOR: (6, 305_000)}
        known = twin.store.find(twin.numbers["a"], large[1])
        assert known is not None
        piece = twin.store.held(known, 0)
        assert piece is not None
        twin.store.clearing.lose(piece)
        assert left(twin) == {OPERATOR: (6, 305_000), LOST: (1, BLOCK)}
        await twin.store.close()
        twin.limit_bytes = 400_000
        twin.open()
        await twin.store.clearing.shrink()
        away = left(twin)
        assert list(away) == [LIMIT]
        assert away[LIMIT].size_bytes >= 600_000 - BLOCK - 400_000
        assert shortest(twin) is None, "a limit that is lower says nothing of how large it should be"
        await twin.store.close()

    asyncio.run(story())


def test_what_is_kept_for_a_time_only(tmp_path: Path) -> None:
    async def story() -> None:
        twin = Twin(tmp_path, 10_000_000)
        small, large = keys_of(5000, 2), keys_of(300_000, 1)
        for key in (*small, *large):
            assert await twin.put("a", key)
        twin.store.open_bucket("a", "memory://a", policy="lru", evict_after_s=100.0)
        twin.clock.at += 200
        await twin.store.clearing.give_up_old()
        assert left(twin) == {AGE: (7, 310_000)}
        assert shortest(twin) is None
        await twin.store.close()

    asyncio.run(story())
