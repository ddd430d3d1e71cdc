"""What is read for the first time is a miss, however quickly it was fetched and stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cache_helpers import client_of, fill, served, wait_until_held


@pytest.mark.real
@pytest.mark.parametrize("size_bytes", [100, 60_000, 100_000, 300_000])
@pytest.mark.parametrize("how", ["one by one", "batch"])
def test_first_reads_are_misses_and_second_ones_are_hits(tmp_path: Path, size_bytes: int, how: str) -> None:
    objects = fill(tmp_path / "o", [f"{n:03}" for n in range(100)], size_bytes)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        for hits, misses in ((0, 100), (100, 100)):
            if how == "batch":
                assert client.read_many("b", list(objects)) == list(objects.values())
            else:
                assert [client.read("b", key) for key in objects] == list(objects.values())
            status = client.status()
            assert (status.hits, status.misses) == (hits, misses)
            wait_until_held(client, 100)
