"""Every origin passes the same suite; S3 against a real server, and against one that misbehaves."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from urllib.parse import quote

import pytest

from stoker.base.clock import SystemClock
from stoker.cache.origin.fleet_origin import FleetOrigin
from stoker.cache.origin.fsspec_origin import FsspecOrigin
from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.origin.nearer import NearerOrigin
from stoker.cache.origin.obstore_origin import PART_BYTES
from stoker.cache.origin.open import open_origin, open_writable_origin
from stoker.cache.origin.port import Origin, OriginCounters
from stoker.cache.origin.throttle import ThrottledOrigin
from stoker.errors import ObjectChanged, ObjectNotFound, OriginError, ShortBody
from stoker.testing.cache_origin import LARGE, OBJECTS, OriginConformance, listed, streamed
from tests.e2e.cache_helpers import served
from tests.http_servers import QuietHandler, QuietServer, running
from tests.s3_server import KEYS, s3_client, s3_server

_numbers = itertools.count()


def write_all(folder: Path, objects: Mapping[str, bytes]) -> None:
    for key, data in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def open_below(folder: Path) -> list[str]:
    """Files in a folder that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if path.startswith(f"{folder}/"):
            found.append(path)
    return found


class TestMemory(OriginConformance):
    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        self.origin = MemoryOrigin("m")
        for key, data in objects.items():
            self.origin.put(key, data)
        return self.origin

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        self.origin.put(key, data)


class TestLocal(OriginConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        write_all(self.path, objects)
        return LocalOrigin(str(self.path))

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        (self.path / key).write_bytes(data)

    def test_a_stream_leaves_no_file_open(self) -> None:
        async def test(origin: Origin) -> None:
            self.overwrite(origin, "a", LARGE)
            info = await origin.stat("a")
            for taken in range(6):
                stream = origin.stream("a", 0, len(LARGE), info.version)
                for _ in range(taken):
                    await anext(stream, b"")
                await stream.aclose()
                assert open_below(self.path) == []
            for version, stop in (("another", len(LARGE)), (info.version, len(LARGE) + 3_000_000)):
                with pytest.raises((ObjectChanged, ShortBody)):
                    await streamed(origin, "a", 0, stop, version)
                assert open_below(self.path) == []
            for turns in range(12):
                reader = asyncio.create_task(streamed(origin, "a", 0, len(LARGE), info.version))
                for _ in range(turns):
                    await asyncio.sleep(0.0003)
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

        self.run(test)
        assert open_below(self.path) == [], "also those that were cancelled while a thread was reading"


class TestThrottled(TestLocal):
    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        write_all(self.path, objects)
        origin = open_origin(f"file://{self.path}/?stoker_mbps=1000&stoker_latency_ms=1")
        assert isinstance(origin, ThrottledOrigin)
        return origin


class TestFsspec(TestLocal):
    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        write_all(self.path, objects)
        return FsspecOrigin(f"local://{self.path}")


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("weed")) as endpoint:
        yield endpoint


@pytest.mark.real
@pytest.mark.timeout(240)
class TestS3(OriginConformance):
    @pytest.fixture(autouse=True)
    def server(self, s3_endpoint: str) -> Iterator[None]:
        self.endpoint = s3_endpoint
        self.client = s3_client(s3_endpoint)
        yield
        self.client.close()

    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        self.prefix = f"pre/fix-{next(_numbers)}"
        for key, data in objects.items():
            self.client.put_object(Bucket="ready", Key=f"{self.prefix}/{key}", Body=data)
        return open_origin(self.url, KEYS)

    @property
    def url(self) -> str:
        return f"s3://ready/{self.prefix}?endpoint={self.endpoint}"

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        self.client.put_object(Bucket="ready", Key=f"{self.prefix}/{key}", Body=data)

    def test_opening_is_one_request(self) -> None:
        async def test(origin: Origin) -> None:
            for key in ("a", "dir/b"):
                before = origin.counters.requests
                async with aclosing((await origin.open(key, 1000)).parts) as parts:
                    assert [part async for part in parts]
                assert origin.counters.requests == before + 1

        self.run(test)

    def test_folders_are_what_they_are_to_who_writes(self) -> None:
        """Objects whose keys end with a slash, where somebody has made them; not those that only hold others."""

        async def test(origin: Origin) -> None:
            for key in ("empty/", "dir/sub/", "dir/made/deep/"):
                self.client.put_object(
                    Bucket="ready", Key=f"{self.prefix}/{key}", ContentType="text/x-folder"
                )
            writable = open_writable_origin(self.url, KEYS)
            for prefix, after in (
                ("", None),
                ("dir/", None),
                ("dir/s", None),
                ("dir/sub/", None),
                ("", "dir/sub/"),
            ):
                found = await listed(origin, prefix, after, 3)
                assert found == await listed(writable, prefix, after, 3)
                assert {info.key for info in found} == {
                    key
                    for key in (*OBJECTS, "empty/", "dir/sub/", "dir/made/deep/")
                    if key.startswith(prefix) and (after is None or key > after)
                }
            info = await origin.stat("empty/")
            assert info == await writable.stat("empty/")
            assert (info.size_bytes, dict(info.headers or ())["content-type"]) == (0, "text/x-folder")
            found_so, parts = await origin.open("empty/", 100)
            assert (found_so, [part async for part in parts]) == (info, [])
            for key in ("empty", "dir/made/", "dir/made", "none/"):
                with pytest.raises(ObjectNotFound):
                    await origin.stat(key)
            await writable.close()

        self.run(test)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Two servers in front of a folder, with a token; the folder, and their hosts."""
    folder = tmp_path_factory.mktemp("fleet")
    for name in ("origin", "members"):
        (folder / name).mkdir()
    (folder / "token").write_text("a-token-of-the-fleet\n")
    (folder / "config.toml").write_text(f'[buckets.data]\norigin_url = "{folder / "origin"}"\nttl_s = 0.0\n')
    options = "--token", "a-token-of-the-fleet", "--fleet", f"file://{folder / 'members'}"
    options += "--config", str(folder / "config.toml")
    with (
        served(folder / "1", {}, "--name", "one", *options) as one,
        served(folder / "2", {}, "--name", "two", *options) as two,
    ):
        yield folder, ",".join(server.url.removeprefix("http://") for server in (one, two))


@pytest.mark.real
@pytest.mark.timeout(240)
class TestFleet(OriginConformance):
    """Below a prefix."""

    @pytest.fixture(autouse=True)
    def servers(self, fleet: tuple[Path, str]) -> None:
        self.fleet = fleet

    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        folder, hosts = self.fleet
        name = f"below this {next(_numbers)}"
        self.path = folder / "origin" / name
        write_all(self.path, objects)
        origin = open_origin(f"stoker+http://{hosts}/data/{quote(name)}?token_file={folder / 'token'}")
        assert isinstance(origin, FleetOrigin)
        return origin

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        (self.path / key).write_bytes(data)


class CountsAll(NearerOrigin):
    """Both together, as the suite counts."""

    @property
    def counters(self) -> OriginCounters:
        both = OriginCounters()
        for one in (self.nearer.counters, super().counters):
            both.bytes_read += one.bytes_read
            both.requests += one.requests
        return both


@pytest.mark.real
@pytest.mark.timeout(240)
class TestNearer(TestFleet):
    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        return CountsAll(super().open_filled(objects), LocalOrigin(str(self.path)), SystemClock())


class TestNearerIsAway(TestLocal):
    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        origin = super().open_filled(objects)
        return CountsAll(open_origin("stoker+http://127.0.0.1:1,127.0.0.1:2/data"), origin, SystemClock())


class BadServer(QuietServer):
    """An S3 server with one object. `mischief` is given each request's number and what should be sent.

    It answers with an entity tag, what is sent, and what is announced beyond that but never sent.
    """

    def __init__(self) -> None:
        super().__init__(BadHandler)
        self.body = random.Random(5).randbytes(2_000_000)
        self.mischief: Callable[[int, bytes], tuple[str, bytes, bytes]] = lambda _, body: ("v1", body, b"")
        self.requests = 0


class BadHandler(QuietHandler):
    server: BadServer

    def do_GET(self) -> None:
        first, last = (int(n) for n in self.headers["Range"].removeprefix("bytes=").split("-"))
        self.server.requests += 1
        tag, sent, missing = self.server.mischief(self.server.requests, self.server.body[first : last + 1])
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.server.body)}")
        self.send_header("Content-Length", str(len(sent) + len(missing)))
        self.send_header("ETag", f'"{tag}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(sent[: last + 1 - first])
        if len(sent) > last + 1 - first:
            time.sleep(0.1)  # what is too much comes when what was asked for has been taken
            self.wfile.write(sent[last + 1 - first :])
        self.close_connection = bool(missing)


@pytest.fixture
def bad_server() -> Iterator[BadServer]:
    server = BadServer()
    with running(server):
        yield server


def from_server(server: BadServer, stop: int = 2_000_000) -> tuple[bytes, Exception | None]:
    """What a stream of the object up to `stop` yields, and how it fails."""
    got = []

    async def story() -> None:
        origin = open_origin(f"s3://bucket?endpoint={server.url}")
        try:
            async with aclosing(origin.stream("k", 0, stop, '"v1"')) as parts:
                async for part in parts:
                    got.append(part)  # noqa: PERF401 - also those before a failure
        finally:
            await origin.close()

    try:
        asyncio.run(asyncio.wait_for(story(), 120))
    except (ObjectChanged, OriginError) as error:
        return b"".join(got), error
    return b"".join(got), None


@pytest.mark.real
@pytest.mark.parametrize("stop", [1, PART_BYTES, 2_000_000])
@pytest.mark.parametrize("extra_bytes", [1, 100_000, 2_000_000])
def test_a_body_that_is_too_long_is_never_yielded_whole(
    bad_server: BadServer, stop: int, extra_bytes: int
) -> None:
    bad_server.mischief = lambda _, body: ("v1", body + bytes(extra_bytes), b"")
    got, error = from_server(bad_server, stop)
    assert isinstance(error, ShortBody)
    assert bad_server.body.startswith(got)
    assert len(got) < stop


@pytest.mark.real
@pytest.mark.parametrize("cut", [0, 1, 100_000, 900_000, 1_999_999])
def test_a_body_that_is_cut_yields_each_byte_once(bad_server: BadServer, cut: int) -> None:
    bad_server.mischief = lambda number, body: (
        ("v1", body[:cut], body[cut:]) if number == 1 else ("v1", body, b"")
    )
    got, error = from_server(bad_server)
    assert bad_server.body.startswith(got)
    assert (error is None) == (got == bad_server.body)
    bad_server.mischief = lambda _, body: ("v1", body[:100_000], body[100_000:])
    got, error = from_server(bad_server)
    assert bad_server.body.startswith(got)
    assert len(got) < len(bad_server.body)
    assert isinstance(error, OriginError)


@pytest.mark.real
def test_nothing_of_another_entity_tag_is_yielded(bad_server: BadServer) -> None:
    bad_server.mischief = lambda _, body: ("v2", body, b"")
    got, error = from_server(bad_server)
    assert (got, type(error)) == (b"", ObjectChanged)
    bad_server.requests = 0
    bad_server.mischief = lambda number, body: (
        ("v1", body[:900_000], body[900_000:]) if number == 1 else ("v2", bytes(len(body)), b"")
    )
    got, error = from_server(bad_server)
    assert bad_server.body.startswith(got)
    assert len(got) <= 900_000
    assert error is not None
