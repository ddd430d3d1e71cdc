"""What fsspec opens, as origins: a real web server, memory, and servers that tell little or fail."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import pytest

from stoker.cache.origin.fsspec_origin import FsspecOrigin
from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.open import open_origin
from stoker.cache.origin.port import Origin
from stoker.errors import ObjectChanged, ObjectNotFound, OriginError, ShortBody
from stoker.testing.cache_origin import OriginConformance, fails, listed, streamed
from tests.conformance.test_cache_origins import write_all
from tests.e2e.etcd import free_ports
from tests.http_servers import QuietHandler, QuietServer, running

_numbers = itertools.count()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(test(), 120)

    asyncio.run(whole())


class TestMemory(OriginConformance):
    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        self.files = fsspec.filesystem("memory")
        self.root = f"/conformance-{next(_numbers)}"
        for key, data in objects.items():
            self.files.pipe_file(f"{self.root}/{key}", data)
        return FsspecOrigin(f"memory:/{self.root}")

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        self.files.pipe_file(f"{self.root}/{key}", data)


# -- a web server ----------------------------------------------------------------------------------------------------

NGINX = """
daemon off; master_process off; error_log {folder}/error.log; pid {folder}/pid; user root;
events {{ worker_connections 256; }}
http {{
  access_log off; etag {etag}; autoindex on;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{ listen 127.0.0.1:{port}; root {folder}/o; }}
}}
"""


class Nginx:
    """A real web server of the folder `o`."""

    def __init__(self, folder: Path, etag: str = "on") -> None:
        program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if program is None:
            pytest.skip("no `nginx` program: on Debian, apt-get install nginx-light")
        self.program = program
        self.folder = folder
        (folder / "o").mkdir(exist_ok=True)
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=self.port, etag=etag))
        self.start()

    def start(self) -> None:
        command = [self.program, "-c", str(self.folder / "nginx.conf"), "-p", str(self.folder)]
        self.child = subprocess.Popen([*command, "-e", str(self.folder / "error.log")])
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "error.log").read_text()
                assert self.child.poll() is None, (self.folder / "error.log").read_text()
                time.sleep(0.02)

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs aiohttp")
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


@pytest.mark.real
class TestWeb(OriginConformance):
    @pytest.fixture(autouse=True)
    def server(self, nginx: Nginx) -> None:
        self.nginx = nginx

    def open_filled(self, objects: Mapping[str, bytes]) -> Origin:
        self.path = self.nginx.folder / "o" / f"data {next(_numbers)}"
        write_all(self.path, objects)
        return open_origin(f"{self.nginx.url}/{self.path.name.replace(' ', '%20')}")

    def overwrite(self, origin: Origin, key: str, data: bytes) -> None:
        (self.path / key).write_bytes(data)

    def test_odd_names_are_what_is_asked_for(self) -> None:
        keys = [
            "a?b",
            "a",
            "a#b",
            "a%3Fb",
            "a%2fb",
            "a&amp;b",
            "a'b\"",
            "a b",
            "a+b",
            "a%20b",
            "a\\b",
            "a:b",
            "\u00e9",
            "e\u0301",
        ]
        keys += ["\u202egnp.exe", "\U0001f980", "~", "x" * 255]
        objects = {key: os.urandom(20) for key in keys}

        async def test(origin: Origin) -> None:
            for key in keys:
                (self.path / "odd").mkdir(exist_ok=True)
                (self.path / "odd" / key).write_bytes(objects[key])
            for key in keys:
                info = await origin.stat(f"odd/{key}")
                assert await origin.read(f"odd/{key}", 0, 20, info.version) == objects[key]
            found = await listed(origin, "odd/", None, 3)
            assert [info.key for info in found] == sorted(f"odd/{key}" for key in keys)
            (self.path / "odd" / "a").unlink()
            for key in ("a", "a?", "a?x=y", "a#"):
                with pytest.raises(ObjectNotFound):
                    await origin.stat(f"odd/{key}")

        self.run(test)


# -- servers that tell little, or fail -------------------------------------------------------------------------------


class PlainServer(QuietServer):
    """Serves a folder with ranges. `marks`: headers that tell of the content; `has_ranges`, `status` and `on_body` go
    wrong on demand."""

    def __init__(self, folder: Path) -> None:
        super().__init__(PlainHandler)
        self.folder = folder
        self.marks: tuple[str, ...] = ("Last-Modified",)
        self.has_ranges = True
        self.status = 200
        self.cut_to: int | None = None
        self.on_body: Callable[[], None] = lambda: None
        self.asked: Counter[str] = Counter()


class PlainHandler(QuietHandler):
    server: PlainServer

    def do_GET(self) -> None:
        self.server.asked[self.command] += 1
        path = self.server.folder / unquote(self.path.partition("?")[0]).lstrip("/")
        if self.server.status != 200 or not path.is_file():
            self.send_error(self.server.status if self.server.status != 200 else 404)
            return
        body, written = path.read_bytes(), path.stat().st_mtime
        status, total = 200, len(body)
        asked = self.headers.get("Range")
        if asked and self.server.has_ranges:
            first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{total}")
        if "Last-Modified" in self.server.marks:
            self.send_header("Last-Modified", formatdate(written, usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.on_body()
        self.wfile.write(body[: self.server.cut_to])
        self.close_connection = self.server.cut_to is not None


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[PlainServer]:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs aiohttp")
    (tmp_path / "o").mkdir()
    server = PlainServer(tmp_path / "o")
    with running(server):
        yield server


def put(server: PlainServer, data: bytes, written: float) -> None:
    (server.folder / "k").write_bytes(data)
    os.utime(server.folder / "k", (written, written))


@pytest.mark.real
def test_without_a_tag_the_time_tells_contents_apart_and_without_a_time_the_length(
    plain: PlainServer,
) -> None:
    async def test() -> None:
        origin = open_origin(plain.url)
        for marks, after, is_noticed in (
            (("Last-Modified",), (b"new", 2000.0), True),
            (("Last-Modified",), (b"new", 1000.0), False),
            ((), (b"newer", 1000.0), True),
            ((), (b"new", 2000.0), False),
        ):
            plain.marks = marks
            put(plain, b"old", 1000.0)
            info = await origin.stat("k")
            assert await origin.read("k", 0, 3, info.version) == b"old"
            put(plain, *after)
            assert ((await origin.stat("k")).version != info.version) == is_noticed
            if is_noticed:
                with pytest.raises(ObjectChanged):
                    await origin.read("k", 0, 3, info.version)
        await origin.close()

    run(test)


@pytest.mark.real
def test_what_changes_while_it_is_read_is_not_yielded(plain: PlainServer) -> None:
    async def test() -> None:
        origin = open_origin(plain.url)
        put(plain, b"o" * 100_000, 1000.0)
        info = await origin.stat("k")
        plain.on_body = lambda: put(plain, b"n" * 100_000, 2000.0)
        with pytest.raises(ObjectChanged):
            await streamed(origin, "k", 0, 50_000, info.version)
        plain.on_body = (plain.folder / "k").unlink
        info = await origin.stat("k")
        with pytest.raises(ObjectNotFound):
            await streamed(origin, "k", 0, 50_000, info.version)
        await origin.close()

    run(test)


@pytest.mark.real
def test_failures_of_a_web_server_are_not_taken_for_objects_that_are_not_there(plain: PlainServer) -> None:
    async def test() -> None:
        origin = open_origin(plain.url)
        put(plain, b"data" * 1000, 1000.0)
        info = await origin.stat("k")
        for status in (500, 503, 403):
            plain.status = status
            await fails(origin, "k", info.version)
        plain.status = 404
        with pytest.raises(ObjectNotFound):
            await origin.stat("k")
        plain.status, plain.cut_to = 200, 100
        with pytest.raises(OriginError):
            await origin.read("k", 0, 4000, info.version)
        plain.cut_to, plain.has_ranges = None, False
        assert await origin.read("k", 0, 4000, info.version) == b"data" * 1000
        with pytest.raises(ShortBody):
            await origin.read("k", 4, 8, info.version)
        plain.has_ranges = True
        assert await origin.read("k", 4, 8, info.version) == b"data"
        await origin.close()

    run(test)


@pytest.mark.real
def test_a_query_stays_behind_every_key(plain: PlainServer) -> None:
    async def test() -> None:
        (plain.folder / "k").write_bytes(b"right")
        origin = FsspecOrigin(f"{plain.url}/?secret=1")
        info = await origin.stat("k")
        assert await origin.read("k", 0, 5, info.version) == b"right"
        assert "secret" not in origin.url
        with pytest.raises(ObjectNotFound):
            await origin.stat("other")
        await origin.close()

    run(test)


@pytest.mark.real
def test_a_web_server_that_is_gone_fails_and_is_found_again(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec's HTTP needs aiohttp")
    server = Nginx(tmp_path, etag="off")
    (tmp_path / "o" / "k").write_bytes(b"data")

    async def test() -> None:
        origin = open_origin(server.url)
        info = await origin.stat("k")
        server.stop()
        for asked in (origin.stat("k"), origin.read("k", 0, 4, info.version), listed(origin, "", None, 10)):
            with pytest.raises(OriginError):
                await asked
        server.start()
        assert await origin.stat("k") == info
        assert await origin.read("k", 0, 4, info.version) == b"data"
        await origin.close()

    try:
        run(test)
    finally:
        server.stop()


# -- what a list costs -----------------------------------------------------------------------------------------------


class CountedFiles:
    """Stands before a file system and counts what it is asked."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.asked[name] += 1
            return getattr(self._files, name)(*arguments, **options)

        return call


def test_a_page_lists_no_folder_before_its_turn(tmp_path: Path) -> None:
    keys = [f"{a}{b}/{c}{d}" for a in "ab" for b in range(10) for c in range(10) for d in "xy"]
    write_all(tmp_path, dict.fromkeys(keys, b"data"))

    async def test() -> None:
        origin = FsspecOrigin(f"local://{tmp_path}")
        origin._fs = files = CountedFiles(origin._fs)

        async def cost(prefix: str, after: str | None, limit: int) -> tuple[list[str], Counter[str]]:
            files.asked.clear()
            page = await anext(origin.list(prefix, after, limit), [])
            return [info.key for info in page], Counter(files.asked)

        assert await cost("", None, 1) == (["a0/0x"], {"ls": 2})
        assert await cost("b", "b3/4x", 1) == (["b3/4y"], {"ls": 2})
        assert await cost("b7/", None, 2) == (["b7/0x", "b7/0y"], {"ls": 1})
        assert await cost("", "b3/9y", 3) == (["b4/0x", "b4/0y", "b4/1x"], {"ls": 3})
        assert await cost("c", None, 1) == ([], {"ls": 1})
        assert await cost("c/", None, 1) == ([], {"ls": 1})
        assert [info.key for info in await listed(origin, "", None, 7)] == sorted(keys)
        await origin.close()

    run(test)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path) -> None:
    write_all(tmp_path, {"a/k": b"data", "b/k": b"data"})

    async def test() -> None:
        origin = FsspecOrigin(f"local://{tmp_path}")
        real = origin._fs.ls

        def ls(path: str, detail: bool = True) -> Any:
            if path.endswith("/b"):
                raise PermissionError(13, "Permission denied")
            return real(path, detail=detail)

        origin._fs.ls = ls
        with pytest.raises(OriginError, match="Permission denied"):
            await listed(origin, "", None, 10)
        assert [info.key for info in await listed(origin, "a", None, 10)] == ["a/k"]
        await origin.close()

    run(test)


@pytest.mark.parametrize("opened", [LocalOrigin, lambda folder: FsspecOrigin(f"local://{folder}")])
def test_a_name_that_is_too_long_is_no_failure_of_the_origin(tmp_path: Path, opened: Any) -> None:
    write_all(tmp_path, {"k": b"data"})

    async def test() -> None:
        origin = opened(str(tmp_path))
        for key in ("x" * 300, "x" * 4000, "k/" + "x" * 300, "x" * 300 + "/k", "/".join(["x" * 200] * 20)):
            with pytest.raises(ObjectNotFound):
                await origin.stat(key)
            with pytest.raises(ObjectNotFound):
                await streamed(origin, key, 0, 1, "1-1")
            assert await listed(origin, key, None, 10) == []
            assert await listed(origin, f"{key}/", None, 10) == []
        await origin.close()

    run(test)
