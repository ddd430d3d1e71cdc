"""Lists in fleets of real servers: each keeps what it was told, for as long as the origin's word is good."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.test_cache_fleet import fleet_of

pytestmark = pytest.mark.real


def test_who_was_told_a_list_needs_nobody_to_tell_it_again(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    (origin / "f").mkdir(parents=True)
    for number in range(5):
        (origin / "f" / f"{number}").write_bytes(b"x")
    with fleet_of(tmp_path, "abc", str(origin), ttl_s=600.0) as fleet:
        before = fleet.origin_requests()
        for _ in range(2):
            for name in "abc":
                with fleet.client(name) as client:
                    assert [info.key for info in client.list_objects("b", "f/")] == [
                        f"f/{n}" for n in range(5)
                    ]
        assert fleet.origin_requests() - before <= 2, "one list, which one of them asked for"
        (origin / "f" / "5").write_bytes(b"x")
        with fleet.client("a") as client:
            assert client.refresh_fleet("b", "f/").missed == []
        for name in "abc":  # nobody goes on with what it kept
            with fleet.client(name) as client:
                assert len(client.list_objects("b", "f/")) == 6
        origin.rename(tmp_path / "away")
        for name in "bc":
            fleet.servers[name].child.send_signal(signal.SIGKILL)
        with fleet.client("a") as client:
            assert [info.key for info in client.list_objects("b", "f/")] == [f"f/{n}" for n in range(6)]


def test_a_list_is_as_old_as_it_was_where_it_came_from(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "0").write_bytes(b"x")
    with fleet_of(tmp_path, "abc", str(origin), ttl_s=600.0) as fleet:
        for round_s in (0.0, 1.5, 3.0):
            time.sleep(1.5 if round_s else 0.0)
            for name in "abc":
                with fleet.client(name) as client:
                    page = client.list_page("b", "", None, 1000)
                assert len(page.objects) == 1
                assert page.age_s >= round_s
        (origin / "1").write_bytes(b"x")
        with fleet.client("b") as client:
            client.refresh_fleet("b")
        for name in "abc":
            with fleet.client(name) as client:
                page = client.list_page("b", "", None, 1000)
            assert len(page.objects) == 2
