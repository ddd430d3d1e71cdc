"""A mount whose origin or fleet is away for a while: many names that are known cost no more than one, and what is
written is put when it is there again."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psutil
import pytest

from tests.chaos.storm_origin import content
from tests.e2e import mount_readers as readers
from tests.e2e.mount_fleet import steady_fleet
from tests.e2e.mount_origin import SlowOrigin, _Slow
from tests.e2e.mounting import MOUNT_MARKS, WAIT_S, mounted, stop, wait_until_all_held
from tests.e2e.run_helpers import wait_for
from tests.e2e.test_mount_writing import failing
from tests.http_servers import running

pytestmark = [*MOUNT_MARKS, pytest.mark.timeout(240)]
NAMES = [f"s/{n:04}" for n in range(100)]
SHORT = ("--kernel-ttl=1s", "--ttl=1s", "--timeout=30s")


class FailingOrigin(SlowOrigin):
    """It takes what is put, but says of the next `failures` PUTs that it failed: with `status`, or (0) not a word."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = _Failing
        self.failures, self.status, self.code = 0, 503, "SlowDown"
        self.put: dict[str, bytes] = {}
        self.tries = 0


class _Failing(_Slow):
    server: FailingOrigin

    def do_GET(self) -> None:
        key = unquote(self.path.partition("?")[0].removeprefix("/bucket").lstrip("/"))
        data = self.server.put.get(key)
        if data is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", _tag(data))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        key = unquote(self.path.removeprefix("/bucket/"))
        self.server.tries += 1
        if self.server.failures:
            self.server.failures -= 1
            if not self.server.status:
                self.close_connection = True
                return
            self._say(self.server.status, f"<Error><Code>{self.server.code}</Code></Error>".encode())
            return
        self.server.put[key] = data
        self.send_response(200)
        self.send_header("ETag", _tag(data))
        self.send_header("Content-Length", "0")
        self.end_headers()


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


@pytest.fixture
def origin() -> Iterator[FailingOrigin]:
    made = FailingOrigin()
    with running(made):
        yield made
        made.release()


def sizes(folder: str, names: list[str]) -> list[int]:
    return [os.stat(f"{folder}/{name}").st_size for name in names]


def there(names: list[str]) -> list[int]:
    return [len(content(name, 0)) for name in names]


def test_each_name_does_not_wait_for_an_origin_that_says_nothing(
    origin: FailingOrigin, tmp_path: Path
) -> None:
    with mounted(tmp_path / "m", origin.url, "--cache-ttl=1s", *SHORT) as mount:
        mount.sh("cat $0/s/* > /dev/null")
        wait_until_all_held(mount, dict(zip(NAMES, there(NAMES), strict=True)))
        origin.hold()
        mount.sh("sleep 3; echo 3 > /proc/sys/vm/drop_caches")
        for _ in range(2):
            assert mount.call(sizes, mount.folder, NAMES) == there(NAMES)
        sums = [readers.sha256(content(name, 0)) for name in NAMES]
        assert mount.call(readers.outcomes, mount.folder, NAMES) == sums
        listed = mount.sh("ls -l $0/s").splitlines()
        assert len(listed) == 301
        origin.versions["s/0007"] = 1
        origin.release()
        new = readers.sha256(content("s/0007", 1))
        wait_for(lambda: mount.call(readers.outcomes, mount.folder, ["s/0007"]) == [new], why="origin")


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_each_name_does_not_wait_for_a_fleet_that_is_away(
    origin: FailingOrigin, tmp_path: Path, how: str
) -> None:
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(steady_fleet(tmp_path, origin.url))
        options = (*fleet.at(), *SHORT)
        mount = stack.enter_context(mounted(tmp_path / "m", "stoker://b", *options, cache=False))
        assert mount.call(sizes, mount.folder, NAMES) == there(NAMES)
        servers = [psutil.Process(server.child.pid) for server in fleet.servers.values()]
        if how == "killed":
            fleet.kill("".join(fleet.servers))
        else:
            for server in servers:
                stop(server)
        mount.sh("sleep 3")
        for _ in range(2):
            assert mount.call(sizes, mount.folder, NAMES) == there(NAMES)
        if how == "killed":
            fleet.begin()
        else:
            for server in servers:
                server.resume()
        new = readers.sha256(content("s/0200", 0))
        wait_for(lambda: mount.call(readers.outcomes, mount.folder, ["s/0200"]) == [new], why="fleet")


def closed(path: str, byte: int) -> str:
    """How it goes to write a file, to have it put, and to close it."""

    def write() -> None:
        with open(path, "wb", buffering=0) as file:
            file.write(bytes([byte]) * 500_000)
            os.fsync(file.fileno())
            file.write(bytes([byte]) * 500_000)

    return failing(write)


def written(origin: FailingOrigin, mount: Any, **how: Any) -> str:
    origin.tries = 0
    for name, value in how.items():
        setattr(origin, name, value)
    said: str = mount.call(closed, mount.folder / "new", how["failures"], timeout_s=2 * WAIT_S)
    return said


def test_what_is_written_outlives_an_origin_that_fails_for_a_moment(
    origin: FailingOrigin, tmp_path: Path
) -> None:
    with mounted(tmp_path / "m", origin.url, "--writable", "--timeout=30s") as mount:
        origin.put["new"] = b"as it was"
        for status, code, failures in (
            (503, "SlowDown", 3),
            (500, "InternalError", 4),
            (0, "", 5),
            (503, "SlowDown", 10),
        ):
            said = written(origin, mount, status=status, code=code, failures=failures)
            assert said == "it does not", (status, code, mount.log)
            assert origin.put["new"] == bytes([failures]) * 1_000_000
            assert origin.tries == failures + 2
        origin.put["new"] = b"as it was"
        for status, code, reason in (
            (403, "AccessDenied", "EACCES"),
            (404, "NoSuchBucket", "EIO"),
            (403, "QuotaExceeded", "ENOSPC"),
            (400, "InvalidRequest", "EIO"),
        ):
            assert written(origin, mount, status=status, code=code, failures=100) == reason
            assert origin.tries <= 2, "once by fsync, once by close"
            assert origin.put["new"] == b"as it was"
