"""The real pfio, as it is, with a Stoker server as its HTTP cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from pfio.cache import HTTPCache, http_cache
from pfio.v2 import HTTPCachedFS, Local

from tests.e2e.cache_helpers import client_of, served
from tests.e2e.test_blobs_fleet import TOKEN, fleet_of, wait_for

pytestmark = pytest.mark.real
MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pfio gives up after 3 s, which a busy machine may take; and it never closes what it has opened."""
    pool = http_cache._ConnectionPool(60)
    monkeypatch.setattr(http_cache, "CONNECTION_POOL", pool)
    yield
    for links in pool.conn.values():
        for link in links:
            link.close()


def test_what_pfio_puts_it_gets(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("token-of-pfio")
    options = ("--blob-bucket", "p=50MB", "--token", "token-of-pfio:p=rw")
    with served(tmp_path / "cache", {}, *options) as server:
        cache = HTTPCache(10, f"{server.url}/blob/p/some/user", bearer_token_path=str(token), do_pickle=False)
        for data in (b"first", b"first", b"", b"x" * 9 * MIB, b"last"):
            assert cache.put(1, data)
            assert cache.get(1) == data
        assert cache.get(2) is None
        assert not capfd.readouterr().err
        assert not cache.put(3, b"y" * 60 * MIB)
        assert cache.get(1) == b"last"


def test_files_of_pfio_are_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "dir").mkdir(parents=True)
    names = ["a.bin", "dir/b?c#d%20e.bin", "empty"]
    for name in names:
        (folder / name).write_bytes(b"" if name == "empty" else name.encode() * 1000)
    with served(tmp_path / "cache", {}, "--blob-bucket", "p=50MB") as server:
        for _ in range(2):
            files = HTTPCachedFS(f"{server.url}/blob/p", Local(str(folder)))
            for name in names:
                with files.open(name) as file:
                    assert file.read() == (b"" if name == "empty" else name.encode() * 1000)
            for name in names:  # from now on it is in the cache, or nowhere
                (folder / name).unlink(missing_ok=True)
        with client_of(server) as client:

            def counted() -> tuple[int, int]:
                row = client.status().buckets[0]
                return row.hits, row.misses

            wait_for(lambda: sum(counted()) >= 2 * len(names), lambda: f"{counted()} are counted")
            assert counted() == (len(names), len(names))


def test_a_fleet_serves_pfio_whichever_server_it_asks(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with fleet_of(tmp_path, "a", "b", "c") as fleet:
        caches = [
            HTTPCache(30, f"{server.url}/blob/p/me", bearer_token_path=str(token), do_pickle=True)
            for server in fleet.servers.values()
        ]
        for number in range(30):
            assert caches[number % 3].get(number) is None
            # Where it is not clear yet who may write, it is told to do without.
            put = partial(caches[number % 3].put, number, {"record": number})
            wait_for(put, lambda number=number: f"{number} is taken")
        for cache in caches:
            assert [cache.get(number) for number in range(30)] == [{"record": number} for number in range(30)]
        assert min(fleet.held().values()) > 0
