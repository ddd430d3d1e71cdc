"""Servers of a fleet that tell each other what they hold: what there are copies of leaves before last copies do."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.summary import Summary, block_hash, object_hash
from stoker.errors import AccessDenied
from stoker.wire.cache_api import BucketSpec, FleetStatus, HeldAnswer, HeldQuery
from tests.e2e.cache_helpers import fill

pytestmark = pytest.mark.real
TOKEN = "a-token-of-the-fleet"
EVERY_S = 0.5
SERVE = """
import json, sys
from pathlib import Path
from stoker.cache.server.serving import serve
from stoker.cache.server.settings import ServerSettings
from stoker.wire.cache_api import BucketSpec
import msgspec
said = json.loads(sys.argv[1])
said["buckets"] = {name: msgspec.convert(spec, BucketSpec) for name, spec in said["buckets"].items()}
said["folder"] = Path(said["folder"])
serve(ServerSettings(**said), lambda listening: print(listening.endpoint, flush=True), lambda stopping: None)
"""


class Server:
    """A server process whose summaries are made more often than a command line can say."""

    def __init__(self, folder: Path, name: str, capacity_bytes: int, **buckets: BucketSpec) -> None:
        settings = {
            "folder": str(folder / name), "capacity_bytes": capacity_bytes, "name": name,
            "tokens": [TOKEN, "for-one-bucket:b"], "fleet": f"file://{folder}/members",
            "summary_every_s": EVERY_S, "buckets": msgspec.to_builtins(buckets),
        }  # fmt: skip
        self.child = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(settings)], stdout=subprocess.PIPE, text=True
        )
        assert self.child.stdout is not None
        self.url = self.child.stdout.readline().strip()

    def client(self, token: str = TOKEN) -> contextlib.AbstractContextManager[CacheClient]:
        return CacheClient(self.url, token, timeout_s=20.0)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.child.poll() is None:
            self.child.send_signal(number)
        self.child.communicate(timeout=60)

    def blocks_told(self) -> dict[str, int]:
        with self.client() as client:
            return {one.name: one.blocks for one in client.fleet().summaries}

    def held(self, keys: list[str]) -> set[str]:
        with self.client() as client:
            blocks = [(key, client.stat("b", key).version, 0) for key in keys]
            body = msgspec.msgpack.encode(HeldQuery(blocks))
            said = client._call("POST", "/-/held/b", HeldAnswer, body)
        return {key for key, is_held in zip(keys, said.held, strict=True) if is_held}

    def origin_bytes(self) -> int:
        with self.client() as client:
            return client.status().origin_bytes


@contextlib.contextmanager
def fleet_of(folder: Path, names: str, capacity_bytes: int, spec: BucketSpec) -> Iterator[dict[str, Server]]:
    servers: dict[str, Server] = {}
    folder.mkdir(exist_ok=True)
    try:
        for name in names:
            servers[name] = Server(folder, name, capacity_bytes, b=spec)
        wait_for(lambda: all(len(members(server)) == len(names) for server in servers.values()))
        yield servers
    finally:
        for server in servers.values():
            server.child.send_signal(signal.SIGKILL)
        for server in servers.values():
            server.child.communicate()


def members(server: Server) -> list[str]:
    with server.client() as client:
        return [member.name for member in client._call("GET", "/-/fleet", FleetStatus).members]


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def summaries_come(servers: dict[str, Server]) -> None:
    """Wait until every server has a summary of each that was made after now."""
    began = time.monotonic()

    def all_are_newer() -> bool:
        for server in servers.values():
            with server.client() as client:
                found = client.fleet().summaries
            ages = [one.age_s for one in found]
            if len(ages) < len(servers) or max(ages) > time.monotonic() - began:
                return False
        return True

    wait_for(all_are_newer)


def read_all(servers: dict[str, Server], objects: dict[str, bytes], *, waits: bool) -> None:
    for server in servers.values():
        with server.client() as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
        if waits:
            summaries_come(servers)


def test_a_fleet_that_counts_copies_holds_more_and_asks_the_origin_less(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(480)], 12_500)
    distinct, origin_bytes = {}, {}
    for policy in ("lru", "replica-aware"):
        spec = BucketSpec(str(tmp_path / "o"), policy=policy, max_replicas=0)
        with fleet_of(tmp_path / policy, "xyz", 3_000_000, spec) as servers:
            for epoch in range(6):
                if epoch == 2:
                    before = sum(server.origin_bytes() for server in servers.values())
                read_all(servers, objects, waits=policy == "replica-aware")
            # Each epoch alone differs by a tenth from run to run: what is sampled is chance.
            origin_bytes[policy] = sum(server.origin_bytes() for server in servers.values()) - before
            held = [server.held(list(objects)) for server in servers.values()]
            distinct[policy] = len(set().union(*held))
    assert distinct["replica-aware"] > distinct["lru"], distinct
    assert origin_bytes["replica-aware"] < 0.6 * origin_bytes["lru"], origin_bytes


def test_a_server_tells_its_fleet_what_it_holds_and_nobody_else(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", [f"k{n:03}" for n in range(50)], 1000)
    spec = BucketSpec(str(tmp_path / "o"), policy="replica-aware", max_replicas=0)
    with fleet_of(tmp_path, "xy", 10_000_000, spec) as servers:
        read_all(servers, objects, waits=False)
        wait_for(lambda: all(server.blocks_told() == {"x": 50, "y": 50} for server in servers.values()))
        with servers["x"].client() as client:
            versions = {key: client.stat("b", key).version for key in objects}
        asked = urllib.request.Request(
            f"{servers['y'].url}/-/summary", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(asked) as answer:
            summary = Summary.decode(answer.read(), 0.0)
        assert all(summary.holds(block_hash(object_hash("b", key, versions[key]), 0)) for key in objects)
        assert sum(summary.holds(block_hash(object_hash("b", key, "old"), 0)) for key in objects) < 10
        with servers["x"].client("for-one-bucket") as client, pytest.raises(AccessDenied):
            client._call("GET", "/-/summary", dict)
        servers.pop("y").stop(signal.SIGKILL)
        wait_for(lambda: members(servers["x"]) == ["x"])
        assert servers["x"].blocks_told() == {}, "nobody is left to tell"
