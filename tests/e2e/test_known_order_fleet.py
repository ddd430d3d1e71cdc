"""In a fleet what is announced to one server is known to all that own what is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.cache.client import orders
from stoker.cache.client.fleet import FleetClient, open_client
from stoker.cache.maglev import Member, Placement, block_owner_name
from stoker.settings import CacheSettings
from stoker.wire.cache_orders import Announced, Announcement, StreamStatus
from tests.e2e.test_cache_fleet import TOKEN, FleetOfServers, fleet_of
from tests.e2e.test_known_order import RECORDS, SIZE, epoch, reads, records_in, until

pytestmark = pytest.mark.real
NAMES = "abc"
BLOCK = 4 * 1024 * 1024


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    return records_in(tmp_path / "origin")


@pytest.fixture
def fleet(tmp_path: Path, keys: list[str]) -> Iterator[FleetOfServers]:
    with fleet_of(tmp_path, NAMES, str(tmp_path / "origin")) as made:
        yield made


def streams(fleet: FleetOfServers, name: str, *, is_owned: bool = True) -> list[StreamStatus]:
    with fleet.client(name) as client:
        return [one for one in orders.orders(client, "b").streams if one.is_owned == is_owned]


def owned(keys: list[str]) -> dict[str, int]:
    placement = Placement([Member(name) for name in NAMES])
    owners = [placement.owner(block_owner_name("b", key, 0)) for key in keys]
    return {name: sum(owner is not None and owner.name == name for owner in owners) for name in NAMES}


def endpoints(fleet: FleetOfServers) -> str:
    return ",".join(server.url for server in fleet.servers.values())


def all_numbers() -> bytes:
    return reads(*np.random.default_rng(1).permutation(RECORDS).tolist())


def test_owners_fetch_what_a_reader_of_the_fleet_is_going_to_read(
    fleet: FleetOfServers, keys: list[str]
) -> None:
    with open_client(endpoints(fleet), TOKEN) as client:
        said = Announcement("s", keys=keys, reads=all_numbers(), at_owners=True, round=0)
        assert orders.announce(client, "b", said) == Announced(RECORDS, RECORDS)
        until(lambda: fleet.held_blocks() == owned(keys))
        assert fleet.origin_bytes() == RECORDS * SIZE
        client.read_many("b", keys)
        assert fleet.origin_bytes() == RECORDS * SIZE
        orders.announce(client, "b", Announcement("s", start=RECORDS, cursor=300, at_owners=True))
        until(lambda: all(one.cursor == 300 for name in NAMES for one in streams(fleet, name)))
        known = Announcement("s", start=RECORDS, cursor=300, at_owners=True)
        until(lambda: orders.announce(client, "b", known).prefetched == RECORDS)
        orders.withdraw(client, "b", "s")
    until(lambda: not any(streams(fleet, name) for name in NAMES))


def test_owners_hear_of_what_another_server_fetches(fleet: FleetOfServers, keys: list[str]) -> None:
    """The server next to the reader has it all; who owns it fetches nothing of itself, but knows when it is read."""
    with fleet.client("a") as client:
        orders.announce(client, "b", Announcement("s", keys=keys, reads=all_numbers()))
        until(lambda: fleet.held_blocks()["a"] == RECORDS)
        for name in NAMES:
            until(lambda name=name: [one.stop for one in streams(fleet, name)] == [RECORDS])
        until(lambda: fleet.held_blocks() == owned(keys) | {"a": RECORDS})
        assert fleet.origin_bytes() == RECORDS * SIZE
        assert all(one.prefetched == 0 for name in NAMES for one in streams(fleet, name))


def test_each_owner_fetches_its_blocks_of_large_objects(tmp_path: Path) -> None:
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "shard.tar").write_bytes(bytes(9 * BLOCK))
    spans = np.array([[n * BLOCK + 5, n * BLOCK + 50] for n in range(9)], dtype="<u8")
    with fleet_of(tmp_path, NAMES, str(tmp_path / "origin")) as fleet:
        with open_client(endpoints(fleet), TOKEN) as client:
            said = Announcement(
                "s", keys=["shard.tar"], reads=reads(*[0] * 9), spans=spans.tobytes(), at_owners=True
            )
            orders.announce(client, "b", said)
            until(lambda: sum(fleet.held_blocks().values()) == 9)
        assert fleet.origin_bytes() == 9 * BLOCK


def test_who_comes_later_is_told(tmp_path: Path, keys: list[str]) -> None:
    with fleet_of(tmp_path, "ab", str(tmp_path / "origin")) as fleet, fleet.client("a") as client:
        orders.announce(client, "b", Announcement("s", keys=keys, reads=all_numbers(), lease_s=600))
        until(lambda: [one.stop for one in streams(fleet, "b")] == [RECORDS])
        fleet.start("c")
        fleet.wait_for_members(*NAMES)
        until(lambda: [one.stop for one in streams(fleet, "c")] == [RECORDS])


def test_a_loader_of_a_fleet_announces(fleet: FleetOfServers, tmp_path: Path, keys: list[str]) -> None:
    cache = CacheSettings(endpoints(fleet), TOKEN, tmp_path / "own", 10**9)
    data = stoker.Dataset("stoker://b/", cache=cache)
    assert isinstance(data.served[0], FleetClient)
    with stoker.Loader(data, global_batch_size=32, shuffle=True, collate_fn=list) as loader:
        assert epoch(loader) == RECORDS
        for name in NAMES:
            until(lambda name=name: [one.stop for one in streams(fleet, name)] == [2 * RECORDS])
        assert epoch(loader) == RECORDS
        assert fleet.origin_bytes() == RECORDS * SIZE
    until(lambda: not any(streams(fleet, name) for name in NAMES))


def test_a_loader_goes_on_where_the_server_that_it_told_is_killed(
    fleet: FleetOfServers, tmp_path: Path, keys: list[str]
) -> None:
    cache = CacheSettings(endpoints(fleet), TOKEN, tmp_path / "own", 10**9)
    data = stoker.Dataset("stoker://b/", cache=cache)
    with stoker.Loader(data, global_batch_size=32, shuffle=True, collate_fn=list) as loader:
        batches = iter(loader)
        next(batches)
        until(lambda: any(streams(fleet, name, is_owned=False) for name in NAMES))
        (told,) = [name for name in NAMES if streams(fleet, name, is_owned=False)]
        killed = fleet.servers.pop(told)
        killed.child.kill()
        killed.child.wait()
        assert sum(len(batch) for batch in batches) == RECORDS - 32
        assert epoch(loader) == RECORDS
        left = [name for name in NAMES if name != told]
        until(lambda: any(streams(fleet, name, is_owned=False) for name in left))
        fleet.gone.append(killed)
