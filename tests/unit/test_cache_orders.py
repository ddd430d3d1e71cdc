"""What a server takes in of what is announced, where there is too much of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from stoker.base.rng import Rng
from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.orders import Allowance, Orders
from stoker.cache.server.peers import Peers
from stoker.cache.store.store import Store
from stoker.errors import ConfigError
from stoker.wire.cache_api import BucketSpec, FleetMember
from stoker.wire.cache_orders import Announced, Announcement
from tests.clocks import HandClock
from tests.unit.test_cache_summaries import World, run

BLOCK = 1000
ALLOWED = Allowance(reads=100, keys=40, streams=6)
MINE = "token-1"
OTHERS = "token-2"


def said(stream: str, reads: int, keys: int = 10, **more: int) -> Announcement:
    names = [f"{stream}-{number}" for number in range(keys)]
    numbers = np.arange(reads, dtype="<u4") % max(1, keys)
    return Announcement(stream, keys=names, reads=numbers.tobytes(), **more)


def told(folder: Path, story: Callable[[Orders, Bucket], Awaitable[None]]) -> None:
    async def run() -> None:
        clock, memory = HandClock(), MemoryOrigin("m")
        store = Store(folder, 200_000, BLOCK, clock, Rng(1))
        alone = Fleet(FleetMember("me", "http://me:1"), None, Peers(None), clock, Rng(3))
        engine = Engine(store, alone, lambda url: memory, clock, Rng(2))
        engine.add_bucket("b", BucketSpec("memory://m"))
        orders = Orders(engine, clock.now, ALLOWED)
        try:
            await story(orders, engine.bucket("b"))
        finally:
            await orders.stop()
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_reads_of_one_token_leave_room_for_those_of_others(tmp_path: Path) -> None:
    async def story(orders: Orders, bucket: Bucket) -> None:
        assert await orders.announce(bucket, said("a", 40), MINE) == Announced(10, 40)
        assert await orders.announce(bucket, said("b", 20), MINE) == Announced(10, 0), (
            "it is said again later"
        )
        assert await orders.announce(bucket, said("c", 50, keys=5), OTHERS) == Announced(5, 50)
        assert await orders.announce(bucket, said("d", 20, keys=0)) == Announced(0, 0)
        await orders.announce(bucket, Announcement("a", cursor=30), MINE)
        assert await orders.announce(bucket, said("b", 20), MINE) == Announced(10, 20), "there is room by now"
        assert (await orders.announce(bucket, said("d", 15, keys=10))).stop == 15, (
            "who may do all has no part"
        )

    told(tmp_path, story)


def test_who_has_announced_its_part_of_objects_or_streams_is_told_what_to_do(tmp_path: Path) -> None:
    async def story(orders: Orders, bucket: Bucket) -> None:
        await orders.announce(bucket, said("a", 1, keys=20), MINE)
        with pytest.raises(
            ConfigError, match="more than 20 objects are announced by token-1: withdraw streams"
        ):
            await orders.announce(bucket, said("b", 1, keys=1), MINE)
        await orders.announce(bucket, said("c", 1, keys=19), OTHERS)
        with pytest.raises(ConfigError, match="more than 40 objects are announced: withdraw"):
            await orders.announce(bucket, said("d", 1, keys=2))
        await orders.announce(bucket, Announcement("e"), MINE)
        with pytest.raises(ConfigError, match="more than 3 streams are announced by token-1"):
            await orders.announce(bucket, Announcement("f"), MINE)
        assert orders.withdraw(bucket, "a", OTHERS) == Announced(0, 0), "it is another tenant's"
        orders.withdraw(bucket, "a", MINE)
        assert await orders.announce(bucket, said("f", 1, keys=20), MINE) == Announced(20, 1)

    told(tmp_path, story)


def test_what_tenants_call_the_same_is_not_the_same(tmp_path: Path) -> None:
    async def story(orders: Orders, bucket: Bucket) -> None:
        await orders.announce(bucket, Announcement("s", 2**53 - 1, catalog="c", keys=["x"]), OTHERS)
        mine = Announcement("s", 1, catalog="c", keys=["a", "b"], reads=b"\1\0\0\0")
        assert await orders.announce(bucket, mine, MINE) == Announced(2, 1, 1)
        assert len(orders.status(bucket, MINE).streams) == 1
        assert len(orders.status(bucket).streams) == 2
        orders.withdraw(bucket, "s", OTHERS)
        assert await orders.announce(bucket, Announcement("s", 1, catalog="c"), MINE) == Announced(2, 1, 1)

    told(tmp_path, story)


def test_what_is_looked_at_in_a_fleet_counts_before_it_is_fetched(tmp_path: Path) -> None:
    """As objects prove to be small, more of them are fetched ahead: copies that would be given up again else."""

    async def story(world: World) -> None:
        x = world.servers["x"]
        orders = Orders(x.engine, world.clock.now)
        await orders.announce(x.engine.bucket("b"), said("a", 5000))
        ((name, stream),) = orders.streams().items()
        core = orders.prefetching.core
        assert stream.reach is not None
        assert stream.reach < 100
        for _ in range(100):
            core.came(100)
        window = core.window_reads(1)
        assert window > 1000
        assert len(orders.reads(name, 0, 256)) == 256
        assert stream.reach >= window
        await orders.stop()

    run(World(tmp_path, max_replicas=1), story)
