"""Buckets that are added at one server of a fleet are there at all of them, also at those that come later."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import msgspec
import pytest

from stoker.errors import ConfigError
from stoker.wire.cache_api import BucketSpec
from tests.e2e.cache_helpers import client_of, fill, served, still_told_of
from tests.e2e.test_cache_fleet import FleetOfServers, fleet_of
from tests.e2e.test_cache_fleet_start import has_met, wait_until

pytestmark = pytest.mark.real


def buckets(fleet: FleetOfServers, name: str) -> set[str]:
    with fleet.client(name) as client:
        return {bucket.name for bucket in client.status().buckets}


def notes(fleet: FleetOfServers, name: str) -> str:
    with fleet.client(name) as client:
        return "\n".join(client.status().notes)


def test_a_bucket_is_added_everywhere_now_or_later(tmp_path: Path) -> None:
    origin = str(tmp_path / "o")
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(20)])
    with fleet_of(tmp_path, "xyz", origin) as fleet:
        with fleet.client("x") as client:
            said = client.add_bucket("now", origin)
            assert (said.spec, said.missed, said.refused) == (BucketSpec(origin), [], {})
        for name in "xyz":
            with fleet.client(name) as client:
                assert client.read_many("now", list(objects)) == list(objects.values())
        fleet.servers["y"].stop(signal.SIGKILL)
        fleet.servers["z"].child.send_signal(signal.SIGSTOP)
        gone = (tmp_path / "members" / f"{name}.member" for name in "yz")
        with fleet.client("x") as client, still_told_of(*gone):
            assert client.add_bucket("later", origin).missed == ["y", "z"]
        fleet.servers["z"].child.send_signal(signal.SIGCONT)
        wait_until(lambda: buckets(fleet, "z") == {"b", "now", "later"}, "it is told when it is back")
        fleet.start("y")
        assert buckets(fleet, "y") == {"b", "now", "later"}, "who comes learns of it before it serves"
        fleet.start("w")
        assert buckets(fleet, "w") == {"b", "now", "later"}
        for name in "wxyz":
            fleet.servers.pop(name).stop(signal.SIGKILL)
        fleet.start("w")
        assert buckets(fleet, "w") == {"b", "now", "later"}, "it is written down"
        wait_until(lambda: notes(fleet, "w") == "")
        assert (tmp_path / "w" / "buckets.json").stat().st_mode & 0o777 == 0o600


def test_a_bucket_that_is_another_one_elsewhere_is_refused_there(tmp_path: Path) -> None:
    origin, other = str(tmp_path / "o"), str(tmp_path / "other")
    fill(tmp_path / "o", ["k"])
    theirs = fill(tmp_path / "other", ["k"])["k"]
    with fleet_of(tmp_path, "xy", origin) as fleet:
        fleet.start("z", "--bucket", f"mine={other}")
        fleet.wait_for_members(*"xyz")
        with fleet.client("x") as client:
            with pytest.raises(
                ConfigError, match=r"nowhere, for it is refused by z: .* already, with another"
            ):
                client.add_bucket("mine", origin)
            assert buckets(fleet, "x") == buckets(fleet, "y") == {"b"}
            client.add_bucket("theirs", origin)
            with pytest.raises(ConfigError, match="already"):
                client.add_bucket("theirs", other)
            client.add_bucket("mine", other)
        for name in "xyz":
            with fleet.client(name) as client:
                assert client.read("mine", "k") == theirs
        fleet.start("w", "--bucket", f"theirs={other}")
        wait_until(lambda: "bucket 'theirs' is not the same at x" in notes(fleet, "w"))
        wait_until(lambda: fleet.members("x") == set("wxyz"))


def test_the_configuration_wins_over_what_was_added(tmp_path: Path) -> None:
    origin, other = str(tmp_path / "o"), str(tmp_path / "other")
    fill(tmp_path / "o", ["k"])
    configured = fill(tmp_path / "other", ["k"])["k"]
    with served(tmp_path / "x", {}) as server, client_of(server) as client:
        client.add_bucket("a", origin)
        fill(tmp_path / "gone", [])
        client.add_bucket("gone", str(tmp_path / "gone"))
    (tmp_path / "gone").rmdir()
    with served(tmp_path / "x", {"a": other}) as server, client_of(server) as client:
        assert client.read("a", "k") == configured
        assert any("'a' was added with other settings" in note for note in client.status().notes)
        assert any("'gone', which was added before, cannot be" in note for note in client.status().notes)
        client.add_bucket("more", origin)
    written = msgspec.json.decode((tmp_path / "x" / "buckets.json").read_bytes())
    assert set(written) == {"gone", "more"}
    (tmp_path / "x" / "buckets.json").write_bytes(b"{half")
    with served(tmp_path / "x", {"a": other}) as server, client_of(server) as client:
        assert client.read("a", "k") == configured
        assert any("buckets.json cannot be read" in note for note in client.status().notes)


def test_buckets_of_one_name_and_two_origins_never_give_each_other_bytes(tmp_path: Path) -> None:
    keys = [f"k{n}" for n in range(12)]
    mine, theirs = fill(tmp_path / "mine", keys), fill(tmp_path / "theirs", keys)
    for key in keys:  # so that even the versions are the same
        os.utime(tmp_path / "mine" / key, ns=(10**18, 10**18))
        os.utime(tmp_path / "theirs" / key, ns=(10**18, 10**18))
    fleet = ("--fleet", str(tmp_path / "members"))
    with (
        served(tmp_path / "x", {"b": str(tmp_path / "mine")}, *fleet, "--name", "x") as x,
        served(tmp_path / "y", {"b": str(tmp_path / "theirs")}, *fleet, "--name", "y") as y,
    ):
        wait_until(lambda: has_met(x, {"x", "y"}) and has_met(y, {"x", "y"}))
        for server, objects in ((x, mine), (y, theirs)) * 2:
            with client_of(server) as client:
                assert {key: client.read("b", key) for key in keys} == objects
                assert client.read_many("b", keys) == list(objects.values())
                assert [info.key for info in client.list_objects("b", "")] == sorted(keys)
                assert {item.state for item in client.load("b", keys)} <= {"held", "loaded", "passed"}
                status = client.status()
                assert any("'b' is from another origin at" in note for note in status.notes), status.notes
                assert status.fleet is not None
                assert status.fleet.down == []
        for server in (x, y):
            assert server.stop()[1].count("'b' is from another origin at") == 1


def test_one_identity_makes_two_ways_to_an_origin_one(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(12)])
    (tmp_path / "way").mkdir()
    for key in objects:
        os.link(tmp_path / "o" / key, tmp_path / "way" / key)
    with contextlib.ExitStack() as stack:
        servers = []
        for name, way in (("x", "o"), ("y", "way")):
            config = tmp_path / f"{name}.toml"
            config.write_text(f'[buckets.b]\norigin_url = "{tmp_path / way}"\nidentity = "the data"\n')
            options = ("--fleet", str(tmp_path / "members"), "--name", name, "--config", str(config))
            servers.append(stack.enter_context(served(tmp_path / name, {}, *options)))
        wait_until(lambda: all(has_met(server, {"x", "y"}) for server in servers))
        for server in servers:
            with client_of(server) as client:
                assert {key: client.read("b", key) for key in objects} == objects
                assert client.status().buckets[0].peer_bytes > 0
                assert client.status().notes == []
