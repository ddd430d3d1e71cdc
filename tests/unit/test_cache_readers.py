"""Files that were handed out whole, and given up while somebody has them open."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stoker._native import Piece
from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cache.store.known import Known
from stoker.cache.store.readers import ASKED_EVERY_S
from stoker.cache.store.store import Store

MIB = 1024 * 1024
BLOCK = 2 * MIB


def run(folder: Path, limit_bytes: int, test: Callable[[Store], Awaitable[None]]) -> None:
    async def whole() -> None:
        store = Store(folder, limit_bytes, BLOCK, SystemClock(), Rng(1))
        store.open_bucket("b", "origin")
        await store.start()
        try:
            await test(store)
        finally:
            await store.close()

    asyncio.run(whole())


async def put(store: Store, key: str, blocks: int = 1) -> Known | None:
    """Store a large object; None: it does not fit."""
    known = store.learn(store.holdings.open_bucket("b", "origin"), key, "v", blocks * BLOCK)
    for block in range(blocks):
        if not await store.put(known, block, os.urandom(BLOCK)):
            return None
    return known


def hand_out(store: Store, known: Known) -> int:
    piece = piece_of(store, known)
    store.large_files.hand_out(piece.container, is_whole=True)
    return os.open(store.files.sending.path(piece.container), os.O_RDONLY)


def piece_of(store: Store, known: Known) -> Piece:
    piece = store.held(known, 0)
    assert piece is not None
    return piece


@pytest.mark.parametrize("is_mapped", [False, True])
def test_what_is_given_up_takes_room_until_nobody_has_it_open(tmp_path: Path, is_mapped: bool) -> None:
    async def test(store: Store) -> None:
        first = await put(store, "first", 4)
        assert first is not None
        fd = hand_out(store, first)
        mapped = mmap.mmap(fd, BLOCK, access=mmap.ACCESS_READ) if is_mapped else None
        store.give_up(first.bucket, first.key)
        assert store.room.used_bytes == 0
        assert store.room.kept_bytes == 4 * BLOCK
        # The limit holds for what is on the disk.
        assert await put(store, "second", 4) is not None
        assert await put(store, "third", 3) is not None
        assert store.room.used_bytes + store.room.kept_bytes <= 10 * BLOCK
        assert os.fstat(fd).st_nlink == 0
        os.close(fd)
        store.large_files.mend()
        if mapped is not None:
            assert store.room.kept_bytes == 4 * BLOCK, "who has mapped it looks at it"
            mapped.close()
            store.large_files.mend()
        assert store.room.kept_bytes == 0

    run(tmp_path, 10 * BLOCK, test)


def test_what_nobody_has_open_takes_none(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        known = await put(store, "k", 2)
        assert known is not None
        os.close(hand_out(store, known))
        store.give_up(known.bucket, known.key)
        store.large_files.mend()
        assert (store.room.used_bytes, store.room.kept_bytes) == (0, 0)

    run(tmp_path, 10 * BLOCK, test)


def test_what_others_have_open_leaves_last(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        known = [await put(store, f"k{number}") for number in range(8)]
        assert all(known)
        fds = [hand_out(store, one) for one in known[:4] if one is not None]
        for number in range(20):
            assert await put(store, f"more{number}") is not None
        for one in known[:4]:
            assert one is not None
            assert store.has(one, 0)
        assert store.room.kept_bytes == 0
        for fd in fds:
            os.close(fd)

    run(tmp_path, 10 * BLOCK, test)


def test_where_all_is_open_the_limit_holds(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        fds = []
        for number in range(30):
            known = await put(store, f"k{number}")
            if known is not None:
                fds.append(hand_out(store, known))
            assert store.room.used_bytes + store.room.kept_bytes <= 10 * BLOCK
        for fd in fds:
            os.close(fd)
        store.large_files.mend()
        assert store.room.kept_bytes == 0

    run(tmp_path, 10 * BLOCK, test)


def test_the_kernel_is_asked_seldom(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        known = await put(store, "k")
        assert known is not None
        readers, container = store.large_files.readers, piece_of(store, known).container
        assert not readers.has(container, 5.0), "it was not handed out"
        fd = hand_out(store, known)
        assert readers.has(container, 5.0)
        os.close(fd)
        assert readers.has(container, 5.0 + ASKED_EVERY_S / 2)
        assert not readers.has(container, 5.0 + ASKED_EVERY_S)

    run(tmp_path, 10 * BLOCK, test)
