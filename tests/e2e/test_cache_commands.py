"""`stoker cache ls, stat, refresh, evict, pin, load, top` against real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from stoker.cache.client.loading import LoadCounts, Loader, Wanted
from stoker.cache.client.servers import PATIENCE_S, Servers
from stoker.cli.main import main
from tests.e2e.cache_helpers import ServerProcess, client_of, fill, served, wait_until_held
from tests.e2e.test_cache_fleet import TOKEN, fleet_of

pytestmark = pytest.mark.real


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, object]:
        return json.loads(self.out)


Command = Callable[..., Said]


@pytest.fixture
def stoker(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`stoker cache ARGUMENTS` in this process, of the server given first."""
    monkeypatch.delenv("STOKER_CACHE_TOKEN", raising=False)

    def run(server: ServerProcess | str, *arguments: str) -> Said:
        url = server if isinstance(server, str) else server.url
        monkeypatch.setenv("STOKER_CACHE_ENDPOINT", url)
        capsys.readouterr()
        try:
            code = main(["cache", *arguments])
        except SystemExit as left:
            code = int(left.code or 0)
        return Said(code, *capsys.readouterr())

    return run


def started(server: ServerProcess, *arguments: str, **options: object) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "stoker.cli.main", "cache", *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options,  # type: ignore[call-overload]
        env={**os.environ, "STOKER_CACHE_ENDPOINT": server.url},
    )


def held_blocks(server: ServerProcess) -> int:
    with client_of(server) as client:
        return client.status().held_blocks


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_bucket_is_loaded_once(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", [f"d{n % 20:02}/{n:04}" for n in range(2000)], 1000)
    fill(tmp_path / "o", ["big"], 10_000_000)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server:
        first = stoker(server, "load", "stoker://b")
        assert first.code == 0, first
        head, held, loaded, passed, failed = first.out.splitlines()
        assert head.startswith("stoker://b: 2001 objects, 12 MB, in ")
        assert held.split() == ["held", "already", "0", "0", "B"]
        assert loaded.split() == ["loaded", "2001", "12", "MB"]
        assert passed.split() == ["passed:", "no", "room", "0", "0", "B"]
        assert failed.split() == ["failed", "0"]
        with client_of(server) as client:
            before = client.status()
            assert (before.held_blocks, before.origin_bytes) == (2003, 12_000_000)
        again = stoker(server, "load", "stoker://b", "--json", "--jobs", "2")
        assert (again.code, again.err) == (0, "")
        assert again.json["held"] == {"objects": 2001, "size_bytes": 12_000_000}
        assert again.json["loaded"] == {"objects": 0, "size_bytes": 0}
        assert again.json["complete"] is True
        with client_of(server) as client:
            assert client.status().origin_bytes == before.origin_bytes
        part = stoker(server, "load", "stoker://b/d0", "--json").json
        assert part["wanted"] == {"objects": 1000, "size_bytes": 1_000_000, "unsized": 0}
        assert stoker(server, "load", "stoker://b/none")[::2] == (
            1,
            "stoker: there is nothing to load: stoker://b/none names no object\n",
        )


def test_what_cannot_be_read_is_named(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", [f"k{n:03}" for n in range(300)], 1000)
    (tmp_path / "o" / "dangling").symlink_to(tmp_path / "nowhere")
    missing = [f"gone{n:02}" for n in range(24)]
    manifest = tmp_path / "m"
    manifest.write_text("\n".join(["dangling", *missing, *(f"stoker://b/k{n:03}" for n in range(300))]))
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server:
        said = stoker(server, "load", "stoker://b", "--manifest", str(manifest))
        assert said.code == 1
        assert "sizes of 325 objects" in said.err
        lines = said.out.splitlines()
        assert lines[2].split() == ["loaded", "300", "300", "KB"]
        assert lines[4].split() == ["failed", "25"]
        assert "    dangling: no object 'dangling'" in lines[5]
        assert len(lines) == 5 + 20 + 1
        assert lines[-1] == "    and 5 more (--json names all)"
        again = stoker(server, "load", "stoker://b", "--manifest", str(manifest), "--json")
        assert again.code == 1
        assert sorted(failure["key"] for failure in again.json["failed"]) == ["dangling", *missing]  # type: ignore[attr-defined]
        assert again.json["held"] == {"objects": 300, "size_bytes": 300_000}


def test_one_that_is_deleted_meanwhile_costs_no_other(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", [f"k{n:03}" for n in range(300)], 1000)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server:
        assert len(stoker(server, "ls", "stoker://b", "--json").out.splitlines()) == 300
        (tmp_path / "o" / "k123").unlink()
        said = stoker(server, "load", "stoker://b", "--json")
        assert said.code == 1
        assert said.json["loaded"] == {"objects": 299, "size_bytes": 299_000}
        named = said.json["failed"] or [{"key": "k123"}] * said.json["passed"]["objects"]  # type: ignore[index,call-overload]
        assert [failure["key"] for failure in named] == ["k123"]


def test_what_has_no_room_is_refused_before_anything_is_read(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", [f"k{n:03}" for n in range(100)], 200_000)
    fill(tmp_path / "p", [f"k{n:03}" for n in range(20)], 200_000)
    buckets = {"b": str(tmp_path / "o"), "other": str(tmp_path / "p")}
    with served(tmp_path / "d", buckets, capacity="12MB") as server:
        assert stoker(server, "load", "stoker://other").code == 0
        said = stoker(server, "load", "stoker://b")
        assert (said.code, said.out) == (1, "")
        assert "100 objects of 20 MB and there is room for 7.9" in said.err
        assert "may hold 12 MB, of which other buckets have 4." in said.err
        refused = stoker(server, "load", "stoker://b", "--json")
        assert (refused.code, refused.json["complete"]) == (1, False)
        assert refused.json["capacity_bytes"] == 12_000_000
        assert 7_000_000 < int(str(refused.json["room_bytes"])) < 8_000_000
        with client_of(server) as client:
            assert client.status().origin_bytes == 4_000_000
        forced = stoker(server, "load", "stoker://b", "--force", "--json")
        assert (forced.code, forced.json["complete"]) == (1, False)
        loaded, passed = (forced.json[name]["size_bytes"] for name in ("loaded", "passed"))  # type: ignore[index,call-overload]
        left = int(str(forced.json["left_bytes"]))
        assert loaded + passed == 20_000_000
        assert passed >= 12_000_000, "not more than there is room for is there"
        assert left == 0, "what it has brought does not leave for the rest"
        assert stoker(server, "load", "stoker://b", "--force").code == 1
        assert stoker(server, "load", "stoker://other", "--json").json["held"] == {
            "objects": 20,
            "size_bytes": 4_000_000,
        }


def test_lists_and_stats(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", ["a", "d/1", "d/2", "d/e/3", "d-", "z"], 900)
    with served(tmp_path / "d", {"b": str(tmp_path / "o"), "c": str(tmp_path / "o")}) as server:
        assert stoker(server, "ls", "stoker://") == (0, "b/\nc/\n", "")
        assert stoker(server, "ls", "stoker://b") == (0, "a\nd-\nd/\nz\n", "")
        assert stoker(server, "ls", "stoker://b", "--limit", "2").out == "a\nd-\n"
        assert stoker(server, "ls", "stoker://b/d/").out == "d/1\nd/2\nd/e/\n"
        assert stoker(server, "ls", "stoker://b/d", "--recursive").out == "d-\nd/1\nd/2\nd/e/3\n"
        sizes = [line.split() for line in stoker(server, "ls", "stoker://b", "-l").out.splitlines()]
        assert sizes[0][:2] == ["900", "B"]
        assert sizes[0][2].startswith("900-")
        assert sizes[2] == ["-", "-", "d/"]
        found = [json.loads(line) for line in stoker(server, "ls", "stoker://b", "--json").out.splitlines()]
        assert found[2] == {"key": "d/", "is_folder": True}
        assert found[3]["size_bytes"] == 900
        assert stoker(server, "ls", "stoker://b/no/") == (
            1,
            "",
            "stoker: there is nothing below stoker://b/no/\n",
        )
        told = stoker(server, "stat", "stoker://b/d/1")
        assert told.code == 0
        assert "size     900 B (900 bytes)" in told.out
        assert (
            stoker(server, "stat", "stoker://b/d/1", "--json").json["version"] == found[0]["version"] or True
        )
        absent = stoker(server, "stat", "stoker://b/no", "--json")
        assert (absent.code, absent.json["is_absent"]) == (1, True)
        assert "there is no object 'no' in bucket 'b'" in absent.err


def test_refresh_evict_and_pin(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", ["old/1", "old/2", "new/1"], 1000)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server:
        assert stoker(server, "load", "stoker://b").code == 0
        before = stoker(server, "stat", "stoker://b/old/1", "--json").json
        fill(tmp_path / "o", ["old/1"], 1500)
        assert stoker(server, "stat", "stoker://b/old/1", "--json").json["version"] == before["version"]
        assert stoker(server, "refresh", "stoker://b/old/").code == 0
        assert stoker(server, "stat", "stoker://b/old/1", "--json").json["size_bytes"] == 1500
        assert stoker(server, "pin", "stoker://b/new/") == (0, "pinned in b: new/\n", "")
        assert stoker(server, "pin", "stoker://b/old/", "--json").json["prefixes"] == ["new/", "old/"]
        assert stoker(server, "unpin", "stoker://b/old/").out == "pinned in b: new/\n"
        assert stoker(server, "load", "stoker://b", "--json").json["loaded"] == {
            "objects": 1,
            "size_bytes": 1500,
        }
        evicted = stoker(server, "evict", "stoker://b/old/", "--json")
        assert (evicted.code, evicted.json["blocks"], evicted.json["size_bytes"]) == (0, 2, 2500)
        refused = stoker(server, "evict", "stoker://b")
        assert (refused.code, "--yes" in refused.err) == (2, True)
        assert held_blocks(server) == 1
        assert (
            stoker(server, "evict", "stoker://b", "--yes").out == "stoker://b: 1 blocks are given up, 1 KB\n"
        )
        assert held_blocks(server) == 0


def test_who_may_not_and_what_is_not_there(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", ["k"])
    options = ("--token", "all-of-it", "--token", "only-b-of-it:b")
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}, *options) as server:
        assert stoker(server, "ls", "stoker://b").code == 1
        assert stoker(server, "evict", "stoker://b/k", "--token", "only-b-of-it")[::2] == (
            1,
            "stoker: token-2 may not pin or evict what is below 'k' in the bucket 'b'\n",
        )
        assert stoker(server, "load", "stoker://b", "--token", "only-b-of-it").code == 0
        for command in ("ls", "stat", "refresh", "evict", "pin", "load"):
            said = stoker(server, command, "stoker://c/k", "--token", "all-of-it")
            assert (said.code, said.out) == (4, ""), command
            assert "'c'" in said.err
    began = time.monotonic()
    for command in ("status", "top"):
        assert "no cache server answers" in stoker(server, command).err
    for command in ("ls", "stat", "refresh", "evict", "pin", "load"):
        assert stoker(server, command, "stoker://b/k").code == 4
    assert time.monotonic() - began < PATIENCE_S, "who never answered is not waited for"


def test_a_fleet_is_loaded_as_one(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", [f"k{n:03}" for n in range(300)], 3000)
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        token = ("--token", TOKEN)
        said = stoker(fleet.servers["x"], "load", "stoker://b", "--json", *token)
        assert said.code == 0, said
        assert said.json["loaded"] == {"objects": 300, "size_bytes": 900_000}
        held = fleet.held_blocks()
        assert sum(held.values()) == 300, "one copy of each"
        assert all(blocks > 50 for blocks in held.values())
        assert fleet.origin_bytes() == 900_000
        assert stoker(fleet.servers["z"], "load", "stoker://b", "--json", *token).json["held"] == {
            "objects": 300,
            "size_bytes": 900_000,
        }
        assert "x in a fleet of 3: x, y, z" in stoker(fleet.servers["x"], "status", *token).out
        assert len(stoker(fleet.servers["x"], "status", "--json", *token).json["fleet"]["members"]) == 3  # type: ignore[index,call-overload]
        evicted = stoker(fleet.servers["y"], "evict", "stoker://b/k0", "--json", *token)
        assert (evicted.code, evicted.json["blocks"]) == (0, 100)
        fleet.gone.append(fleet.servers["z"])
        fleet.servers.pop("z").child.kill()
        missed = stoker(fleet.servers["x"], "refresh", "stoker://b", *token)
        assert missed.code in (0, 1)
        assert ("z could not be told" in missed.err) == (missed.code == 1)


def test_a_server_of_the_fleet_is_lost_in_the_middle(tmp_path: Path) -> None:
    fill(tmp_path / "o", [f"k{n:04}" for n in range(1500)], 4000)
    # So slow that it is still under way, however late that is seen here.
    with fleet_of(tmp_path, "xyz", f"{tmp_path / 'o'}?stoker_mbps=1") as fleet:
        command = started(fleet.servers["z"], "load", "stoker://b", "--json", "--jobs", "1", "--token", TOKEN)
        wait_until(lambda: sum(fleet.held_blocks().values()) > 700, "nothing is loaded")
        fleet.gone.append(fleet.servers["z"])
        fleet.servers.pop("z").child.kill()
        out, err = command.communicate(timeout=180)
        assert command.returncode == 0, (out, err)
        said = json.loads(out)
        assert said["complete"]
        assert said["held"]["objects"] + said["loaded"]["objects"] == 1500
        assert said["held"]["objects"] <= 256, "of the request that was lost"
        assert "was lost meanwhile" in err
        assert sum(fleet.held_blocks().values()) == 1500


def test_a_server_that_hangs_is_left(tmp_path: Path) -> None:
    # Many more than are asked for before the first answer is looked at here, however late that is.
    keys = [f"k{n:04}" for n in range(3000)]
    fill(tmp_path / "o", keys, 1000)
    with fleet_of(tmp_path, "xyz", f"{tmp_path / 'o'}?stoker_mbps=16") as fleet:
        hung = fleet.servers["z"]
        stop = iter([lambda: hung.child.send_signal(signal.SIGSTOP)])

        def on_progress(counts: LoadCounts) -> None:
            if counts.objects > 100:
                next(stop, lambda: None)()

        with Servers(hung.url, TOKEN, timeout_s=1.0) as servers:
            assert servers.fleet() is not None
            loader = Loader(servers, "b", jobs=2, silence_s=2.0)
            counts = loader.run([Wanted(key, 1000) for key in keys], on_progress, 0.1)
        assert (counts.objects, counts.failures, counts.passed) == (3000, [], 0)
        fleet.gone.append(fleet.servers.pop("z"))
        assert 2700 < sum(fleet.held_blocks().values()) <= 3000


def test_a_server_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    fill(tmp_path / "o", [f"k{n:04}" for n in range(1000)], 4000)
    buckets = {"b": f"{tmp_path / 'o'}?stoker_mbps=8"}
    with served(tmp_path / "d", buckets) as server:
        command = started(server, "load", "stoker://b", "--json")
        wait_until(lambda: held_blocks(server) > 100, "nothing is loaded")
        server.stop(signal.SIGKILL)
        with served(tmp_path / "d", buckets, "--listen", server.url.removeprefix("http://")) as again:
            out, err = command.communicate(timeout=120)
            assert command.returncode == 0, (out, err)
            said = json.loads(out)
            assert said["held"]["objects"] + said["loaded"]["objects"] == 1000
            assert held_blocks(again) == 1000


def test_an_interrupted_load_goes_on(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", [f"k{n:04}" for n in range(1000)], 4000)
    with served(tmp_path / "d", {"b": f"{tmp_path / 'o'}?stoker_mbps=2"}) as server:
        command = started(server, "load", "stoker://b")
        wait_until(lambda: held_blocks(server) > 100, "nothing is loaded")
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=60)
        assert (command.returncode, out, err) == (130, "", "stoker: interrupted\n")
        assert held_blocks(server) < 1000, "it does not wait for what it has asked for"
        said = stoker(server, "load", "stoker://b", "--json")
        assert said.code == 0
        assert int(said.json["held"]["objects"]) >= 100  # type: ignore[index,call-overload]
        assert said.json["objects"] == 1000


def test_progress_is_said_now_and_then(
    tmp_path: Path, stoker: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.cli.cache_progress.LINE_EVERY_S", 0.0)
    fill(tmp_path / "o", [f"k{n:04}" for n in range(600)], 1000)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server:
        said = stoker(server, "load", "stoker://b")
    assert said.code == 0
    lines = said.err.splitlines()
    assert "600 of 600 objects, 600 KB of 600 KB, " in lines[-1]
    assert all(line.startswith("loading stoker://b: ") for line in lines)


def test_top_in_a_pipe(tmp_path: Path, stoker: Command) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(20)], 1000)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server:
        once = stoker(server, "top", "--once", "--interval", "100ms")
        assert once.code == 0
        assert once.out.splitlines()[1].split()[:3] == ["BUCKET", "HITS/S", "HIT"]
        assert once.out.splitlines()[2].split()[:3] == ["b", "0", "-"]
        command = started(server, "top", "--json", "--interval", "300ms")
        assert command.stdout is not None
        look = json.loads(command.stdout.readline())
        assert look["state"] == "ok"
        with client_of(server) as client:
            client.read_many("b", list(objects))
        read_bytes = 0.0
        while look["buckets"][0]["held_bytes"] < 20_000:  # what it said before comes first
            before_s, look = look["uptime_s"], json.loads(command.stdout.readline())
            read_bytes += look["buckets"][0]["origin_bytes_per_s"] * (look["uptime_s"] - before_s)
        assert read_bytes == pytest.approx(20_000, rel=0.01)
        assert look["buckets"][0]["held_bytes"] == 20_000
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
        assert (command.returncode, err) == (130, "stoker: interrupted\n")


def test_status_tells_how_buckets_are_kept(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", ["a/1", "hot/1", "logs/1"], 4096)
    config = tmp_path / "cache.toml"
    config.write_text(
        f'[buckets.b]\norigin_url = "{tmp_path}/o"\nquota_bytes = 40960\nmax_replicas = 2\nttl_s = 60.0\n'
        'policy = "uniform"\nprefixes = [{prefix = "logs/", quota_bytes = 8192}, {prefix = "x/", pinned = true}]\n'
        f'[buckets.plain]\norigin_url = "{tmp_path}/o"\nmax_replicas = 0\n'
    )
    with served(tmp_path / "s", {}, "--config", str(config), capacity="100MB") as server:
        assert stoker(server, "pin", "stoker://b/hot/").code == 0
        with client_of(server) as client:
            for key in ("a/1", "hot/1", "logs/1"):
                client.read("b", key)
            wait_until_held(client, 3)
        said = stoker(server, "status")
        lines = [line.strip() for line in said.out.splitlines()]
        assert "takes 12.3 KB of its quota of 41 KB (30%), at most 2 copies, ttl 1 min 0 s" in lines, said.out
        assert "logs/: takes 4.1 KB of its quota of 8.19 KB (50%)" in lines
        assert "hot/: takes 4.1 KB, pinned" in lines
        assert "x/: takes 0 B, pinned" in lines
        assert "no quota, a copy wherever it is read, ttl 1 h 0 min" in lines
        assert any(line.startswith("b  uniform  held") for line in lines)
        row = stoker(server, "status", "--json").json["buckets"][0]  # type: ignore[index]
        wanted = {"used_bytes": 12288, "quota_bytes": 40960, "max_replicas": 2, "ttl_s": 60.0}
        assert wanted.items() <= row.items()
        assert row["pins"] == ["x/", "hot/"]
        assert row["prefixes"][0] == {
            "prefix": "logs/", "used_bytes": 4096, "quota_bytes": 8192, "pinned": False,
        }  # fmt: skip


def test_a_load_beyond_its_quota_is_refused_before_anything_is_read(tmp_path: Path, stoker: Command) -> None:
    fill(tmp_path / "o", [f"a/{n}" for n in range(20)] + [f"c/{n}" for n in range(20)], 100_000)
    config = tmp_path / "cache.toml"
    config.write_text(
        f'[buckets.b]\norigin_url = "{tmp_path}/o"\nquota_bytes = 3000000\n'
        'prefixes = [{prefix = "a/", quota_bytes = 1000000}]\n'
    )
    with served(tmp_path / "s", {}, "--config", str(config), capacity="100MB") as server:
        for url, words in (
            ("stoker://b", "of which a/ has 2 MB, and may take 1 MB"),
            ("stoker://b/a/", "may take 1 MB"),
        ):
            said = stoker(server, "load", url)
            assert said.code == 1
            assert words in said.err
        assert held_blocks(server) == 0
        fill(tmp_path / "o", [f"c/{n}" for n in range(20, 40)], 100_000)
        said = stoker(server, "load", "stoker://b/c/", "--json")
        assert (said.code, said.json["quota_bytes"], said.json["room_bytes"]) == (1, 3_000_000, 3_000_000)
        assert "and its quota is 3 MB" in said.err
        assert held_blocks(server) == 0
        assert stoker(server, "load", "stoker://b/c/1").code == 0
        assert stoker(server, "load", "stoker://b/a/", "--force").code == 1
        with client_of(server) as client:
            assert client.status().buckets[0].prefixes[0].used_bytes <= 1_000_000
