"""Servers whose fleet cannot be reached when they start serve alone, join later, and can be stopped at any time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.cache.server.server import CacheServer
from stoker.cache.server.settings import ServerSettings
from stoker.wire.cache_api import BucketSpec
from tests.e2e.cache_helpers import RUN_CLI, ServerProcess, client_of, fill, served
from tests.e2e.etcd import Etcd, free_ports

pytestmark = pytest.mark.real


def wait_until(is_so: Callable[[], bool], what: object = "") -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def notes(server: ServerProcess) -> list[str]:
    with client_of(server) as client:
        return client.status().notes


def members(server: ServerProcess, token: str | None = None) -> set[str]:
    with client_of(server, token) as client:
        return {member.name for member in client.fleet().members}


def has_met(server: ServerProcess, names: set[str], token: str | None = None) -> bool:
    """Whether these are its fleet, and each has answered it."""
    with client_of(server, token) as client:
        told = client.fleet()
    return {member.name for member in told.members} == names and not told.down


def test_a_server_starts_while_etcd_is_away_and_joins_when_it_is_back(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", ["k"])
    buckets = {"b": str(tmp_path / "o")}
    etcd = Etcd(tmp_path / "etcd")
    options = ("--fleet", etcd.url)
    try:
        with (
            served(tmp_path / "x", buckets, *options, "--name", "x") as x,
            served(tmp_path / "y", buckets, *options, "--name", "y") as y,
        ):
            for server in (x, y):
                assert members(server) in ({"x"}, {"y"})
                assert any("is not in its fleet yet" in note for note in notes(server)), notes(server)
                with client_of(server) as client:
                    assert client.read("b", "k") == objects["k"]
            wait_until(lambda: any("cannot be read from etcd" in note for note in notes(x)))
            etcd.start()
            for server in (x, y):
                wait_until(lambda server=server: members(server) == {"x", "y"})  # type: ignore[misc]
                wait_until(lambda server=server: notes(server) == [])  # type: ignore[misc]
            etcd.stop()
            wait_until(lambda: any("those who were known last stay" in note for note in notes(x)))
            assert members(x) == {"x", "y"}
            for server in (x, y):
                code, errors = server.stop()
                assert code == 0, errors
    finally:
        etcd.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_waits_for_its_fleet_can_be_stopped(tmp_path: Path, number: signal.Signals) -> None:
    etcd = Etcd(tmp_path / "etcd")
    socket = tmp_path / "socket"
    # However late it is told to stop, it has not begun to serve alone by then.
    waits = "from stoker.cache.server import fleet\nfleet.JOIN_S = 600.0\n"
    child = subprocess.Popen(
        [
            *(sys.executable, "-c", waits + RUN_CLI, "cache", "serve", "--listen", "127.0.0.1:0"),
            *("--unix", str(socket), "--dir", str(tmp_path / "x"), "--capacity", "1GB", "--fleet", etcd.url),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(socket.exists)
    child.send_signal(number)
    out, errors = child.communicate(timeout=60)
    assert (child.returncode, out, errors) == (0, "", "")
    assert not socket.exists()


def test_a_start_that_is_given_up_lets_go_of_the_folder(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["k"])

    async def story() -> None:
        for pause_s in (0.0, 0.0001, 0.001, 0.01, 0.1, 0.5):
            server = CacheServer(
                ServerSettings(
                    tmp_path / "x",
                    1_000_000,
                    buckets={"b": BucketSpec(str(tmp_path / "o"))},
                    unix_path=str(tmp_path / "socket"),
                    fleet="etcd://127.0.0.1:1",
                )
            )
            starting = asyncio.ensure_future(server.start())
            await asyncio.sleep(pause_s)
            assert not starting.done()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await server.stop()
            assert not (tmp_path / "socket").exists()

    asyncio.run(story())
    with served(tmp_path / "x", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        assert client.read("b", "k")


def test_a_folder_that_is_not_there_is_waited_for_and_what_was_known_before_is_confirmed(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "o", ["k"])
    buckets = {"b": str(tmp_path / "o")}
    away = tmp_path / "mount"
    away.write_text("what is no folder")
    options = ("--fleet", f"file://{away}/members")
    with (
        served(tmp_path / "x", buckets, *options, "--name", "x") as x,
        served(tmp_path / "y", buckets, *options, "--name", "y") as y,
        client_of(x) as at_x,
        client_of(y) as at_y,
    ):
        assert all(any("is not in its fleet yet" in note for note in notes(server)) for server in (x, y))
        assert at_y.read("b", "k") == at_x.read("b", "k")
        changed = fill(tmp_path / "o", ["k"], 1001)["k"]
        at_x.refresh("b")
        assert at_x.read("b", "k") == changed
        assert at_y.read("b", "k") != changed, "nobody could tell it"
        os.unlink(away)
        wait_until(lambda: has_met(x, {"x", "y"}) and has_met(y, {"x", "y"}))
        assert at_y.read("b", "k") == changed
        assert notes(x) == notes(y) == []


def test_what_a_list_says_of_weights_and_zones_all_servers_see(tmp_path: Path) -> None:
    """If one saw itself with another share than the others do, each could take the other for an owner."""
    ports = free_ports(2)
    entries = [f"{name}=http://127.0.0.1:{port}" for name, port in zip("xy", ports, strict=True)]
    listed = f"{entries[0]};weight=3,{entries[1]};weight=2;zone=far"
    common = ("--capacity", "1GB", "--fleet", listed)
    with contextlib.ExitStack() as stack:
        for name, port in zip("xy", ports, strict=True):
            options = ("--fleet", listed, "--name", name, "--listen", f"127.0.0.1:{port}")
            server = stack.enter_context(served(tmp_path / name, {}, *options))
            with client_of(server) as client:
                seen = {(member.name, member.weight, member.zone) for member in client.fleet().members}
            assert seen == {("x", 3, ""), ("y", 2, "far")}
    with pytest.raises(AssertionError, match=r"weight 1 .* and its fleet's list says weight 3"):
        ServerProcess("--dir", str(tmp_path / "x"), *common, "--name", "x", "--weight", "1")


def test_a_list_without_this_server_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="none of its fleet's members"):
        ServerProcess("--dir", str(tmp_path / "x"), "--capacity", "1GB", "--fleet", "http://127.0.0.1:1")
