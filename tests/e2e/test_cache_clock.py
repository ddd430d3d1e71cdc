"""The clock of a real server's machine is set by hours, while it runs and between two runs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.e2e.cache_helpers import ServerProcess, client_of, fill, wait_until_held

pytestmark = pytest.mark.real
HOURS = 3600
TTL_S = 600
SET_BACK = "clock was set back"


class Clock:
    """What a server that is started with `environment` takes for the time, beside the one that only goes on."""

    def __init__(self, folder: Path) -> None:
        found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
        if not found:
            pytest.skip("no libfaketime: on Debian, apt-get install faketime")
        self.path = folder / "clock"
        self.set(0)
        self.environment = {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self.path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, offset_s: int) -> None:
        self.path.write_text(f"{offset_s:+d}s")


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path)


def start(folder: Path, clock: Clock) -> ServerProcess:
    config = folder / "cache.toml"
    config.write_text(f'[buckets.b]\norigin_url = "{folder}/o"\nttl_s = {TTL_S}\n')
    options = ("--dir", str(folder / "d"), "--capacity", "1GB", "--config", str(config))
    return ServerProcess(*options, environment=clock.environment)


def test_what_is_held_is_served_through_all_of_it_and_asked_about_once_for_each_start(
    tmp_path: Path, clock: Clock
) -> None:
    objects = fill(tmp_path / "o", [f"{n:02}" for n in range(20)], 3000) | fill(
        tmp_path / "o", ["big"], 5_000_000
    )
    read = itertools.count()
    for offset_s in (0, -10 * HOURS, 20 * HOURS):
        clock.set(offset_s)
        server = start(tmp_path, clock)
        with client_of(server) as client:
            for jump_s in (0, 5 * HOURS, -5 * HOURS, 0):
                clock.set(offset_s + jump_s)
                assert client.read_many("b", list(objects)) == list(objects.values())
                assert client.read("b", "big", 5, 4_500_000) == objects["big"][5:4_500_000]
            wait_until_held(client, 22)
            status = client.status()
            assert status.state == "ok"
            assert [SET_BACK in note for note in status.notes] == [True] * (offset_s < 0)
            if next(read):
                assert status.origin_bytes == 0, "what an earlier run held is not read again"
                assert status.origin_requests == len(objects), "but its version asked for, once"
        assert_ended_well(server)


def test_what_changed_while_the_clock_was_set_back_is_seen(tmp_path: Path, clock: Clock) -> None:
    fill(tmp_path / "o", ["x"], 3000)
    for offset_s in (0, -40 * 365 * 24 * HOURS, 10 * HOURS):
        clock.set(offset_s)
        after = fill(tmp_path / "o", ["x"], 3000)["x"]
        server = start(tmp_path, clock)
        with client_of(server) as client:
            assert client.read("b", "x") == after
            clock.set(offset_s - HOURS)
            assert client.read("b", "x") == after
        assert_ended_well(server)


def assert_ended_well(server: ServerProcess) -> None:
    code, said = server.stop()
    assert code == 0
    assert all(SET_BACK in line for line in said.splitlines()), said
