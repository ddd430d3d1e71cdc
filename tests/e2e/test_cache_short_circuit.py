"""Records that a client at the Unix socket reads from the server's files."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.client.local_files import OpenedFiles
from stoker.cache.embedded import EmbeddedCache
from stoker.errors import ObjectNotFound
from tests.e2e.cache_helpers import fill, wait_until_held

pytestmark = pytest.mark.real
TOKEN = "some-long-token"
LONG = [f"long/{number:03}" for number in range(40)]
NOBODY = 65534


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, bytes]:
    found = fill(tmp_path / "origin", LONG, 100_000)
    found |= fill(tmp_path / "origin", ["short", "short-too"], 900)
    found |= fill(tmp_path / "origin", ["two-blocks"], 5_000_000)
    return found | fill(tmp_path / "origin", ["empty"], 0)


@pytest.fixture
def cache(tmp_path: Path, objects: dict[str, bytes]) -> Iterator[EmbeddedCache]:
    with EmbeddedCache(None, 10**9, {"b": str(tmp_path / "origin")}, TOKEN) as running:
        with running.client() as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
            wait_until_held(client, len(LONG) + 4)
        yield running


def in_child(task: Callable[[], bool]) -> bool:
    """Whether `task` was true in a forked process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if task() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_long_records_come_by_path_and_count_as_hits(cache: EmbeddedCache, objects: dict[str, bytes]) -> None:
    with cache.client() as client:
        before = client.status()
        for _ in range(3):
            assert client.read_many("b", list(objects)) == list(objects.values())
            assert client.read_many("b", LONG) == [objects[key] for key in LONG]
        after = client.status()
        assert after.path_hits - before.path_hits == 2 * 3 * len(LONG)
        assert after.hits - before.hits == 3 * (len(LONG) + len(objects))
        assert after.misses == before.misses
        assert after.hit_bytes - before.hit_bytes > 6 * 100_000 * len(LONG)
        with pytest.raises(ObjectNotFound, match="not there"):
            client.read_many("b", [*LONG, "not there"])
        assert client.read_many("b", LONG) == [objects[key] for key in LONG]


def test_only_who_may_and_wants_gets_paths(cache: EmbeddedCache, objects: dict[str, bytes]) -> None:
    assert cache.endpoint is not None
    for url, wants in [(cache.endpoint.url, True), (cache.endpoint.unix_url, False)]:
        with CacheClient(url, TOKEN, short_circuit=wants) as client:
            assert client.read_many("b", LONG) == [objects[key] for key in LONG]
            assert client.status().path_hits == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_bytes(cache: EmbeddedCache, objects: dict[str, bytes]) -> None:
    assert cache.endpoint is not None
    socket = Path(cache.endpoint.unix_url.removeprefix("unix://"))
    socket.chmod(0o666)
    socket.parent.chmod(0o755)
    with cache.client() as client:
        before = client.status()

        def as_nobody() -> bool:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            return client.read_many("b", LONG) == [objects[key] for key in LONG]

        assert in_child(as_nobody)
        status = client.status()
        assert (status.path_hits, status.hits - before.hits) == (0, len(LONG))


@pytest.mark.parametrize("harm", [os.unlink, lambda path: os.truncate(path, 10)], ids=["gone", "cut"])
def test_a_file_that_leaves_between_answer_and_open_is_no_matter(
    cache: EmbeddedCache,
    objects: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[bytes], None],
) -> None:
    harmed: list[bytes] = []

    real = OpenedFiles.read

    def late(self: OpenedFiles, path: bytes, offset: int, size_bytes: int) -> bytes | None:
        if len(harmed) < 5 and path not in harmed:
            harmed.append(path)
            harm(path)
        return real(self, path, offset, size_bytes)

    with cache.client() as client:
        first = client.status()
        monkeypatch.setattr(OpenedFiles, "read", late)
        assert client.read_many("b", LONG) == [objects[key] for key in LONG]
        assert harmed
        assert client.status().misses > first.misses
        deadline = time.monotonic() + 20
        while True:  # what was fetched again is stored soon after
            before = client.status()
            assert client.read_many("b", LONG) == [objects[key] for key in LONG]
            if client.status().path_hits - before.path_hits == len(LONG):
                break
            assert time.monotonic() < deadline


def test_forked_and_pickled_clients_read_by_path_too(cache: EmbeddedCache, objects: dict[str, bytes]) -> None:
    with cache.client() as client:

        def right(reader: CacheClient = client) -> bool:
            return reader.read_many("b", LONG) == [objects[key] for key in LONG]

        assert right()
        assert all(in_child(right) for _ in range(3))
        assert right(pickle.loads(pickle.dumps(client)))
        assert right()
        assert client.status().path_hits == 6 * len(LONG)


def test_a_server_that_begins_with_what_it_held_verifies_before_it_gives_paths(
    tmp_path: Path, objects: dict[str, bytes]
) -> None:
    folder, buckets = tmp_path / "cache", {"b": str(tmp_path / "origin")}
    with EmbeddedCache(folder, 10**9, buckets, TOKEN) as cache, cache.client() as client:
        client.read_many("b", LONG)
    damaged = max(folder.glob("files/*/*"))
    with damaged.open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    with EmbeddedCache(folder, 10**9, buckets, TOKEN) as cache, cache.client() as client:
        for _ in range(2):
            assert client.read_many("b", LONG) == [objects[key] for key in LONG]
            wait_until_held(client, len(LONG))
        status = client.status()
        assert status.misses == 1
        assert status.path_hits == 2 * len(LONG) - 1
