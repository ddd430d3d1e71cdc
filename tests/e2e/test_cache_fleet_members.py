"""Members that are not to be used: gone before they were seen, with another token, other blocks, or a name twice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.cache.client.client import CacheClient
from stoker.cli.cache_ask import describe
from stoker.wire.cache_api import FleetStatus
from tests.e2e.cache_helpers import RUN_CLI, ServerProcess, client_of, fill, served, still_told_of
from tests.e2e.etcd import Etcd, free_ports, running_etcd
from tests.e2e.test_cache_fleet_start import has_met, members, wait_until

pytestmark = pytest.mark.real
TOKEN, OTHER = "a-token-of-the-fleet", "a-token-of-another-fleet"

RUN_SMALL_BLOCKS = """
import sys
from pathlib import Path
from stoker.cache.server.serving import serve
from stoker.cache.server.settings import ServerSettings
from stoker.wire.cache_api import BucketSpec
folder, origin, fleet, token = sys.argv[1:]
settings = ServerSettings(
    Path(folder), 10**9, buckets={"b": BucketSpec(origin)}, tokens=[token], fleet=fleet, name="small",
    block_size_bytes=1_000_000,
)
serve(settings, lambda listening: print("serving at", listening.endpoint, flush=True), lambda _: None)
"""


def fleet_at(url: str, token: str = TOKEN) -> FleetStatus:
    with CacheClient(url, token, timeout_s=20.0) as client:
        return client.fleet()


def test_a_member_that_was_gone_before_is_never_waited_for(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(20)])
    (tmp_path / "members").mkdir()
    ghosts = [tmp_path / "members" / f"ghost{n}.member" for n in range(3)]
    for n, ghost in enumerate(ghosts):
        said = {"member": {"name": f"ghost{n}", "url": "http://127.0.0.1:1"}, "beat": 1}
        ghost.write_bytes(msgspec.json.encode(said))
    options = ("--fleet", str(tmp_path / "members"), "--name", "x")
    with (
        contextlib.ExitStack() as telling,
        served(tmp_path / "x", {"b": str(tmp_path / "o")}, *options) as server,
        client_of(server) as client,
    ):
        telling.enter_context(still_told_of(*ghosts))
        fleet = client.fleet()
        assert fleet.down == ["ghost0", "ghost1", "ghost2"], "nobody has asked for anything yet"
        assert all("cannot be asked" in trouble.why for trouble in fleet.troubles)
        assert client.read_many("b", list(objects)) == list(objects.values())
        assert client.status().fleet is not None
        assert "ghost1 is not used since" in describe(server.url, client.status(), fleet)
        telling.close()
        wait_until(lambda: members(server) == {"x"})
        assert client.fleet().troubles == []


def test_a_server_that_refuses_our_token_is_named_with_the_reason(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(20)])
    buckets = {"b": str(tmp_path / "o")}
    port = str(free_ports(1)[0])

    def y(token: str) -> contextlib.AbstractContextManager[ServerProcess]:
        options = ("--fleet", str(tmp_path / "members"), "--name", "y", "--listen", f"127.0.0.1:{port}")
        return served(tmp_path / "y", buckets, *options, "--token", token)

    options = ("--fleet", str(tmp_path / "members"), "--name", "x", "--token", TOKEN)
    with served(tmp_path / "x", buckets, *options) as x, client_of(x, TOKEN) as client:
        for token in (OTHER, f"{TOKEN}:b"):
            with y(token):
                wait_until(lambda: is_refused(fleet_at(x.url)), fleet_at(x.url))
                assert fleet_at(x.url).down == ["y"]
                assert client.read_many("b", list(objects)) == list(objects.values())
                client.refresh("b")
                assert client.read_many("b", list(objects)) == list(objects.values())
            wait_until(lambda: members(x, TOKEN) == {"x"})
        with y(TOKEN):
            wait_until(lambda: has_met(x, {"x", "y"}, TOKEN))
            assert fleet_at(x.url).troubles == []
        _, errors = x.stop()
    assert errors.count("y is left out until it can be used: http://127.0.0.1:") == 2, errors


def is_refused(said: FleetStatus) -> bool:
    """Whether y alone is not used, because of a token."""
    (why,) = [trouble.why for trouble in said.troubles if trouble.name == "y"] or [""]
    return len(said.troubles) == 1 and (
        "refuses our token" in why or "does not let our token open everything" in why
    )


def test_a_token_that_is_changed_while_both_run_is_noticed(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n}" for n in range(40)])
    buckets = {"b": str(tmp_path / "o")}
    port = str(free_ports(1)[0])
    common = ("--fleet", str(tmp_path / "members"))
    y = (*common, "--name", "y", "--listen", f"127.0.0.1:{port}", "--token")
    with served(tmp_path / "x", buckets, *common, "--name", "x", "--token", TOKEN) as x:
        with served(tmp_path / "y", buckets, *y, TOKEN) as first:
            wait_until(lambda: members(x, TOKEN) == {"x", "y"})
            first.stop(signal.SIGKILL)
        with served(tmp_path / "y", buckets, *y, OTHER), client_of(x, TOKEN) as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
            wait_until(lambda: any("refuses our token" in t.why for t in fleet_at(x.url).troubles))


@contextlib.contextmanager
def small_blocks(folder: Path, fleet: str) -> Iterator[str]:
    """A server whose blocks have another size; its URL."""
    arguments = [str(folder / "small"), str(folder / "o"), fleet, TOKEN]
    child = subprocess.Popen(
        [sys.executable, "-c", RUN_SMALL_BLOCKS, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        yield child.stdout.readline().split()[2]
    finally:
        child.terminate()
        child.communicate(timeout=60)


def test_servers_with_blocks_of_other_sizes_do_not_use_each_other(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", ["big"], 25_000_000) | fill(tmp_path / "o", ["k"])
    fleet = str(tmp_path / "members")
    options = ("--fleet", fleet, "--name", "x", "--token", TOKEN)
    with (
        served(tmp_path / "x", {"b": str(tmp_path / "o")}, *options) as x,
        small_blocks(tmp_path, fleet) as small_url,
    ):
        for url, size in ((x.url, "blocks have 1000000 bytes"), (small_url, "blocks have 4194304 bytes")):
            wait_until(lambda url=url, size=size: any(size in one.why for one in fleet_at(url).troubles))  # type: ignore[misc]
        for url in (x.url, small_url):
            with CacheClient(url, TOKEN, timeout_s=20.0) as client:
                for _ in range(2):
                    assert client.read("b", "big") == objects["big"]
                    assert client.read("b", "big", 900_000, 9_000_001) == objects["big"][900_000:9_000_001]
                    assert client.read("b", "k") == objects["k"]
                assert all(bucket.peer_bytes == 0 for bucket in client.status().buckets)


def refused(*arguments: str) -> str:
    """What a server says that does not start."""
    command = [sys.executable, "-c", RUN_CLI, "cache", "serve", "--listen", "127.0.0.1:0", *arguments]
    ended = subprocess.run(
        [*command, "--capacity", "1GB"], capture_output=True, text=True, timeout=90, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    return ended.stderr


@pytest.mark.parametrize("kind", ["folder", "etcd", "list"])
def test_a_second_server_of_one_name_does_not_start(tmp_path: Path, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        listen: tuple[str, ...] = ()
        fleet = str(tmp_path / "members")
        if kind == "etcd":
            fleet = stack.enter_context(running_etcd(tmp_path / "etcd")).url
        elif kind == "list":
            port, other = free_ports(2)
            listen = ("--listen", f"127.0.0.1:{port}")
            # As a host's name, where the server listens at its address: it is the same one.
            fleet = f"x=http://localhost:{port},y=http://127.0.0.1:{other}"
        options = ("--fleet", fleet, "--name", "x")
        first = stack.enter_context(served(tmp_path / "1", {}, *options, *listen))
        said = refused("--dir", str(tmp_path / "2"), *options)
        at = first.url.replace("127.0.0.1", "localhost") if kind == "list" else first.url
        assert f"there is another server named 'x' at {at}" in said
        assert "x" in members(first)
        first.stop(signal.SIGKILL)
        second = stack.enter_context(served(tmp_path / "2", {}, *options))
        found = {member.name: member.url for member in fleet_at(second.url).members}
        assert found["x"] == second.url
        second.stop(signal.SIGKILL)
        stack.enter_context(
            served(tmp_path / "2", {}, *options, "--listen", second.url.removeprefix("http://"))
        )


@pytest.mark.parametrize("kind", ["folder", "etcd"])
def test_of_two_servers_of_one_name_that_came_together_one_leaves(tmp_path: Path, kind: str) -> None:
    """Both serve alone while their fleet cannot be reached, and then join it at the same time."""
    etcd = Etcd(tmp_path / "etcd")
    away = tmp_path / "mount"
    away.write_text("what is no folder")
    fleet = etcd.url if kind == "etcd" else f"{away}/members"
    try:
        with (
            served(tmp_path / "1", {}, "--fleet", fleet, "--name", "x") as one,
            served(tmp_path / "2", {}, "--fleet", fleet, "--name", "x") as two,
            served(tmp_path / "3", {}, "--fleet", fleet, "--name", "y") as third,
        ):
            if kind == "etcd":
                etcd.start()
            else:
                os.unlink(away)
            wait_until(lambda: one.child.poll() is not None or two.child.poll() is not None)
            left, stays = (one, two) if one.child.poll() is not None else (two, one)
            code, errors = left.finish()
            assert code == 2
            assert f"there is another server named 'x' at {stays.url}" in errors
            wanted = {"x": stays.url, "y": third.url}
            time.sleep(1.5)  # until it has been heard that the other one left
            for server in (stays, third):
                wait_until(
                    lambda server=server: (  # type: ignore[misc]
                        {member.name: member.url for member in fleet_at(server.url).members} == wanted
                    )
                )
            assert stays.child.poll() is None
    finally:
        etcd.stop()
