"""Links: real servers, and the programs that follow them."""

from __future__ import annotations

import base64
import hashlib
import http.client
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stoker.cache.auth.links import make_link
from stoker.cache.auth.principals import UNPROVEN
from stoker.cache.auth.tokens import Credential
from tests.e2e.cache_helpers import RUN_CLI, ServerProcess, fill, served
from tests.e2e.run_helpers import wait_for

pytestmark = pytest.mark.real

FILE = """
[principals.operator]
rules = ["*: all"]
tokens = ["operator-token"]

[principals.builder]
rules = ["data/wheels/: all", "data/shared/: read, list"]
token_files = ["builder.token"]
keys = ["BUILDER:secret-of-builder"]
"""
KEYS = ["wheels/a.bin", "wheels/sub/b.bin", "wheels/index.html", "shared/c", "private/d"]
BUILDER = Credential(UNPROVEN, "builder-token")


@contextmanager
def running(folder: Path, *options: str) -> Iterator[tuple[ServerProcess, dict[str, bytes]]]:
    objects = fill(folder / "origin", KEYS, 100_000)
    (folder / "builder.token").write_text("builder-token\n")
    (folder / "access.toml").write_text(FILE)
    options = "--access", str(folder / "access.toml"), "--writable", "data", *options
    with served(folder / "cache", {"data": str(folder / "origin")}, *options) as server:
        yield server, objects


def linked(path: str, expires_s: float = 3600.0, maker: Credential = BUILDER) -> str:
    return make_link(maker, "data", path, time.time(), expires_s)


def cli(server: ServerProcess, *arguments: str, token: str | None = "builder-token") -> tuple[int, str, str]:
    where = ["--endpoint", server.url, *([] if token is None else ["--token", token])]
    done = subprocess.run(
        [sys.executable, "-c", RUN_CLI, "cache", "link", *arguments, *where],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.strip(), done.stderr


def asked(
    server: ServerProcess, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)) as link:
        link.request(method, target, body or None, headers or {})
        answer = link.getresponse()
        return answer.status, {n.lower(): v for n, v in answer.getheaders()}, answer.read()


def test_anybody_reads_by_a_link_that_the_command_has_made(tmp_path: Path) -> None:
    with running(tmp_path) as (server, objects):
        code, url, errors = cli(server, "stoker://data/wheels/a.bin", "--expires", "1h")
        assert (code, errors) == (0, "")
        assert url.startswith(f"{server.url}/-/link/")
        assert "builder-token" not in url
        for _ in range(3):
            with urllib.request.urlopen(url, timeout=60) as answer:
                assert answer.read() == objects["wheels/a.bin"]
        said = subprocess.run(
            ["curl", "-sS", "-r", "10-19", "-D", "-", "-o", str(tmp_path / "part"), url],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert said.stdout.startswith("HTTP/1.1 206")
        assert (tmp_path / "part").read_bytes() == objects["wheels/a.bin"][10:20]
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
            assert answer.headers["Content-Length"] == "100000"
        code, url, _ = cli(
            server, "stoker://data/wheels/", "--expires", "1h", "--base", "http://cache.example/"
        )
        assert code == 0
        assert url.startswith("http://cache.example/-/link/")
        assert url.endswith("/data/wheels/")
        key = ("--key", "BUILDER:secret-of-builder")
        code, url, _ = cli(server, "stoker://data/shared/c", "--expires", "1h", *key, token=None)
        assert code == 0
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.read() == objects["shared/c"]


def test_the_command_makes_no_link_that_the_server_does_not_take(tmp_path: Path) -> None:
    with running(tmp_path, "--link-max-age", "1h") as (server, _):
        for arguments, token, why in (
            (("stoker://data/private/d", "--expires", "1m"), "builder-token", "may not read that"),
            (("stoker://data/", "--expires", "1m"), "builder-token", "may not read that"),
            (("stoker://data/wheels/a.bin", "--expires", "2h"), "builder-token", "good for 3600 s at most"),
            (("stoker://data/wheels/a.bin", "--expires", "1m"), "no-such-token", "not known here"),
        ):
            code, url, errors = cli(server, *arguments, token=token)
            assert (code, url) == (1, ""), (arguments, errors)
            assert why in errors
        for wrong, why in (
            (("stoker://data", "--expires", "1m"), "names no object"),
            (("stoker://data/a", "--expires", "0.5s"), "good for 1 s or longer"),
            (("stoker://data/wheels/../a", "--expires", "1m"), "cannot be linked to"),
        ):
            code, _, errors = cli(server, *wrong)
            assert code == 2, errors
            assert why in errors
        code, _, errors = cli(server, "stoker://data/a", "--expires", "1m", token=None)
        assert code == 2
        assert "--token or --key" in errors


def test_a_link_opens_nothing_else(tmp_path: Path) -> None:
    with running(tmp_path) as (server, objects):
        folder, one = linked("wheels/"), linked("wheels/a.bin")
        proof = folder.split("/")[3]
        assert asked(server, "GET", f"{folder}sub/b.bin")[2] == objects["wheels/sub/b.bin"]
        assert asked(server, "GET", f"{folder}sub%2Fb.bin")[2] == objects["wheels/sub/b.bin"]
        for target in (
            f"/-/link/{proof}/data/private/d",
            f"/-/link/{proof}/data/shared/c",
            f"/-/link/{proof}/data/wheels",
            f"/-/link/{proof}/data%2Fwheels/a.bin",
            f"/-/link/{proof}/other/wheels/a.bin",
            f"/-/link/{proof}/data/wheels/../private/d",
            f"/-/link/{proof}/data/wheels/%2e%2e/private/d",
            f"/-/link/{proof}/data/wheels%2F..%2Fprivate%2Fd",
            f"/-/link/{proof}/data/wheels/..%5Cprivate",
            f"/-/link/{proof}/data/wheels/./a.bin",
            f"/-/link/{proof}/-/status",
            f"/-/link/{proof}/../../-/status",
            f"/-/link/{proof}",
            f"/-/link/{proof}/",
            "/-/link/",
            "/-/link//data/wheels/a.bin",
            f"{one}x",
            f"{one}/x",
        ):
            status, _, body = asked(server, "GET", target)
            assert status == 403, (target, status, body)
            assert not any(data in body for data in objects.values())
        # What is encoded twice is another name, of nothing.
        assert asked(server, "GET", f"{folder}%252e%252e/private/d")[0] == 404
        # Nothing is listed: neither by the folder's name nor by a query.
        assert asked(server, "GET", f"{folder}sub/")[0] == 404
        for query in ("list-type=2", "prefix=", "uploads", "delete"):
            assert asked(server, "GET", f"{one}?{query}")[2] == objects["wheels/a.bin"]


def test_a_link_writes_nothing_whatever_is_sent_along(tmp_path: Path) -> None:
    with running(tmp_path) as (server, objects):
        one = linked("wheels/a.bin")
        for method in ("PUT", "POST", "DELETE", "PATCH", "OPTIONS"):
            assert asked(server, method, one, body=b"other")[0] == 401, "it is not even looked at"
            # Who has a credential as well has no more by a link.
            as_operator = {"Authorization": "Bearer operator-token"}
            assert asked(server, method, one, as_operator, b"other")[0] == 400
        status, _, body = asked(server, "GET", one, {"Content-Length": "5"}, b"other")
        assert status == 401, body
        for headers in (
            {"Authorization": "Bearer wrong"},
            {"Authorization": "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/s3/aws4_request"},
            {"x-amz-copy-source": "/data/private/d"},
            {"Stoker-Hops": "2", "Stoker-Origin": "another", "Cache-Control": "no-cache"},
        ):
            assert asked(server, "GET", one, headers)[2] == objects["wheels/a.bin"]
        assert (tmp_path / "origin/wheels/a.bin").read_bytes() == objects["wheels/a.bin"]
        # One connection: what a link opened is not open to what follows on it.
        with closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)) as link:
            for target, expected in ((one, 200), ("/data/wheels/a.bin", 401), ("/-/status", 401)):
                link.request("GET", target)
                answer = link.getresponse()
                answer.read()
                assert answer.status == expected, target
                if expected == 401:
                    link.close()


def test_a_link_ends_with_its_time_its_makers_rules_and_its_credential(tmp_path: Path) -> None:
    with running(tmp_path) as (server, objects):
        one, by_key = (
            linked("shared/c"),
            linked("shared/c", maker=Credential(UNPROVEN, "secret-of-builder", "BUILDER")),
        )
        short = linked("shared/c", 2.0)
        for target in (one, by_key):
            assert asked(server, "GET", target)[2] == objects["shared/c"]
        wait_for(lambda: asked(server, "GET", short)[0] == 403, 60)
        assert b"time is over" in asked(server, "GET", short)[2]
        rules = FILE.replace(', "data/shared/: read, list"', "")
        (tmp_path / "access.toml").write_text(rules)
        wait_for(lambda: asked(server, "GET", one)[0] == 403, 60)
        (tmp_path / "access.toml").write_text(FILE)
        wait_for(lambda: asked(server, "GET", one)[0] == 200, 60)
        (tmp_path / "builder.token").write_text("another-token\n")
        wait_for(lambda: asked(server, "GET", one)[0] == 403, 60)
        assert asked(server, "GET", by_key)[0] == 200, "the key is still there"


def test_every_server_of_a_fleet_takes_a_link(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path / 'members'}"
    (tmp_path / "members").mkdir()
    objects = fill(tmp_path / "origin", ["a", "b"])
    options = "--fleet", meeting, "--token", "one-token-for-all"
    buckets = {"data": str(tmp_path / "origin")}
    target = linked("", maker=Credential(UNPROVEN, "one-token-for-all"))
    with (
        served(tmp_path / "1", buckets, "--name", "one", *options) as one,
        served(tmp_path / "2", buckets, "--name", "two", *options) as two,
    ):
        for server in (one, two):
            for key, data in objects.items():
                assert asked(server, "GET", target + key)[2] == data


METADATA = b"Metadata-Version: 2.1\nName: tiny-stoker-example\nVersion: 1.0\n"


def write_wheel(folder: Path) -> str:
    """A wheel of nothing but its metadata."""
    name, parts = "tiny_stoker_example-1.0-py3-none-any.whl", {
        "tiny_stoker_example.py": b"ANSWER = 42\n",
        "tiny_stoker_example-1.0.dist-info/METADATA": METADATA,
        "tiny_stoker_example-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }  # fmt: skip
    record = "".join(
        f"{part},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for part, data in parts.items()
    )
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for part, data in parts.items():
            wheel.writestr(part, data)
        wheel.writestr("tiny_stoker_example-1.0.dist-info/RECORD", record)
    (folder / "index.html").write_text(
        f'<!DOCTYPE html><html><body><a href="{name}">{name}</a></body></html>'
    )
    return name


@pytest.mark.parametrize("page", ["", "index.html"])
def test_pip_finds_wheels_by_a_link_to_their_folder(tmp_path: Path, page: str) -> None:
    name = write_wheel(tmp_path / "origin/wheels")
    buckets = {"data": str(tmp_path / "origin")}
    with served(tmp_path / "cache", buckets, "--token", "builder-token") as server:
        code, url, errors = cli(server, "stoker://data/wheels/", "--expires", "1h")
        assert code == 0, errors
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--no-index", "--no-deps", "--no-cache-dir"),
                *("--disable-pip-version-check", "--find-links", url + page, "-d", str(tmp_path / "got")),
                "tiny-stoker-example",
            ],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "got" / name).read_bytes() == (tmp_path / "origin/wheels" / name).read_bytes()
        headers = asked(server, "GET", urlsplit(url).path)[1]
        assert headers["content-type"] == "text/html"
        assert headers["referrer-policy"] == "no-referrer"
