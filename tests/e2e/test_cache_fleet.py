"""Fleets of real server processes: one origin read, whoever is asked and whoever dies."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import FleetClient, open_client
from stoker.errors import CacheUnavailable, ConfigError, ObjectChanged, ObjectNotFound, StokerError
from stoker.wire.cache_api import (
    BucketSpec,
    Evicted,
    FleetStatus,
    LoadAnswer,
    LoadRequest,
    Refreshed,
)
from tests.e2e.cache_helpers import ServerProcess, client_of, fill

pytestmark = pytest.mark.real
TOKEN = "a-token-of-the-fleet"


class FleetOfServers:
    """Servers that meet in a folder, each with a disk folder of its own."""

    def __init__(self, folder: Path, origin: str, capacity: str = "1GB", **spec: object) -> None:
        self.folder = folder
        self.capacity = capacity
        self.spec = BucketSpec(origin, **spec)  # type: ignore[arg-type]
        self.servers: dict[str, ServerProcess] = {}
        self.gone: list[ServerProcess] = []

    def start(self, name: str, *arguments: str) -> ServerProcess:
        config = self.folder / "cache.toml"
        lines = [f'tokens = ["{TOKEN}"]', f'fleet = "{self.folder}/members"', "[buckets.b]"]
        for field in self.spec.__struct_fields__:
            value = getattr(self.spec, field)
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                lines.append(f'{field} = "{value}"' if isinstance(value, str) else f"{field} = {value}")
        config.write_text("\n".join(lines))
        options = ("--dir", str(self.folder / name), "--capacity", self.capacity, "--config", str(config))
        self.servers[name] = ServerProcess(*options, "--name", name, *arguments)
        return self.servers[name]

    def client(self, name: str) -> contextlib.AbstractContextManager[CacheClient]:
        return client_of(self.servers[name], TOKEN)

    def members(self, name: str) -> set[str]:
        with self.client(name) as client:
            found = client._call("GET", "/-/fleet", FleetStatus)
        return {member.name for member in found.members}

    def wait_for_members(self, *names: str) -> None:
        deadline = time.monotonic() + 20
        for name in names:
            while self.members(name) != set(names):
                assert time.monotonic() < deadline, self.members(name)
                time.sleep(0.05)

    def origin_bytes(self) -> int:
        total = 0
        for name, server in self.servers.items():
            if server.child.poll() is None:
                with self.client(name) as client:
                    total += client.status().origin_bytes
        return total

    def origin_requests(self) -> int:
        total = 0
        for name in self.servers:
            with self.client(name) as client:
                total += client.status().origin_requests
        return total

    def held_blocks(self) -> dict[str, int]:
        found = {}
        for name in self.servers:
            with self.client(name) as client:
                found[name] = client.status().held_blocks
        return found

    def stop(self) -> None:
        for server in (*self.servers.values(), *self.gone):
            if server.child.poll() is None:
                server.child.send_signal(signal.SIGKILL)
            with contextlib.suppress(ValueError):
                server.child.communicate()


@contextlib.contextmanager
def fleet_of(folder: Path, names: str, origin: str, **spec: object) -> Iterator[FleetOfServers]:
    fleet = FleetOfServers(folder, origin, **spec)
    try:
        for name in names:
            fleet.start(name)
        fleet.wait_for_members(*names)
        yield fleet
    finally:
        fleet.stop()


def wait_until_held(fleet: FleetOfServers, blocks: int) -> None:
    deadline = time.monotonic() + 20
    while sum(fleet.held_blocks().values()) < blocks:
        assert time.monotonic() < deadline, fleet.held_blocks()
        time.sleep(0.02)


def test_any_server_answers_and_the_origin_is_read_once(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(120)], 5000)
    objects |= fill(tmp_path / "o", ["big"], 25_000_000)
    size_bytes = sum(len(data) for data in objects.values())
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        for name in "xyz":
            with fleet.client(name) as client:
                assert client.read_many("b", list(objects)) == list(objects.values())
                assert client.read("b", "big") == objects["big"]
                assert client.read("b", "big", 9_000_000, 17_000_000) == objects["big"][9_000_000:17_000_000]
                with pytest.raises(ObjectNotFound):
                    client.read("b", "none")
        assert fleet.origin_bytes() == size_bytes
        wait_until_held(fleet, 120 + 6)
        held = fleet.held_blocks()
        assert sum(held.values()) == 126, "one copy of each"
        assert all(20 < blocks < 70 for blocks in held.values()), held


def test_readers_everywhere_at_once_cost_one_read(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", ["big"], 40_000_000)
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        wrong: list[object] = []

        def read(name: str) -> None:
            try:
                with fleet.client(name) as client:
                    if client.read("b", "big") != objects["big"]:
                        wrong.append(name)
            except StokerError as error:
                wrong.append(error)

        threads = [threading.Thread(target=read, args=("xyz"[n % 3],)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert fleet.origin_bytes() == 40_000_000


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_server_that_goes_is_no_matter_to_readers(tmp_path: Path, number: signal.Signals) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(200)], 3000)
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        with fleet.client("x") as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
            wait_until_held(fleet, 200)
            gone = fleet.servers.pop("z")
            fleet.gone.append(gone)
            gone.child.send_signal(number)
            before = client.status().origin_bytes
            assert client.read_many("b", list(objects)) == list(objects.values())
        fleet.wait_for_members("x", "y")
        with fleet.client("y") as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
        assert before <= 600_000
        assert fleet.origin_bytes() <= 600_000, "what it held is read once more, and nothing else"


def test_who_comes_later_takes_over_without_the_origin(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(200)], 3000)
    with fleet_of(tmp_path, "xy", str(tmp_path / "o")) as fleet:
        with fleet.client("x") as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
        wait_until_held(fleet, 200)
        assert fleet.origin_bytes() == 600_000
        fleet.start("z")
        fleet.wait_for_members(*"xyz")
        with fleet.client("z") as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
        assert fleet.origin_bytes() == 600_000, "the owner before has it"
        assert fleet.held_blocks()["z"] > 30


def test_who_comes_back_never_serves_what_was_overwritten(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(100)], 3000)
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o"), ttl_s=3600.0) as fleet:
        with fleet.client("x") as client:
            client.read_many("b", list(objects))
        wait_until_held(fleet, 100)
        fleet.servers["z"].stop(signal.SIGKILL)
        del fleet.servers["z"]
        fleet.wait_for_members("x", "y")
        changed = fill(tmp_path / "o", list(objects), 3001)
        with fleet.client("x") as client:
            client.refresh("b")
            assert client.read_many("b", list(changed)) == list(changed.values())
        fleet.start("z")
        fleet.wait_for_members(*"xyz")
        for name in "xy":
            with fleet.client(name) as client:
                assert client.read_many("b", list(changed)) == list(changed.values())
                for key in list(changed)[:20]:
                    assert client.read("b", key, version=client.stat("b", key).version) == changed[key]


def peer_bytes(fleet: FleetOfServers) -> int:
    total = 0
    for name in fleet.servers:
        with fleet.client(name) as client:
            total += sum(bucket.peer_bytes for bucket in client.status().buckets)
    return total


def test_a_client_of_the_fleet_asks_the_owner(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(120)], 5000)
    objects |= fill(tmp_path / "o", ["big"], 25_000_000) | fill(tmp_path / "o", ["empty"], 0)
    with fleet_of(tmp_path, "wxyz", str(tmp_path / "o")) as fleet:
        urls = ",".join(server.url for server in fleet.servers.values())
        with open_client(urls, TOKEN, timeout_s=20.0) as client:
            assert isinstance(client, FleetClient)
            assert client.read_many("b", list(objects)[:120]) == list(objects.values())[:120]
            for _ in range(2):
                assert client.read("b", "big") == objects["big"]
                assert client.read("b", "big", 4_000_000, 9_000_000) == objects["big"][4_000_000:9_000_000]
                assert client.read("b", "big", 24_999_990, 30_000_000) == objects["big"][-10:]
                assert client.read("b", "big", 26_000_000) == b""
                assert client.read("b", "empty") == b""
                assert client.read("b", "k007", 10, 10) == b""
                assert client.read("b", "k007", 10, 20) == objects["k007"][10:20]
                assert client.stat("b", "big").size_bytes == 25_000_000
                assert client.known("b", "empty").size_bytes == 0
                assert {info.key for info in client.list_objects("b")} == set(objects)
            with pytest.raises(ObjectNotFound):
                client.read("b", "none")
            with pytest.raises(ObjectNotFound, match="none"):
                client.read_many("b", ["k001", "none"])
            with pytest.raises(ObjectChanged):
                client.read("b", "big", version="another")
            again = pickle.loads(pickle.dumps(client))
            assert again.read("b", "k001") == objects["k001"]
            again.close()
            assert peer_bytes(fleet) == 0, "no byte came by another server"
            assert fleet.origin_bytes() == 25_000_000 + 600_000


def test_a_client_of_the_fleet_outlives_its_servers(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(120)], 5000)
    objects |= fill(tmp_path / "o", ["big"], 25_000_000)
    with fleet_of(tmp_path, "wxyz", str(tmp_path / "o")) as fleet:
        urls = ",".join(server.url for server in list(fleet.servers.values())[:2])
        with open_client(urls, TOKEN, timeout_s=20.0) as client:
            for gone in ("w", "x", "y"):
                assert client.read_many("b", list(objects)) == list(objects.values())
                assert client.read("b", "big") == objects["big"]
                fleet.servers.pop(gone).stop(signal.SIGKILL)
                assert client.read("b", "big") == objects["big"]
                assert client.read_many("b", list(objects)) == list(objects.values())
            fleet.servers.pop("z").stop(signal.SIGKILL)
            with pytest.raises(CacheUnavailable):
                client.read("b", "big")


def test_refresh_reaches_every_server(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", ["k", "l"], 3000)
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        for name in "xyz":
            with fleet.client(name) as client:
                assert client.read_many("b", ["k", "l"]) == list(objects.values())
                assert [info.key for info in client.list_objects("b")] == ["k", "l"]
        changed = fill(tmp_path / "o", ["k", "m"], 4000)
        with fleet.client("x") as client:
            assert client.read("b", "k") == objects["k"], "for the bucket's ttl it is believed"
            client.refresh("b", "k")
        for name in "xyz":
            with fleet.client(name) as client:
                assert client.read("b", "k") == changed["k"]
                assert client.read("b", "m") == changed["m"]


def test_copies_are_kept_by_as_many_as_may(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(30)], 3000)
    for replicas, copies in ((1, 1), (2, 2), (0, 3)):
        folder = tmp_path / f"r{replicas}"
        folder.mkdir()
        with fleet_of(folder, "xyz", str(tmp_path / "o"), max_replicas=replicas) as fleet:
            for _ in range(3):
                for name in "xyz":
                    with fleet.client(name) as client:
                        assert client.read_many("b", list(objects)) == list(objects.values())
            wait_until_held(fleet, 30 * copies)
            time.sleep(0.2)
            assert sum(fleet.held_blocks().values()) == 30 * copies
            assert fleet.origin_bytes() == 90_000


def test_metadata_is_asked_once_for_the_fleet(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(30)], 10)
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o"), negative_ttl_s=60.0) as fleet:
        for _ in range(3):
            for name in "xyz":
                with fleet.client(name) as client:
                    for key in objects:
                        assert client.stat("b", key).size_bytes == 10
                    with pytest.raises(ObjectNotFound):
                        client.stat("b", "none")
                    assert len(client.list_objects("b")) == 30
        # A stat asks for a byte as well: one stat and one read of each; one for the missing one; one list.
        assert fleet.origin_requests() <= 30 * 2 + 1 + 2


def test_servers_that_cannot_read_the_folder_go_on(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(30)], 3000)
    with fleet_of(tmp_path, "xy", str(tmp_path / "o")) as fleet:
        os.rename(tmp_path / "members", tmp_path / "elsewhere")
        (tmp_path / "members").write_text("no folder")
        time.sleep(1.5)
        for name in "xy":
            with fleet.client(name) as client:
                assert client.read_many("b", list(objects)) == list(objects.values())


def test_copies_that_were_made_while_a_server_was_away_are_given_up(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(150)], 3000)
    objects |= fill(tmp_path / "o", ["big"], 25_000_000)
    blocks = 150 + 6
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        with fleet.client("x") as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
        wait_until_held(fleet, blocks)
        assert sum(fleet.held_blocks().values()) == blocks
        fleet.servers.pop("z").stop(signal.SIGKILL)
        fleet.wait_for_members("x", "y")
        with fleet.client("x") as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
        wait_until_held(fleet, blocks)
        fleet.start("z")
        fleet.wait_for_members(*"xyz")
        assert sum(fleet.held_blocks().values()) > blocks
        deadline = time.monotonic() + 30
        while sum(fleet.held_blocks().values()) > blocks:
            assert time.monotonic() < deadline, fleet.held_blocks()
            time.sleep(0.2)
        before = fleet.origin_bytes()
        for name in "xyz":
            with fleet.client(name) as client:
                assert client.read_many("b", list(objects)) == list(objects.values())
        assert fleet.origin_bytes() == before, "nothing is lost"


def test_a_server_that_was_stopped_hears_what_it_missed(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(40)], 3000)
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        for name in "xyz":
            with fleet.client(name) as client:
                client.read_many("b", list(objects))
        fleet.servers["z"].child.send_signal(signal.SIGSTOP)
        changed = fill(tmp_path / "o", list(objects), 3100)
        with fleet.client("x") as client:
            assert client._call("POST", "/-/refresh/b?prefix=", Refreshed, b"").missed == ["z"]
            assert client.read_many("b", list(changed)) == list(changed.values())
        fleet.servers["z"].child.send_signal(signal.SIGCONT)
        fleet.wait_for_members(*"xyz")
        deadline = time.monotonic() + 20
        with fleet.client("z") as client:
            while client.read_many("b", list(changed)) != list(changed.values()):
                assert time.monotonic() < deadline
                time.sleep(0.1)


def test_loading_puts_each_block_where_it_belongs(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(100)], 3000)
    objects |= fill(tmp_path / "o", ["big"], 25_000_000) | fill(tmp_path / "o", ["empty"], 0)
    fleet_with_copies = fleet_of(tmp_path, "xyz", str(tmp_path / "o"), max_replicas=2)
    with fleet_with_copies as fleet, fleet.client("x") as client:

        def load(*keys: str, replicas: int = 1) -> dict[str, str]:
            body = msgspec.msgpack.encode(LoadRequest(list(keys), replicas))
            answer = client._call("POST", "/-/load/b", LoadAnswer, body)
            return {item.key: item.state for item in answer.items}

        assert load("none", "empty") == {"none": "failed", "empty": "held"}
        assert set(load(*objects).values()) == {"loaded", "held"}
        assert sum(fleet.held_blocks().values()) == 106
        assert set(load(*objects).values()) == {"held"}
        assert fleet.origin_bytes() == 25_300_000
        assert set(load(*objects, replicas=0).values()) == {"loaded", "held"}, "as many as the bucket says"
        with pytest.raises(ConfigError, match="raise max_replicas"):
            load("big", replicas=3)
        assert sum(fleet.held_blocks().values()) == 212
        assert fleet.origin_bytes() == 25_300_000, "the second copy is the first one's"
        evicted = client._call("POST", "/-/evict/b?prefix=k0", Evicted, b"")
        assert (evicted.blocks, evicted.size_bytes, evicted.missed) == (200, 600_000, [])
        assert sum(fleet.held_blocks().values()) == 12


def test_hundreds_of_cold_reads_at_two_servers_do_not_wait_for_each_other(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(600)], 1000)
    with fleet_of(tmp_path, "xy", str(tmp_path / "o")) as fleet:
        wrong: list[object] = []

        def read(number: int) -> None:
            try:
                with fleet.client("xy"[number % 2]) as client:
                    if client.read("b", f"k{number:03}") != objects[f"k{number:03}"]:
                        wrong.append(number)
            except StokerError as error:
                wrong.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(600)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert fleet.origin_bytes() == 600_000


def test_a_read_of_several_owners_survives_an_overwrite(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["big"], 25_000_000)
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        urls = ",".join(server.url for server in fleet.servers.values())
        with open_client(urls, TOKEN, timeout_s=20.0) as client:
            client.read("b", "big")
            changed = fill(tmp_path / "o", ["big"], 25_000_000)
            for name in "xyz":
                with fleet.client(name) as one:
                    one.stat("b", "big")
            client.refresh("b", "big")
            assert client.read("b", "big") == changed["big"]
