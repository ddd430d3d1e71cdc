"""Blobs in fleets of real servers: whoever is asked, whoever dies and comes back, nobody gets what was overwritten."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cache_helpers import ServerProcess, client_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]
TOKEN = "a-token-of-the-fleet"
PATIENCE_S = 90.0
MIB = 1024 * 1024


class BlobFleet:
    """Servers that meet in a folder, each with a disk folder of its own, and a bucket `p` for blobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: dict[str, ServerProcess] = {}

    def start(self, *names: str) -> None:
        for name in names:
            self.servers[name] = ServerProcess(
                "--dir", str(self.folder / name), "--capacity", "1GB", "--token", TOKEN, "--name", name,
                "--blob-bucket", "p=200MB", "--fleet", f"file://{self.folder}/members",
            )  # fmt: skip

    def kill(self, name: str) -> None:
        self.servers.pop(name).stop(signal.SIGKILL)

    def ask(self, name: str, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        host, port = self.servers[name].url.removeprefix("http://").split(":")
        link = http.client.HTTPConnection(host, int(port), timeout=30)
        try:
            link.request(method, f"/blob/p/{key}", body, {"Authorization": f"Bearer {TOKEN}"})
            response = link.getresponse()
            return response.status, response.read()
        finally:
            link.close()

    def announce(self, name: str, key: str, size_bytes: int) -> int:
        """The answer to a PUT of which no byte has come yet."""
        host, port = self.servers[name].url.removeprefix("http://").split(":")
        link = http.client.HTTPConnection(host, int(port), timeout=30)
        try:
            link.putrequest("PUT", f"/blob/p/{key}")
            link.putheader("Authorization", f"Bearer {TOKEN}")
            link.putheader("Content-Length", str(size_bytes))
            link.endheaders()
            return link.getresponse().status
        finally:
            link.close()

    def get(self, name: str, key: str) -> bytes | None:
        status, body = self.ask(name, "GET", key)
        assert status in (200, 404), (status, body)
        return body if status == 200 else None

    def put(self, name: str, key: str, data: bytes) -> None:
        """Until it is acknowledged: while it is not clear who may, nobody writes."""
        said: list[tuple[int, bytes]] = []

        def is_put() -> bool:
            said.append(self.ask(name, "PUT", key, data))
            assert said[-1][0] in (201, 503), said[-1]
            return said[-1][0] == 201

        wait_for(is_put, lambda: f"{name} takes {key}: {said[-3:]}")

    def members(self, name: str) -> set[str]:
        with client_of(self.servers[name], TOKEN) as client:
            status = client.fleet()
            return {member.name for member in status.members} - set(status.down)

    def see_each_other(self) -> None:
        everyone = set(self.servers)
        wait_for(
            lambda: all(self.members(name) == everyone for name in everyone),
            lambda: str({name: self.members(name) for name in everyone}),
        )

    def held(self) -> dict[str, int]:
        found = {}
        for name, server in self.servers.items():
            with client_of(server, TOKEN) as client:
                found[name] = client.status().held_blocks
        return found

    def stop(self) -> None:
        for server in self.servers.values():
            if server.child.poll() is None:
                server.child.kill()
                server.finish()


def wait_for(is_so: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


@contextlib.contextmanager
def fleet_of(folder: Path, *names: str) -> Iterator[BlobFleet]:
    fleet = BlobFleet(folder)
    try:
        fleet.start(*names)
        fleet.see_each_other()
        yield fleet
    finally:
        fleet.stop()


def test_an_owner_that_was_away_never_gives_what_was_overwritten(tmp_path: Path) -> None:
    keys = [f"file://data/{number}?x=1" for number in range(12)]
    with fleet_of(tmp_path, "a", "b", "c") as fleet:
        for number, key in enumerate(keys):
            fleet.put("abc"[number % 3], key, b"old" + key.encode())
        for name in "abc":
            assert [fleet.get(name, key) for key in keys] == [b"old" + key.encode() for key in keys]
        held = fleet.held()
        assert sum(held.values()) == len(keys)  # one copy of each
        away = max(held, key=lambda name: held[name])
        one, other = sorted(set("abc") - {away})
        fleet.kill(away)
        for key in keys:
            fleet.put(one, key, b"new" + key.encode())
        for name in (one, other):
            assert {fleet.get(name, key) for key in keys} <= {None, *(b"new" + key.encode() for key in keys)}
        fleet.start(away)
        for _ in range(5):  # from its first moment on
            for key in keys:
                assert fleet.get(away, key) in (None, b"new" + key.encode())
        fleet.see_each_other()
        for name in "abc":
            wait_for(
                lambda name=name: (
                    [fleet.get(name, key) for key in keys] == [b"new" + key.encode() for key in keys]
                ),
                lambda name=name: str([(key, fleet.get(name, key)) for key in keys]),
            )
        fleet.kill(one)
        fleet.kill(other)
        for key in keys:
            assert fleet.get(away, key) in (None, b"new" + key.encode())
            assert fleet.ask(away, "PUT", key, b"newest")[0] == 503  # nobody else would know of it


def test_whoever_is_asked_of_a_fleet_answers_in_parts_and_in_full(tmp_path: Path) -> None:
    with fleet_of(tmp_path, "a", "b", "c") as fleet:
        blobs = {str(size): os.urandom(size) for size in (0, 1, 70_000, 9 * MIB)}
        for key, data in blobs.items():
            fleet.put("a", key, data)
            for name in "abc":
                assert fleet.get(name, key) == data
                assert fleet.ask(name, "HEAD", key) == (200, b"")
        for name in "abc":
            fleet.put(name, "changing", name.encode())
            assert {fleet.get(other, "changing") for other in "abc"} == {name.encode()}
        with ThreadPoolExecutor(12) as pool:  # many workers have read the same, and push it
            for size in (10, 5 * MIB):
                bodies = [bytes([number]) * size for number in range(12)]
                said = pool.map(fleet.ask, "abc" * 4, ["PUT"] * 12, ["pushed"] * 12, bodies)
                assert [status for status, _ in said] == [201] * 12
                found = {fleet.get(name, "pushed") for name in "abc"}
                assert len(found) == 1
                assert found < set(bodies)
        wait_for(lambda: fleet.ask("b", "DELETE", "changing")[0] == 204, lambda: "it is removed")
        assert {fleet.get(name, "changing") for name in "abc"} == {None}
        assert {fleet.announce(name, "large", 201 * MIB) for name in "abc"} == {413}


def test_blobs_of_a_fleet_are_there_after_all_were_started_anew(tmp_path: Path) -> None:
    keys = [str(number) for number in range(8)]
    with fleet_of(tmp_path, "a", "b", "c") as fleet:
        for key in keys:
            fleet.put("a", key, key.encode())
        for name in "abc":
            assert fleet.servers.pop(name).stop()[0] == 0
        fleet.start("a", "b", "c")
        fleet.see_each_other()
        assert [fleet.get("b", key) for key in keys] == [key.encode() for key in keys]


def test_a_server_that_comes_to_own_a_blob_has_it_from_who_owned_it(tmp_path: Path) -> None:
    keys = [str(number) for number in range(24)]
    with fleet_of(tmp_path, "a", "b") as fleet:
        for key in keys:
            fleet.put("a", key, key.encode())
        fleet.start("c")
        fleet.see_each_other()
        for name in "abc":
            assert [fleet.get(name, key) for key in keys] == [key.encode() for key in keys]
        assert fleet.held()["c"] > 0


def test_of_two_servers_the_one_that_is_left_serves_what_it_had_served(tmp_path: Path) -> None:
    keys = [str(number) for number in range(12)]
    with fleet_of(tmp_path, "a", "b") as fleet:
        for key in keys:
            fleet.put("a", key, key.encode())
        wait_for(
            lambda: [fleet.get("a", key) for key in keys] == [key.encode() for key in keys],
            lambda: "all there",
        )
        time.sleep(
            10
        )  # b, which is asked each second, has promised by now that it does not write what is a's
        assert [fleet.get("a", key) for key in keys] == [key.encode() for key in keys]
        own = fleet.held()["a"]
        assert 0 < own < len(keys)
        fleet.kill("b")
        for _ in range(30):  # while its fleet still has the other one, and after
            found = [fleet.get("a", key) for key in keys]
            assert sum(data is not None for data in found) == own
            assert {*found} <= {None, *(key.encode() for key in keys)}
            time.sleep(0.5)
        assert fleet.members("a") == {"a"}
        status, said = fleet.ask("a", "PUT", "0", b"new")
        assert status == 503
        assert b"cannot be written now" in said
        fleet.start("b")
        fleet.see_each_other()
        wait_for(
            lambda: [fleet.get("a", key) for key in keys] == [key.encode() for key in keys],
            lambda: "all again",
        )
        fleet.put("b", "0", b"new")
        assert {fleet.get(name, "0") for name in "ab"} == {b"new"}
