"""What is written anew of sparse segments, where some of it cannot be."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from stoker.base.rng import Rng
from stoker.cache.store.store import Store
from tests.clocks import HandClock

BLOCK = 128 * 1024
SIZE_BYTES = 60_000


@pytest.mark.parametrize("harm", ["changed", "cut off"])
def test_what_is_not_what_it_was_keeps_no_segment_from_being_written_anew(tmp_path: Path, harm: str) -> None:
    async def test() -> None:
        clock = HandClock()
        store = Store(tmp_path, 64 << 20, BLOCK, clock, Rng(1))
        number = store.open_bucket("b", "memory://b").number
        places: dict[int, list[str]] = defaultdict(list)
        while len(store.holdings.segments) < 4:
            key = f"k{sum(map(len, places.values()))}"
            known = store.learn(number, key, "v", SIZE_BYTES)
            assert await store.put(known, 0, key.encode() * (SIZE_BYTES // len(key)))
            piece = store.held(known, 0)
            assert piece is not None
            places[piece.container].append(key)
        worse, better = list(places)[:2]
        for key in places[worse][1:] + places[better][2:]:
            store.forget(number, key)
        path = Path(store.files.sending.path(worse))
        path.write_bytes(bytes(path.stat().st_size) if harm == "changed" else b"")
        for _ in range(4):
            clock.at += 60
            await store.clearing.rewrite_sparse()
        assert worse not in store.holdings.segments
        assert better not in store.holdings.segments
        bad = store.find(number, places[worse][0])
        assert bad is not None
        assert not store.has(bad, 0)
        for key in places[better][:2]:
            known = store.learn(number, key, "v", SIZE_BYTES)
            piece = store.held(known, 0)
            assert piece is not None
            assert await store.read(piece) == key.encode() * (SIZE_BYTES // len(key))
        await store.close()

    asyncio.run(asyncio.wait_for(test(), 60))
