"""A fleet at each site in front of one origin: real servers, and an origin that counts what it sends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import open_client
from stoker.errors import OriginError, StokerError
from stoker.wire.cache_api import BucketStatus
from tests.e2e.cache_helpers import ServerProcess, served
from tests.e2e.run_helpers import wait_for
from tests.http_servers import QuietHandler, QuietServer, running

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
TOKEN = "a-token-of-all-sites"


class CountingOrigin(QuietServer):
    """A web server: objects by their paths, with versions as entity tags; it counts the bytes of content it sends."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(CountingHandler)
        self.objects = dict(objects)
        self.lock = threading.Lock()
        self.sent_bytes = 0
        self.is_cut = False
        """Whoever asks has no answer."""


class CountingHandler(QuietHandler):
    server: CountingOrigin

    def do_GET(self) -> None:
        if self.server.is_cut:
            self.close_connection = True
            return
        data = self.server.objects.get(self.path.lstrip("/"))
        if data is None:
            self.send_error(404)
            return
        part, status = data, 200
        if "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            part, status = data[int(first) : int(last or len(data)) + 1], 206
        self.send_response(status)
        if status == 206:
            start = int(first)
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hash(data)}"')
        self.send_header("Last-Modified", formatdate(1_700_000_000, usegmt=True))
        self.end_headers()
        if self.command == "GET":
            with self.server.lock:
                self.server.sent_bytes += len(part)
            self.wfile.write(part)


@contextmanager
def counting(objects: dict[str, bytes]) -> Iterator[CountingOrigin]:
    server = CountingOrigin(objects)
    with running(server):
        yield server


@contextmanager
def site(folder: Path, bucket: str, *options: str, servers: int = 2) -> Iterator[list[ServerProcess]]:
    """A fleet with one bucket, as the lines of a file have it."""
    (folder / "members").mkdir(parents=True)
    (folder / "config.toml").write_text(f"[buckets.data]\n{bucket}\n")
    (folder / "token").write_text(f"{TOKEN}\n")
    options = "--config", str(folder / "config.toml"), "--token", TOKEN, *options
    if servers > 1:
        options += "--fleet", f"file://{folder / 'members'}"
    with ExitStack() as stack:
        fleet = [
            stack.enter_context(served(folder / f"server-{n}", {}, "--name", f"server-{n}", *options))
            for n in range(servers)
        ]
        for server in fleet:
            # Until they know each other, each reads for itself.
            wait_for(lambda server=server: knows(server, servers), why=f"fleet of {servers}")
        yield fleet


def knows(server: ServerProcess, count: int) -> bool:
    with CacheClient(server.url, TOKEN, timeout_s=60.0) as client:
        status = client.fleet()
    return len(status.members) == count and not status.down


def through(servers: Sequence[ServerProcess], folder: Path) -> str:
    """The URL of another site's bucket."""
    hosts = ",".join(server.url.removeprefix("http://") for server in servers)
    return f"stoker+http://{hosts}/data?token_file={folder / 'token'}"


@contextmanager
def reading(servers: Sequence[ServerProcess]) -> Iterator[CacheClient]:
    with open_client(",".join(server.url for server in servers), TOKEN, timeout_s=60.0) as client:
        yield client


def figures(servers: Sequence[ServerProcess]) -> list[BucketStatus]:
    found = []
    for server in servers:
        with CacheClient(server.url, TOKEN, timeout_s=60.0) as client:
            found += client.status().buckets
    return found


def objects_of(count: int, size_bytes: int, large_bytes: int = 9_000_000) -> dict[str, bytes]:
    """Small ones, and one of several blocks."""
    objects = {f"small/{n}.bin": os.urandom(size_bytes) for n in range(count)}
    return {**objects, "large.bin": os.urandom(large_bytes)}


def test_each_byte_comes_from_the_origin_once_for_all_sites(tmp_path: Path) -> None:
    objects = objects_of(20, 50_000)
    with (
        counting(objects) as origin,
        site(tmp_path / "a", f'origin_url = "{origin.url}"') as first,
        site(tmp_path / "b", f'origin_url = "{through(first, tmp_path / "a")}"') as second,
        site(tmp_path / "c", f'origin_url = "{through(second, tmp_path / "b")}"', servers=1) as third,
    ):
        for servers in (third, second, first, third):
            with reading(servers) as client:
                for key, data in objects.items():
                    assert client.read("data", key) == data
        total_bytes = sum(map(len, objects.values()))
        assert origin.sent_bytes == total_bytes
        assert sum(row.origin_bytes for row in figures(second)) == total_bytes
        # What changes is another version everywhere, as soon as a site asks.
        origin.objects["small/0.bin"] = new = os.urandom(70_000)
        with reading(third) as client:
            client.refresh("data", "small/0.bin")
            assert client.read("data", "small/0.bin") == new
            missing = client.known("data", "small/none.bin")
            assert missing.is_absent
            one = client.known("data", "large.bin")
        with reading(first) as client:
            assert client.known("data", "large.bin").version == one.version, "versions are the origin's"
            assert client.known("data", "large.bin").attributes == one.attributes
        assert origin.sent_bytes == total_bytes + len(new)


def test_a_site_goes_on_by_another_server_where_one_is_killed(tmp_path: Path) -> None:
    objects = objects_of(30, 20_000)
    with (
        counting(objects) as origin,
        site(tmp_path / "a", f'origin_url = "{origin.url}"') as first,
        site(tmp_path / "b", f'origin_url = "{through(first, tmp_path / "a")}"', servers=1) as second,
        reading(second) as client,
    ):
        for number, (key, data) in enumerate(objects.items()):
            if number == 10:
                first[0].stop(signal.SIGKILL)
            assert client.read("data", key) == data
        first[1].stop(signal.SIGKILL)
        assert client.read("data", "small/0.bin") == objects["small/0.bin"], "it is held here"
        with pytest.raises(OriginError, match="no connection"):
            client.read("data", "small/never-asked-for.bin")


def test_the_nearer_fleet_is_killed_under_load_and_no_reader_has_an_error(tmp_path: Path) -> None:
    objects = objects_of(120, 30_000)
    wrong: list[str] = []
    half = threading.Event()
    with counting(objects) as origin, ExitStack() as stack:
        near = stack.enter_context(site(tmp_path / "near", f'origin_url = "{origin.url}"'))
        bucket = f'origin_url = "{origin.url}"\nnearer = "{through(near, tmp_path / "near")}"'
        servers = stack.enter_context(site(tmp_path / "b", bucket))
        keys = list(objects)

        def read(reader: int) -> None:
            with reading(servers) as client:
                for number, key in enumerate(keys[reader:] + keys[:reader]):
                    try:
                        if client.read("data", key) != objects[key]:
                            wrong.append(f"{key} is another")
                    except StokerError as error:
                        wrong.append(f"{key}: {error}")
                    if number == 30:
                        half.set()

        readers = [threading.Thread(target=read, args=(n * 20,)) for n in range(4)]
        for reader in readers:
            reader.start()
        assert half.wait(120)
        for server in near:
            server.stop(signal.SIGKILL)
        for reader in readers:
            reader.join(200)
            assert not reader.is_alive()
        assert wrong == []
        rows = figures(servers)
        assert sum(row.nearer_bytes for row in rows) > 0, "it was read through the nearer fleet first"
        assert sum(row.origin_bytes for row in rows) > 0, "and then from the origin"
        # It is back at its address: what is new comes through it again.
        again = [
            stack.enter_context(
                served(
                    tmp_path / f"near/server-{n}", {}, "--config", str(tmp_path / "near/config.toml"), "--token",
                    TOKEN, "--listen", server.url.removeprefix("http://"),
                )
            )
            for n, server in enumerate(near)
        ]  # fmt: skip
        assert [server.url for server in again] == [server.url for server in near]
        near_bytes = sum(row.nearer_bytes for row in rows)
        numbers = iter(range(10_000))

        def is_near_again() -> bool:
            key = f"new/{next(numbers)}.bin"
            origin.objects[key] = data = os.urandom(1000)
            with reading(servers) as client:
                assert client.read("data", key) == data
            return sum(row.nearer_bytes for row in figures(servers)) > near_bytes

        wait_for(is_near_again, 120)


def test_bytes_come_over_the_long_line_once_through_a_nearer_fleet(tmp_path: Path) -> None:
    objects = objects_of(10, 30_000)
    with (
        counting(objects) as origin,
        site(tmp_path / "near", f'origin_url = "{origin.url}"', servers=1) as near,
        site(
            tmp_path / "b",
            f'origin_url = "{origin.url}"\nnearer = "{through(near, tmp_path / "near")}"',
            servers=1,
        ) as servers,
    ):
        for group in (near, servers, servers):
            with reading(group) as client:
                for key, data in objects.items():
                    assert client.read("data", key) == data
        assert origin.sent_bytes == sum(map(len, objects.values()))
        (row,) = figures(servers)
        assert (row.origin_bytes, row.nearer_state) == (0, "closed")
        assert row.nearer.endswith("/data")
        # A nearer fleet that stands still is waited for until it is seen to.
        near[0].child.send_signal(signal.SIGSTOP)
        try:
            origin.objects["late.bin"] = data = os.urandom(1000)
            with reading(servers) as client:
                assert client.read("data", "late.bin") == data
        finally:
            near[0].child.send_signal(signal.SIGCONT)


def test_the_origin_is_asked_where_the_nearer_fleet_cannot_ask_its_own(tmp_path: Path) -> None:
    """Two ways to one data set, of which the nearer fleet's is cut: what it still knows is old."""
    objects = {"a.bin": os.urandom(10_000), "b.bin": os.urandom(20_000)}
    bucket = 'origin_url = "{}"\nidentity = "one data set"\nttl_s = 0'
    with ExitStack() as stack:
        origin, cut = stack.enter_context(counting(objects)), stack.enter_context(counting(objects))
        near = stack.enter_context(site(tmp_path / "near", bucket.format(cut.url), servers=1))
        nearer = f'\nnearer = "{through(near, tmp_path / "near")}"'
        servers = stack.enter_context(site(tmp_path / "b", bucket.format(origin.url) + nearer, servers=1))
        client = stack.enter_context(reading(servers))
        for key, data in objects.items():
            assert client.read("data", key) == data
        assert origin.sent_bytes == 0, "all came through the nearer fleet"
        cut.is_cut = True
        origin.objects["a.bin"] = new = os.urandom(10_000)
        assert client.read("data", "a.bin") == new
        assert client.read("data", "b.bin") == objects["b.bin"]
        assert origin.sent_bytes == len(new), "bytes of a version that is held nearby come from there"
        assert figures(servers)[0].nearer_state == "closed"


def test_a_nearer_fleet_with_another_data_set_of_that_name_is_not_read(tmp_path: Path) -> None:
    objects, others = {"a.bin": os.urandom(10_000)}, {"a.bin": os.urandom(10_000)}
    with (
        counting(objects) as origin,
        counting(others) as other,
        site(tmp_path / "near", f'origin_url = "{other.url}"', servers=1) as near,
        site(
            tmp_path / "b",
            f'origin_url = "{origin.url}"\nnearer = "{through(near, tmp_path / "near")}"',
            servers=1,
        ) as servers,
        reading(servers) as client,
    ):
        assert client.read("data", "a.bin") == objects["a.bin"]
        assert other.sent_bytes == 0


def test_sites_that_read_through_each_other_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with ExitStack() as stack:
        first = stack.enter_context(site(tmp_path / "a", f'origin_url = "{tmp_path}"', servers=1))
        second = stack.enter_context(
            site(tmp_path / "b", f'origin_url = "{through(first, tmp_path)}"', servers=1)
        )
        first[0].stop()
        (tmp_path / "a/config.toml").write_text(
            f'[buckets.data]\norigin_url = "{through(second, tmp_path)}"\n'
        )
        listen = first[0].url.removeprefix("http://")
        again = stack.enter_context(
            served(
                tmp_path / "a/server-0", {}, "--config", str(tmp_path / "a/config.toml"), "--token", TOKEN,
                "--listen", listen,
            )
        )  # fmt: skip
        for server in (again, *second):
            with CacheClient(server.url, TOKEN, timeout_s=120.0) as client:
                for asked in (
                    lambda client=client: client.read("data", "a"),
                    lambda client=client: client.list_objects("data"),
                ):
                    with pytest.raises(OriginError, match="through more than 4 fleets"):
                        asked()
