"""What clients are told of single objects, at once where the front knows it: from one server and from a fleet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import open_client
from stoker.cache.embedded import EmbeddedCache
from stoker.errors import AccessDenied, CacheUnavailable, ObjectNotFound, OriginError
from tests.e2e.cache_helpers import fill, served
from tests.e2e.test_cache_fleet import TOKEN, fleet_of

pytestmark = pytest.mark.real
ROOM = 10**9
TIME_S = 1_700_000_000
KEYS = {"a/small": 700, "a/none": 0, "a/large": 5_000_000, "ü ?#%/x": 10}


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "o"
    for key, size_bytes in KEYS.items():
        fill(folder, [key], size_bytes)
        os.utime(folder / key, (TIME_S, TIME_S))
    return folder


@pytest.fixture
def cache(origin: Path) -> Iterator[EmbeddedCache]:
    with EmbeddedCache(None, ROOM, {"b": str(origin)}, TOKEN) as running:
        yield running


def look(client: CacheClient) -> None:
    """Each as it is, however well it is known, and what is not there."""
    for key, size_bytes in KEYS.items():
        for _ in range(3):
            found = client.look_up("b", key)
            known = client.known("b", key)
            assert found is not None
            assert (found.key, found.size_bytes, found.version) == (key, size_bytes, known.version)
            assert found.modified_s == TIME_S
            assert len(client.read("b", key)) == size_bytes, "held from then on"
    for _ in range(2):
        assert client.look_up("b", "a/else") is None
        assert client.look_up("b", "a") is None
    with pytest.raises(ObjectNotFound):
        client.look_up("no-bucket", "a/small")
    assert client.look_up("b", "") is None, "it is no object, and not the bucket"


def test_one_server(cache: EmbeddedCache) -> None:
    with cache.client() as client:
        look(client)


def test_over_the_network(tmp_path: Path, origin: Path) -> None:
    with served(tmp_path / "d", {"b": str(origin)}) as server, open_client(server.url, None) as client:
        look(client)


def test_a_fleet(tmp_path: Path, origin: Path) -> None:
    with (
        fleet_of(tmp_path, "abc", str(origin)) as fleet,
        open_client(",".join(server.url for server in fleet.servers.values()), TOKEN) as client,
    ):
        look(client)


def test_what_is_known_costs_the_back_nothing(cache: EmbeddedCache) -> None:
    with cache.client() as client:
        client.read("b", "a/small")
        before = client.status()
        for _ in range(10):
            assert client.look_up("b", "a/small") is not None
        after = client.status()
    assert after.hits - before.hits == 10, "which the front counts"
    assert after.origin_requests == before.origin_requests


def test_what_goes_wrong_is_told(cache: EmbeddedCache, origin: Path) -> None:
    with cache.client() as client:
        (origin / "a/small").write_bytes(b"other")
        client.refresh("b")
        found = client.look_up("b", "a/small")
        assert found is not None
        assert found.size_bytes == 5
        origin.rename(origin.parent / "elsewhere")
        with pytest.raises(OriginError):
            client.look_up("b", "never/asked/for")
    with open_client(client.endpoint, "not-the-token") as stranger, pytest.raises(AccessDenied):
        stranger.look_up("b", "a/small")
    cache.stop()
    with pytest.raises(CacheUnavailable):
        client.look_up("b", "a/small")
