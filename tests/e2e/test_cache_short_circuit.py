"""Records that a client at the Unix socket reads from descriptors that the server passes."""

from __future__ import annotations

import mmap
import os
import pickle
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.client.descriptors import COUNT_MAX, Descriptor, Places
from stoker.cache.embedded import EmbeddedCache
from stoker.errors import AccessDenied, ObjectNotFound
from stoker.wire.cache_api import BucketSpec, PrefixSpec
from tests.e2e.cache_helpers import ServerProcess, fill, served, wait_until_held
from tests.e2e.children import in_child

pytestmark = pytest.mark.real
ONE_SEGMENT = 2 * 10**9
"""Of room: all that is read here lies in one segment then, but for what is large."""
TOKEN = "some-long-token"
LONG = [f"long/{number:03}" for number in range(40)]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, bytes]:
    found = fill(tmp_path / "origin", LONG, 100_000)
    found |= fill(tmp_path / "origin", ["short", "short-too"], 900)
    found |= fill(tmp_path / "origin", ["two-blocks"], 5_000_000)
    found |= fill(tmp_path / "origin", ["one-block"], 2_000_000)
    return found | fill(tmp_path / "origin", ["empty"], 0)


@pytest.fixture
def cache(tmp_path: Path, objects: dict[str, bytes]) -> Iterator[EmbeddedCache]:
    with EmbeddedCache(None, ONE_SEGMENT, {"b": str(tmp_path / "origin")}, TOKEN) as running:
        with running.client() as client:
            assert client.read_many("b", list(objects)) == list(objects.values())
            wait_until_held(client, len(LONG) + 5)
        yield running


def held(client: CacheClient) -> list[Descriptor]:
    """What a client has been passed, those first that came first."""
    assert client._descriptors is not None
    return list(client._descriptors._held.files.values())


def test_long_records_are_read_here_and_count_as_hits(
    cache: EmbeddedCache, objects: dict[str, bytes]
) -> None:
    with cache.client() as client:
        before = client.status()
        for _ in range(3):
            assert client.read_many("b", list(objects)) == list(objects.values())
            assert client.read_many("b", LONG) == [objects[key] for key in LONG]
        after = client.status()
        assert after.local_hits - before.local_hits == 3 * (2 * len(LONG) + 2)
        assert after.hits - before.hits == 3 * (len(LONG) + len(objects))
        assert after.misses == before.misses
        assert after.hit_bytes - before.hit_bytes > 6 * 100_000 * len(LONG)
        with pytest.raises(ObjectNotFound, match="not there"):
            client.read_many("b", [*LONG, "not there"])
        assert client.read_many("b", LONG) == [objects[key] for key in LONG]


@pytest.mark.parametrize("more", [[], ["not there"]], ids=["front", "back"])
def test_a_descriptor_comes_once(cache: EmbeddedCache, objects: dict[str, bytes], more: list[str]) -> None:
    keys = [*LONG, "two-blocks", "one-block"]
    with cache.client() as client:

        def right() -> bool:
            found = client.read_many("b", [*keys, *more], errors="return")
            return found[: len(keys)] == [objects[key] for key in keys]

        assert right()
        first = {id(file) for file in held(client)}
        assert len(first) == 3
        assert all(right() for _ in range(3))
        assert {id(file) for file in held(client)} == first
        assert client.status().local_hits == 4 * len(keys)


def test_only_who_wants_is_passed_descriptors(cache: EmbeddedCache, objects: dict[str, bytes]) -> None:
    assert cache.endpoint is not None
    for url, wants in [(cache.endpoint.url, True), (cache.endpoint.unix_url, False)]:
        with CacheClient(url, TOKEN, short_circuit=wants) as client:
            assert client.read_many("b", LONG) == [objects[key] for key in LONG]
            assert client.status().local_hits == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@needs_root
def test_another_user_reads_without_a_way_to_the_files_and_only_what_it_may(
    tmp_path: Path, objects: dict[str, bytes], open_folder: Path
) -> None:
    others = fill(tmp_path / "others", LONG, 100_000)
    path, folder = open_folder / "socket", open_folder / "cache"
    buckets = {"b": str(tmp_path / "origin"), "others": str(tmp_path / "others")}
    tokens = ("--token", "token-of-b:b", "--token", "token-of-others:others")
    with served(folder, buckets, *tokens, "--unix", str(path), "--socket-mode", "0666"):
        folder.chmod(0o700)

        def as_nobody() -> bool:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with CacheClient(f"unix://{path}", "token-of-others") as client:
                with pytest.raises(AccessDenied):
                    client.read_many("b", LONG)
                assert not held(client)
            with CacheClient(f"unix://{path}", "token-of-b") as client:
                while not held(client):  # what is read first is stored soon after
                    assert client.read_many("b", LONG) == [objects[key] for key in LONG]
                assert client.read_many("b", LONG) == [objects[key] for key in LONG]
                with pytest.raises(AccessDenied):
                    client.read_many("others", LONG)
                for file in held(client):
                    content = os.pread(file.fd, 10**9, 0)
                    assert not any(data in content for data in others.values())
                    assert any(objects[key] in content for key in LONG)
                    for flags in (os.O_RDONLY, os.O_RDWR):
                        with pytest.raises(PermissionError):
                            os.open(f"/proc/self/fd/{file.fd}", flags)
            with pytest.raises(PermissionError):
                os.listdir(folder)
            return True

        with CacheClient(f"unix://{path}", "token-of-others") as client:
            assert client.read_many("others", LONG) == list(others.values())
        assert in_child(as_nobody)


@needs_root
def test_without_a_mode_the_socket_is_for_the_servers_user(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with served(tmp_path / "cache", {"b": str(tmp_path)}, "--unix", str(path)):
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(AssertionError, match="--socket-mode is what chmod takes"):
        ServerProcess("--dir", str(tmp_path), "--capacity", "1GB", "--socket-mode", "rw-rw-rw-")


def test_what_the_server_gives_up_stays_right_and_is_let_go_of(
    tmp_path: Path, objects: dict[str, bytes]
) -> None:
    others = fill(tmp_path / "origin", [f"other/{number:03}" for number in range(400)], 100_000)
    keys = [*LONG, "one-block"]
    with (
        EmbeddedCache(None, 20_000_000, {"b": str(tmp_path / "origin")}, TOKEN) as cache,
        cache.client() as client,
    ):
        while not client.status().local_hits:
            assert client.read_many("b", keys) == [objects[key] for key in keys]
        files = held(client)
        maps = [mmap.mmap(file.fd, 0, prot=mmap.PROT_READ) for file in files]
        before = [bytes(one) for one in maps]
        assert any(objects[key] in content for key in keys for content in before)
        deadline = time.monotonic() + 150
        with cache.client() as reader:
            while not all(file.is_given_up for file in files):  # others take their room
                assert reader.read_many("b", list(others)) == list(others.values())
                assert time.monotonic() < deadline
        assert [bytes(one) for one in maps] == before
        for _ in range(len(files)):
            assert client.read_many("b", keys) == [objects[key] for key in keys]
        assert not set(map(id, held(client))) & set(map(id, files))


@pytest.mark.parametrize("harm", [os.unlink, lambda path: os.truncate(path, 10)], ids=["gone", "cut"])
def test_a_file_that_is_harmed_between_answer_and_reading_is_no_matter(
    cache: EmbeddedCache,
    objects: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[str], None],
) -> None:
    real = Places.read
    harmed: list[str] = []

    def late(
        self: Places, container: int, offset: int, size_bytes: int, *, views: bool = False
    ) -> bytes | memoryview | None:
        path = os.readlink(f"/proc/self/fd/{self._files[container].fd}")
        if path not in harmed and "(deleted)" not in path:
            harmed.append(path)
            harm(path)
        return real(self, container, offset, size_bytes, views=views)

    with cache.client() as client:
        misses = client.status().misses
        with monkeypatch.context() as patch:
            patch.setattr(Places, "read", late)
            assert client.read_many("b", LONG) == [objects[key] for key in LONG]
        assert harmed
        if harm is not os.unlink:
            assert client.status().misses > misses
        deadline = time.monotonic() + 60
        while True:  # what was fetched again is stored soon after
            before = client.status()
            assert client.read_many("b", LONG) == [objects[key] for key in LONG]
            if client.status().local_hits - before.local_hits == len(LONG):
                break
            assert time.monotonic() < deadline


def test_forked_and_pickled_clients_read_here_too(cache: EmbeddedCache, objects: dict[str, bytes]) -> None:
    with cache.client() as client:

        def right(reader: CacheClient = client) -> bool:
            return reader.read_many("b", LONG) == [objects[key] for key in LONG]

        assert right()
        assert all(in_child(right) for _ in range(3))
        assert right(pickle.loads(pickle.dumps(client)))
        assert right()
        assert client.status().local_hits == 6 * len(LONG)


def test_another_server_at_the_same_socket_has_other_files_under_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first, second = (fill(tmp_path / name, LONG, 100_000) for name in ("first", "second"))
    with CacheClient(f"unix://{path}") as client:

        def reads(objects: dict[str, bytes]) -> bool:
            assert client.read_many("b", LONG) == list(objects.values())
            wait_until_held(client, len(LONG))
            return all(client.read_many("b", LONG) == list(objects.values()) for _ in range(3))

        with served(
            tmp_path / "cache-1", {"b": str(tmp_path / "first")}, "--unix", str(path), capacity="2GB"
        ):
            assert reads(first)
            assert len(held(client)) == 1
        with served(
            tmp_path / "cache-2", {"b": str(tmp_path / "second")}, "--unix", str(path), capacity="2GB"
        ):
            assert in_child(lambda: reads(second) and client.status().local_hits > 0)
            assert reads(second)
            assert client.status().local_hits > 0


def test_a_thousand_containers_and_few_descriptors(tmp_path: Path) -> None:
    keys = [f"{number:03}/record" for number in range(250)]
    objects = {name: fill(tmp_path / name, keys, 25_000) for name in ("a", "b", "c", "d")}
    rules = tuple(PrefixSpec(f"{number:03}/", quota_bytes=10**6) for number in range(250))
    specs = {name: BucketSpec(str(tmp_path / name), prefixes=rules) for name in objects}

    def right(reader: CacheClient) -> bool:
        for bucket, data in objects.items():
            for first in range(0, 250, 50):
                part = keys[first : first + 50]
                assert reader.read_many(bucket, part) == [data[key] for key in part]
            assert reader.read_many(bucket, keys) == list(data.values())
        return True

    with EmbeddedCache(tmp_path / "cache", 10**9, specs, TOKEN) as cache, cache.client() as client:

        def with_few(more: int, reader: CacheClient | None = None) -> bool:
            """With a client of its own, which knows of the limit, or one that learns of it."""
            limit = len(os.listdir("/proc/self/fd")) + more
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            with reader or cache.client() as used:
                before = used.status().local_hits
                assert right(used)
                assert used.status().local_hits > before
            return True

        assert right(client)
        wait_until_held(client, 1000)
        misses = client.status().misses
        assert len(list(tmp_path.glob("cache/files/*/*"))) == 1000
        assert right(client)
        assert len(held(client)) == COUNT_MAX
        assert in_child(lambda: with_few(20, client))
        client.close()
        assert in_child(lambda: with_few(20, client))
        assert in_child(lambda: with_few(40))
        assert client.status().misses == misses


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@contextmanager
def losing_proxy(path: Path, server: str) -> Iterator[str]:
    """Passes bytes on, and no descriptors."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        links: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                far = socket.socket(socket.AF_UNIX)
                far.connect(server)
                links.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=pair, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"unix://{path}"
        listener.shutdown(socket.SHUT_RDWR)
        for link in links:
            link.close()


def test_where_descriptors_are_lost_on_the_way_bytes_come(
    tmp_path: Path, cache: EmbeddedCache, objects: dict[str, bytes]
) -> None:
    assert cache.endpoint is not None
    server = cache.endpoint.unix_url.removeprefix("unix://")
    with losing_proxy(tmp_path / "proxy", server) as url, CacheClient(url, TOKEN) as client:
        for _ in range(10):
            assert client.read_many("b", LONG) == [objects[key] for key in LONG]
        before = client.status().local_hits
        assert client.read_many("b", LONG) == [objects[key] for key in LONG]
        assert client.status().local_hits == before, "it is not tried any more"


def test_threads_share_what_came(cache: EmbeddedCache, objects: dict[str, bytes]) -> None:
    with cache.client() as client:
        wrong: list[str] = []

        def read(first: int) -> None:
            for turn in range(30):
                keys = LONG[(first + turn) % 20 :]
                if client.read_many("b", keys) != [objects[key] for key in keys]:
                    wrong.append(keys[0])
                if turn % 7 == first % 7:
                    assert client._descriptors is not None
                    client._descriptors.clear()

        threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_server_that_begins_with_what_it_held_verifies_before_it_names_places(
    tmp_path: Path, objects: dict[str, bytes]
) -> None:
    folder, buckets = tmp_path / "cache", {"b": str(tmp_path / "origin")}
    with EmbeddedCache(folder, 10**9, buckets, TOKEN) as cache, cache.client() as client:
        client.read_many("b", LONG)
        wait_until_held(client, len(LONG))
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
        assert status.local_hits == 2 * len(LONG) - 1
