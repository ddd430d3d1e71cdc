"""A real server process meets kill -9, bit rot, a damaged index, a full disk and an origin that is gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.server.engine import SETTLE_S
from stoker.errors import ObjectNotFound
from stoker.wire.cache_api import CacheStatus
from tests.e2e.cache_helpers import ServerProcess, client_of, fill, served, wait_until_held
from tests.e2e.disks import small_disk

pytestmark = pytest.mark.real


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "files").rglob("*") if path.is_file())


def test_after_kill_9_what_was_held_is_served_without_the_origin(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"{n}" for n in range(50)], 900) | fill(
        tmp_path / "o", ["big"], 5_000_000
    )
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        client.read_many("b", list(objects))
        wait_until_held(client, len(objects) + 1)
        server.stop(signal.SIGKILL)
    for key in objects:
        (tmp_path / "o" / key).unlink()
    orphan = tmp_path / "d" / "files" / "000" / "00000fff"
    orphan.write_bytes(b"left over")
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        assert client.read_many("b", list(objects)) == list(objects.values())
        assert client.read("b", "big") == objects["big"]
        status = client.status()
        assert (status.origin_requests, status.misses) == (0, 0)
        assert not orphan.exists()
        client.refresh("b", "1")
        with pytest.raises(ObjectNotFound):
            client.read("b", "1")


def test_kill_9_while_filling_leaves_nothing_wrong(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"{n:04}" for n in range(3000)], 2000)
    for _ in range(3):
        with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server:

            def read(server: ServerProcess = server) -> None:
                with client_of(server) as client, contextlib.suppress(Exception):
                    client.read_many("b", list(objects))

            thread = threading.Thread(target=read)
            thread.start()
            time.sleep(0.15)
            server.stop(signal.SIGKILL)
            thread.join()
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        assert client.read_many("b", list(objects)) == list(objects.values())


@pytest.mark.parametrize("size_bytes", [900, 100_000, 5_000_000])
@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_a_damaged_block_is_a_miss_and_is_fetched_again(tmp_path: Path, size_bytes: int, harm: str) -> None:
    objects = fill(tmp_path / "o", ["x", "y"], size_bytes)
    blocks = 2 * -(-size_bytes // 4194304)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        client.read_many("b", ["x", "y"])
        wait_until_held(client, blocks)
    for path in files_of(tmp_path / "d"):
        data = bytearray(path.read_bytes())
        for place in range(size_bytes // 2, len(data), size_bytes):
            data[place] ^= 1
        if harm == "gone":
            path.unlink()
        else:
            path.write_bytes(data if harm == "flipped" else data[:10])
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        assert client.read("b", "x") == objects["x"]
        assert client.read_many("b", ["y", "x"]) == [objects["y"], objects["x"]]
        wait_until_held(client, blocks)
        found = client.status().origin_bytes
        # Of the larger objects, the block that was not damaged is still good.
        assert found == 2 * size_bytes or (harm == "flipped" and found == 2 * 4194304)
        assert client.read("b", "y") == objects["y"]
        assert client.status().origin_bytes == found


@pytest.mark.parametrize("damage", ["header", "records", "version"])
def test_a_damaged_index_is_read_as_far_as_it_goes_and_says_so(tmp_path: Path, damage: str) -> None:
    objects = fill(tmp_path / "o", [f"{n}" for n in range(500)], 900)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        client.read_many("b", list(objects))
        wait_until_held(client, 500)
    index = tmp_path / "d" / "index"
    data = bytearray(index.read_bytes())
    if damage == "header":
        data[:16] = os.urandom(16)
    elif damage == "records":
        for start in range(4096, len(data), 4096):
            data[start : start + 2000] = os.urandom(2000)
    else:
        data[8:12] = (99).to_bytes(4, "big")
    index.write_bytes(data)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        status = client.status()
        assert any("damaged" in note for note in status.notes)
        assert status.held_blocks < 500
        if damage != "records":
            assert status.held_bytes == 0
            assert files_of(tmp_path / "d") == []
        assert client.read_many("b", list(objects)) == list(objects.values())
        wait_until_held(client, 500)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        assert client.status().held_blocks == 500


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    """And who comes while it is at work takes nothing from it: not its socket either."""
    unix = ("--unix", str(tmp_path / "socket"))
    with served(tmp_path / "d", {}, *unix):
        with pytest.raises(AssertionError, match="in use by another cache server"):
            ServerProcess("--dir", str(tmp_path / "d"), "--capacity", "1GB", *unix)
        with CacheClient(f"unix://{tmp_path}/socket", timeout_s=20.0) as client:
            assert client.status().held_blocks == 0
    assert not (tmp_path / "socket").exists()


def test_a_socket_that_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"none/socket: No such file"):
        ServerProcess("--dir", str(tmp_path / "d"), "--capacity", "1GB", "--unix", f"{tmp_path}/none/socket")


def stored(client: CacheClient) -> CacheStatus:
    """The status once all that was read is stored, or will not be: a server waits for that before it answers, but no
    longer than a time."""
    while True:
        began = time.monotonic()
        status = client.status()
        if time.monotonic() - began < SETTLE_S:
            return status


def test_the_limit_holds_while_filling(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"{n:03}" for n in range(300)], 50_000)
    limit = 2_000_000
    largest = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.is_set():
            size = 0
            for path in (tmp_path / "d" / "files").rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    size += path.stat().st_blocks * 512 if path.is_file() else 0
            largest = max(largest, size)

    for policy in ("lru", "uniform"):
        options = ("--policy", f"b={policy}")
        with (
            served(tmp_path / "d", {"b": str(tmp_path / "o")}, *options, capacity=str(limit)) as server,
            client_of(server) as client,
        ):
            watcher = threading.Thread(target=watch)
            watcher.start()
            for _ in range(2):
                assert client.read_many("b", list(objects)) == list(objects.values())
            # Storing may lag so far behind reading that it is a turn late: here nothing is read before it is done.
            before = stored(client).hits
            names = list(objects)
            for first in range(0, len(names), 30):
                some = names[first : first + 30]
                assert client.read_many("b", some) == [objects[name] for name in some]
                status = stored(client)
            done.set()
            watcher.join()
            done.clear()
            assert 0 < status.held_bytes <= limit
            hits = status.hits - before
            assert (hits > 20) == (policy == "uniform"), f"what is read in turns is best kept: {hits} hits"
        assert largest <= limit
        shutil.rmtree(tmp_path / "d")


def test_links_that_lead_out_of_the_origin_lead_nowhere(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", ["sub/x"])
    for name, target in [
        ("loop", "loop"),
        ("outside", "/etc/passwd"),
        ("inside", "sub/x"),
        ("dir", "/etc"),
        ("sub/up", ".."),
    ]:
        (tmp_path / "o" / name).symlink_to(target)
    os.mkfifo(tmp_path / "o" / "fifo")
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        assert client.read("b", "inside") == objects["sub/x"]
        assert [info.key for info in client.list_objects("b", "")] == ["inside", "sub/x"]
        for name in ("loop", "outside", "dir/passwd", "fifo", "sub", "sub/up"):
            with pytest.raises(ObjectNotFound):
                client.read("b", name)


def test_a_full_disk_is_passed_through_and_recovers(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"{n}" for n in range(100)], 50_000) | fill(
        tmp_path / "o", ["big"], 5_000_000
    )
    with (
        small_disk(tmp_path / "small", "3m") as disk,
        served(disk / "d", {"b": str(tmp_path / "o")}) as server,
        client_of(server) as client,
    ):
        for _ in range(2):
            assert client.read_many("b", list(objects)) == list(objects.values())
            assert client.read("b", "big") == objects["big"]
        status = client.status()
        assert status.state == "pass-through"
        assert any("No space left" in note for note in status.notes)
        assert status.held_blocks > 10
        subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
        deadline = time.monotonic() + 60
        while client.status().state != "ok":
            assert time.monotonic() < deadline, "there is room again, and nothing is stored"
            assert client.read_many("b", list(objects)) == list(objects.values())
            time.sleep(0.2)
        assert client.read("b", "big") == objects["big"]
        assert client.read_many("b", list(objects)) == list(objects.values())
        wait_until_held(client, 102)
