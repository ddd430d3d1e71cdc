"""What is read next is told to a cache server, which fetches it first and gives up last what is read soonest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.cache.client import orders
from stoker.cache.client.client import CacheClient
from stoker.errors import AccessDenied, ConfigError, ObjectNotFound
from stoker.settings import CacheSettings
from stoker.wire.cache_orders import ORDER_COUNT_MAX, ORDER_READS_MAX, Announced, Announcement
from tests.e2e.cache_helpers import ServerProcess, served

TOKEN = "a-token-for-these-tests"
RECORDS = 400
SIZE = 16_000


def records_in(folder: Path, count: int = RECORDS, size_bytes: int = SIZE) -> list[str]:
    folder.mkdir()
    keys = [f"{number:05d}" for number in range(count)]
    for key in keys:
        (folder / key).write_bytes(os.urandom(size_bytes))
    return keys


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    return records_in(tmp_path / "origin")


@pytest.fixture
def server(tmp_path: Path, keys: list[str]) -> Iterator[ServerProcess]:
    with served(tmp_path / "cache", {"b": str(tmp_path / "origin")}, "--token", TOKEN) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[CacheClient]:
    with CacheClient(server.url, TOKEN) as made:
        yield made


def reads(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<u4").tobytes()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it does not come to be"
        time.sleep(0.02)


def stops(client: CacheClient) -> list[int]:
    """How far each stream is known."""
    return [one.stop for one in orders.orders(client, "b").streams]


def held(client: CacheClient) -> int:
    return client.status().held_blocks


def test_what_is_announced_is_there_before_it_is_read(client: CacheClient, keys: list[str]) -> None:
    told = orders.announce(client, "b", Announcement("s", keys=keys[:50], reads=reads(7, 3, 9)))
    assert told == Announced(50, 3)
    until(lambda: held(client) == 3)
    before = client.status().buckets[0]
    assert len(client.read_many("b", [keys[7], keys[3], keys[9]])) == 3
    after = client.status().buckets[0]
    assert (after.misses, after.origin_bytes) == (before.misses, before.origin_bytes)
    (stream,) = orders.orders(client, "b").streams
    assert (stream.stream, stream.stop, stream.prefetched, stream.prefetched_bytes) == ("s", 3, 3, 3 * SIZE)
    assert orders.withdraw(client, "b", "s").stop == 3
    assert orders.orders(client, "b").streams == []


def test_parts_of_large_objects_are_fetched_block_by_block(tmp_path: Path) -> None:
    block = 4 * 1024 * 1024
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "shard.tar").write_bytes(bytes(5 * block))
    spans = np.array([[10, 20], [3 * block - 5, 3 * block + 5]], dtype="<u8")
    with (
        served(tmp_path / "cache", {"b": str(tmp_path / "origin")}, "--token", TOKEN) as process,
        CacheClient(process.url, TOKEN) as client,
    ):
        said = Announcement("s", keys=["shard.tar"], reads=reads(0, 0), spans=spans.tobytes())
        orders.announce(client, "b", said)
        until(lambda: held(client) == 3)
        assert client.status().buckets[0].origin_bytes == 3 * block


def test_what_a_server_does_not_know_it_says(client: CacheClient, keys: list[str]) -> None:
    """So whoever announces goes on from there, also after the server was started anew."""
    assert orders.announce(client, "b", Announcement("s", reads=reads(0))) == Announced(0, 0)
    assert orders.announce(client, "b", Announcement("s", keys=keys[5:9], first_key=5)) == Announced(0, 0)
    assert orders.announce(client, "b", Announcement("s", keys=keys[:9])) == Announced(9, 0)
    assert orders.announce(client, "b", Announcement("s", keys=keys[5:20], first_key=5)).keys == 20
    assert orders.announce(client, "b", Announcement("s", start=2, reads=reads(1))).stop == 0
    assert orders.announce(client, "b", Announcement("s", reads=reads(1, 2, 3))).stop == 3
    assert orders.announce(client, "b", Announcement("s", start=1, reads=reads(4))).stop == 2
    assert orders.announce(client, "b", Announcement("s", start=2, reads=reads(20))).stop == 2
    assert orders.announce(client, "b", Announcement("s", plan=1)).stop == 0
    late = orders.announce(client, "b", Announcement("s", plan=0, reads=reads(1)))
    assert (late.plan, late.stop) == (1, 0)


def test_streams_share_a_catalog_that_lives_as_long_as_they_do(client: CacheClient, keys: list[str]) -> None:
    orders.announce(client, "b", Announcement("one", catalog="data", keys=keys))
    assert orders.announce(client, "b", Announcement("two", catalog="data", reads=reads(399))).stop == 1
    orders.withdraw(client, "b", "one")
    assert orders.announce(client, "b", Announcement("two", catalog="data")).keys == len(keys)
    orders.withdraw(client, "b", "two")
    assert orders.announce(client, "b", Announcement("three", catalog="data")).keys == 0


def test_a_stream_that_is_not_heard_of_is_forgotten(client: CacheClient, keys: list[str]) -> None:
    orders.announce(client, "b", Announcement("s", keys=keys, reads=reads(1), lease_s=0.5))
    until(lambda: not orders.orders(client, "b").streams)


@pytest.mark.parametrize(
    "said",
    [
        Announcement("s", reads=b"123"),
        Announcement("s", reads=reads(0), spans=b"12345678"),
        Announcement("s", reads=reads(0), spans=np.array([9, 3], dtype="<u8").tobytes()),
        Announcement("s", reads=reads(0), spans=np.array([0, 2**60], dtype="<u8").tobytes()),
        Announcement("s", reads=bytes(4 * (ORDER_READS_MAX + 1))),
        Announcement("s", reads=reads(0, 1), count=3),
        Announcement("s", reads=reads(0, 1), count=3, offsets=reads(1, 1)),
        Announcement("s", reads=reads(0, 1), count=3, offsets=reads(1, 3)),
        Announcement("s", reads=reads(0, 1), count=3, offsets=reads(1)),
        Announcement("s", count=ORDER_COUNT_MAX + 1),
        Announcement("s", keys=["fine", "a\0b"]),
    ],
)
def test_bad_announcements_are_refused_and_change_nothing(
    client: CacheClient, keys: list[str], said: Announcement
) -> None:
    orders.announce(client, "b", Announcement("other", keys=keys, reads=reads(1)))
    with pytest.raises(ConfigError):
        orders.announce(client, "b", said)
    assert orders.announce(client, "b", Announcement("s")).stop == 0
    assert orders.announce(client, "b", Announcement("other")).stop == 1


def test_who_may_not_read_a_bucket_may_not_announce(tmp_path: Path, keys: list[str]) -> None:
    buckets = {"b": str(tmp_path / "origin"), "c": str(tmp_path / "origin")}
    with served(tmp_path / "cache", buckets, "--token", f"{TOKEN}:c") as process:
        client = CacheClient(process.url, TOKEN)
        assert orders.announce(client, "c", Announcement("s", keys=keys, reads=reads(0))).stop == 1
        for ask in (
            lambda: orders.announce(client, "b", Announcement("s")),
            lambda: orders.orders(client, "b"),
            lambda: orders.withdraw(client, "b", "s"),
        ):
            with pytest.raises((AccessDenied, ObjectNotFound)):
                ask()
        client.close()


def epoch(loader: stoker.Loader) -> int:
    return sum(len(batch) for batch in loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_announces_its_epochs(
    tmp_path: Path, server: ServerProcess, client: CacheClient, workers: int
) -> None:
    cache = CacheSettings(server.url, TOKEN, tmp_path / "own", 10**9)
    data = stoker.Dataset("stoker://b/", cache=cache)
    with stoker.Loader(
        data, global_batch_size=32, shuffle=True, num_workers=workers, collate_fn=list
    ) as loader:
        assert epoch(loader) == RECORDS
        until(lambda: stops(client) == [2 * RECORDS])
        assert epoch(loader) == RECORDS
        until(lambda: stops(client) == [3 * RECORDS])
        until(lambda: orders.orders(client, "b").streams[0].cursor == 2 * RECORDS)
        assert client.status().buckets[0].origin_bytes == RECORDS * SIZE
    until(lambda: not orders.orders(client, "b").streams)


def test_a_loader_tells_a_server_that_was_started_anew(tmp_path: Path, keys: list[str]) -> None:
    arguments = (tmp_path / "cache", {"b": str(tmp_path / "origin")}, "--token", TOKEN)
    socket = str(tmp_path / "socket")
    cache = CacheSettings(f"unix://{socket}", TOKEN, tmp_path / "own", 10**9)
    with served(*arguments, "--unix", socket):
        data = stoker.Dataset("stoker://b/", cache=cache)
        loader = stoker.Loader(data, global_batch_size=50, shuffle=True, collate_fn=list)
        batches = iter(loader)
        next(batches)
    with served(*arguments, "--unix", socket) as process, CacheClient(process.url, TOKEN) as client:
        assert sum(len(batch) for batch in batches) == RECORDS - 50
        epoch(loader)
        until(lambda: bool(orders.orders(client, "b").streams))
        until(lambda: orders.orders(client, "b").streams[0].cursor >= RECORDS)
        loader.close()
