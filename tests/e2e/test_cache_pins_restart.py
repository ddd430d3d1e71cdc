"""Pins, and buckets that were added, are in force from the first moment of a restart on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.cache_helpers import client_of, fill, served, wait_until_held

pytestmark = pytest.mark.real


def test_what_is_pinned_outlives_a_restart_with_less_room(tmp_path: Path) -> None:
    pinned = fill(tmp_path / "o", [f"p/{n:03}" for n in range(200)], 10_000)
    others = fill(tmp_path / "o", [f"x/{n:03}" for n in range(600)], 10_000)
    folder = tmp_path / "d"
    with served(folder, {}, capacity="20MB") as server, client_of(server) as client:
        client.add_bucket("b", str(tmp_path / "o"))
        client.read_many("b", list(pinned))
        client.pin("b", "p/")
        client.read_many("b", list(others))
        wait_until_held(client, 800)
    with served(folder, {}, capacity="5MB") as server, client_of(server) as client:
        deadline = time.monotonic() + 60
        while (status := client.status()).held_bytes > 5_000_000:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert status.buckets[0].pins == ["p/"]
        assert client.read_many("b", list(pinned)) == list(pinned.values())
        assert client.status().misses == 0, "all that is pinned is held"
        assert 200 <= client.status().held_blocks < 500
