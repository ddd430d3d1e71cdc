"""What one server holds of blobs only grows newer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cache.blobs.clock import HybridClock
from stoker.cache.server.blobs.buckets import NOTE, BlobBucket, BlobBucketSpec
from stoker.cache.server.blobs.flushing import Flushing
from stoker.cache.server.blobs.holding import Holding, NoRoom
from stoker.cache.store.store import Store
from stoker.errors import CacheUnavailable, EnvironmentProblem
from tests.unit.full_disk import no_file_may_exceed


@asynccontextmanager
async def held_in(folder: Path) -> AsyncIterator[tuple[Store, Holding, HybridClock, BlobBucket]]:
    store = Store(folder, 1 << 24, 1 << 20, SystemClock(), Rng(1))
    await store.start()
    clock = HybridClock("a")
    bucket = BlobBucket("p", store.open_bucket("p", NOTE).number, BlobBucketSpec(1 << 24))
    yield store, Holding(store, clock), clock, bucket
    await store.close()


async def body(data: bytes) -> AsyncIterator[bytes]:
    yield data


def test_an_older_version_does_not_come_over_a_newer_one(tmp_path: Path) -> None:
    """What another server holds may be on its way while a newer one is pushed."""

    async def story() -> None:
        async with held_in(tmp_path) as (_, holding, clock, bucket):
            older, newer = clock.next(100.0), clock.next(100.0)
            await holding.write(bucket, "k", newer, 3, body(b"new"))
            with pytest.raises(CacheUnavailable, match="newer version"):
                await holding.write(bucket, "k", older, 3, body(b"old"))
            known = holding.known(bucket, "k")
            assert known is not None
            assert known.version == str(newer)
            assert holding.is_whole(known)

    asyncio.run(story())


def test_what_cannot_be_written_down_leaves_what_was_known(tmp_path: Path) -> None:
    """A server that was one of two to know of a version must not forget it because its disk is full."""

    async def story() -> None:
        async with held_in(tmp_path) as (store, holding, clock, bucket):
            first, second = clock.next(100.0), clock.next(101.0)
            await holding.write(bucket, "k", first, 3, body(b"old"))
            with no_file_may_exceed(store.index.file_bytes()):
                with pytest.raises(NoRoom):
                    holding.hear(bucket, "k", second, 3)
                with pytest.raises(NoRoom):
                    holding.remove(bucket, "k", second)
                holding.give_up(bucket, "k", first, 102.0)
            said = holding.said(bucket, "k")
            assert (said.version, said.is_held) == (str(first), True)

    asyncio.run(story())


def test_an_index_that_cannot_be_read_knows_nothing_for_sure(tmp_path: Path) -> None:
    async def story() -> None:
        async with held_in(tmp_path) as (_, holding, clock, bucket):
            holding.hear(bucket, "k", clock.next(100.0), 3)
            os.truncate(next(tmp_path.glob("**/index*")), 0)
            with pytest.raises(EnvironmentProblem):
                holding.said(bucket, "k")

    asyncio.run(story())


def test_those_who_wait_for_the_disk_wait_together() -> None:
    async def story() -> None:
        begun: list[int] = []
        written = 0
        goes_on = asyncio.Event()

        async def sync() -> None:
            begun.append(written)
            await goes_on.wait()

        flushing = Flushing(sync)

        async def write() -> int:
            nonlocal written
            written += 1
            mine = written
            await flushing.flush()
            assert any(seen >= mine for seen in begun)
            return mine

        writing = [asyncio.create_task(write())]
        while not begun:  # noqa: ASYNC110
            await asyncio.sleep(0)
        writing += [asyncio.create_task(write()) for _ in range(50)]
        while written < len(writing):  # noqa: ASYNC110
            await asyncio.sleep(0)
        goes_on.set()
        await asyncio.gather(*writing)
        assert begun == [1, 51]

        async def fail() -> None:
            raise OSError("no space")

        with pytest.raises(EnvironmentProblem, match="no space"):
            await Flushing(fail).flush()

    asyncio.run(story())
