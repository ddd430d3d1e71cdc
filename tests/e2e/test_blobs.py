"""Blobs through a real server: what is pushed is there, under exactly its key, and never more than fits."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cache_helpers import RUN_CLI, ServerProcess, client_of, fill, served
from tests.e2e.run_helpers import wait_for

pytestmark = pytest.mark.real
MIB = 1024 * 1024


class Link:
    """One kept connection, by which anything can be asked."""

    def __init__(self, server: ServerProcess, token: str = "") -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), 30)
        self._token = f"Authorization: Bearer {token}\r\n".encode() if token else b""

    def ask(
        self, method: bytes, target: bytes, body: bytes = b"", *headers: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        length = b"Content-Length: %d\r\n" % len(body) if method == b"PUT" else b""
        head = b"%b %b HTTP/1.1\r\nHost: x\r\n%b%b%b\r\n" % (
            method, target, self._token, length, b"".join(header + b"\r\n" for header in headers),
        )  # fmt: skip
        self.socket.sendall(head + body)
        response = http.client.HTTPResponse(self.socket, method=method.decode())
        response.begin()
        return (
            response.status,
            {name.lower(): value for name, value in response.headers.items()},
            response.read(),
        )

    def put(self, target: bytes, body: bytes) -> int:
        return self.ask(b"PUT", target, body)[0]

    def get(self, target: bytes) -> bytes | None:
        status, headers, body = self.ask(b"GET", target)
        assert status in (200, 404)
        assert int(headers["content-length"]) == len(body)
        return body if status == 200 else None


@contextlib.contextmanager
def linked(server: ServerProcess, token: str = "") -> Iterator[Link]:
    link = Link(server, token)
    try:
        yield link
    finally:
        link.socket.close()


RAW = [
    b"a", b"a b", b" a", b"a%20b", b"a%2520b", b"a//b", b"a/b", b"/a", b"//a", b"a/", b"a?b=c",
    b"a?b=c&list-type=2", b"a#b", b"../a", b"a/../b", b".", b"..", b"file://tmp/a.bin", b"s3://host:9000/b/k",
    b"\xff\xfe", b"\xc3\xa9", b"e\xcc\x81", b"\xef\x9e\x80", b"\x80", b"\xed\xb2\x80", b"a+b", b"A", b"%", b"%zz",
    b"uploads?uploads", b"x" * 4096,
]  # fmt: skip


def test_every_key_is_another_blob_and_none_is_taken_for_something_else(tmp_path: Path) -> None:
    with served(tmp_path / "cache", {}, "--blob-bucket", "p=100MB") as server, linked(server) as link:
        for number, raw in enumerate(RAW):
            assert link.get(b"/blob/p/" + raw) is None
            assert link.put(b"/blob/p/" + raw, b"%d" % number) == 201
        for _ in range(2):
            for number, raw in enumerate(RAW):
                assert link.get(b"/blob/p/" + raw) == b"%d" % number
        assert link.ask(b"GET", b"/p/a")[0] == 404  # it is no bucket of objects
        assert link.ask(b"GET", b"/blob%2Fp/a")[0] == 404
        assert link.ask(b"POST", b"/blob/p/a")[0] == 405
        assert link.ask(b"GET", b"/blob/p/")[0] == 400
        assert link.ask(b"PUT", b"/blob/other/a", b"x")[0] == 404


def test_blobs_of_all_sizes_their_parts_and_their_ends(tmp_path: Path) -> None:
    sizes = [0, 1, 1000, MIB, MIB + 1, 4 * MIB, 4 * MIB + 1, 9 * MIB]
    blobs = {b"/blob/p/%d" % size: os.urandom(size) for size in sizes}
    with served(tmp_path / "cache", {}, "--blob-bucket", "p=100MB") as server, linked(server) as link:
        for target, data in blobs.items():
            assert link.ask(b"HEAD", target)[0] == 404
            assert link.put(target, b"older") == link.put(target, data) == link.put(target, data) == 201
            for _ in range(2):
                assert link.get(target) == data
            status, headers, body = link.ask(b"HEAD", target)
            assert (status, int(headers["content-length"]), body) == (200, len(data), b"")
            assert link.ask(b"GET", target, b"", b"If-None-Match: " + headers["etag"].encode())[0] == 304
            assert link.ask(b"GET", target, b"", b'If-Match: "other"')[0] == 412
        first, last = 4 * MIB - 5, 4 * MIB + 5
        status, headers, body = link.ask(
            b"GET", b"/blob/p/%d" % (9 * MIB), b"", b"Range: bytes=%d-%d" % (first, last)
        )
        assert (status, body) == (206, blobs[b"/blob/p/%d" % (9 * MIB)][first : last + 1])
        assert headers["content-range"] == f"bytes {first}-{last}/{9 * MIB}"
        assert link.ask(b"GET", b"/blob/p/1000", b"", b"Range: bytes=5000-")[0] == 416
        for target in blobs:
            assert link.ask(b"DELETE", target)[0] == 204
            assert link.get(target) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_blobs_are_there_after_a_restart(tmp_path: Path, number: signal.Signals) -> None:
    blobs = {b"/blob/p/%d" % size: os.urandom(size) for size in (0, 10, 5 * MIB)}
    with served(tmp_path / "cache", {}, "--blob-bucket", "p=100MB") as server, linked(server) as link:
        assert {link.put(target, data) for target, data in blobs.items()} == {201}
        assert link.put(b"/blob/p/gone", b"x") == 201
        assert link.ask(b"DELETE", b"/blob/p/gone")[0] == 204
        server.stop(number)
    with served(tmp_path / "cache", {}, "--blob-bucket", "p=100MB") as server, linked(server) as link:
        assert {target: link.get(target) for target in blobs} == blobs
        assert link.get(b"/blob/p/gone") is None
    # A bucket of objects that takes its name has nothing of it.
    fill(tmp_path / "origin", ["10"])
    with served(tmp_path / "cache", {"p": str(tmp_path / "origin")}) as server, client_of(server) as client:
        assert client.status().held_bytes == 0


@pytest.mark.parametrize("size", [MIB, 9 * MIB])
def test_a_body_that_ends_early_leaves_nothing(tmp_path: Path, size: int) -> None:
    with served(tmp_path / "cache", {}, "--blob-bucket", "p=100MB") as server, linked(server) as link:
        assert link.put(b"/blob/p/other", b"x") == 201
        with linked(server) as broken:
            head = b"PUT /blob/p/half HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
            broken.socket.sendall(head + bytes(size - 1))
            broken.socket.shutdown(socket.SHUT_WR)
            assert broken.socket.recv(1000) == b""
        assert link.get(b"/blob/p/half") is None
        assert link.ask(b"HEAD", b"/blob/p/half")[0] == 404
        with client_of(
            server
        ) as client:  # room that was taken for it is given back after its connection ends
            wait_for(lambda: client.status().held_bytes <= 4096, 60, "room")


def test_a_bucket_keeps_to_its_capacity_and_gives_up_its_own(tmp_path: Path) -> None:
    options = ("--blob-bucket", "p=20MB", "--blob-bucket", "q=20MB")
    with served(tmp_path / "cache", {}, *options, capacity="200MB") as server, linked(server) as link:
        assert link.put(b"/blob/q/kept", b"k" * MIB) == 201
        for number in range(12):
            assert link.put(b"/blob/p/%d" % number, bytes([number]) * (4 * MIB)) == 201
            with client_of(server) as client:
                assert {row.name: row.used_bytes <= 20_000_000 for row in client.status().buckets} == {
                    "p": True,
                    "q": True,
                }
        there = [number for number in range(12) if link.get(b"/blob/p/%d" % number) is not None]
        assert 11 in there
        assert len(there) < 5
        assert all(link.get(b"/blob/p/%d" % number) == bytes([number]) * (4 * MIB) for number in there)
        assert link.get(b"/blob/q/kept") == b"k" * MIB
        status, headers, _ = link.ask(b"PUT", b"/blob/p/large", b"x" * 21 * MIB)
        assert (status, headers["connection"]) == (413, "close")


def test_who_may_write_is_said_with_the_token(tmp_path: Path) -> None:
    tokens = (
        "--token",
        "all-of-them",
        "--token",
        "writes-in-p:p=rw",
        "--token",
        "reads-in-p:p",
        "--token",
        "in-none-of-p:q",
    )
    options = ("--blob-bucket", "p=20MB", "--blob-bucket", "q=20MB", *tokens)
    said = {}
    with served(tmp_path / "cache", {}, *options) as server:
        for token in ("all-of-them", "writes-in-p", "reads-in-p", "in-none-of-p", "nobodys-token", ""):
            asked = []
            for method in (b"PUT", b"GET", b"DELETE"):
                with linked(server, token) as link:
                    asked.append(link.ask(method, b"/blob/p/a", b"x" if method == b"PUT" else b"")[0])
            said[token] = asked
            with linked(server, "all-of-them") as link:
                assert link.put(b"/blob/p/a", b"y") == 201
    assert said == {
        "all-of-them": [201, 200, 204],
        "writes-in-p": [201, 200, 204],
        "reads-in-p": [403, 200, 403],
        "in-none-of-p": [403, 403, 403],
        "nobodys-token": [401, 401, 401],
        "": [401, 401, 401],
    }


def test_a_blob_that_is_not_there_is_read_through_a_bucket_of_objects(tmp_path: Path) -> None:
    objects = fill(tmp_path / "origin", ["dir/a.bin", "b?c.bin"])
    options = (
        "--blob-bucket",
        "p=20MB,s3://host:9000/data/=train",
        "--token",
        "all-of-them",
        "--token",
        "only-blobs:p",
    )
    with served(tmp_path / "cache", {"train": str(tmp_path / "origin")}, *options) as server:
        with linked(server, "all-of-them") as link, client_of(server, "all-of-them") as client:
            for _ in range(3):
                for key, data in objects.items():
                    assert link.get(b"/blob/p/s3://host:9000/data/" + key.encode()) == data
            requests = {row.name: row.origin_requests for row in client.status().buckets}
            assert link.get(b"/blob/p/s3://host:9000/data/none") is None
            assert link.get(b"/blob/p/s3://other/data/dir/a.bin") is None
            assert link.put(b"/blob/p/s3://host:9000/data/dir/a.bin", b"pushed") == 201
            assert link.get(b"/blob/p/s3://host:9000/data/dir/a.bin") == b"pushed"
            assert requests["train"] <= 2 * len(objects)
        with linked(server, "only-blobs") as link:
            assert link.get(b"/blob/p/s3://host:9000/data/b?c.bin") is None


def test_buckets_come_from_a_file_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "cache.toml"
    config.write_text('[blob_buckets.p]\ncapacity = "20MB"\n[blob_buckets.q]\ncapacity = 1000000\n')
    options = ("--config", str(config), "--blob-bucket", "q=30MB")
    with served(tmp_path / "cache", {}, *options) as server, client_of(server) as client:
        rows = {row.name: (row.kind, row.quota_bytes) for row in client.status().buckets}
        assert rows == {"p": ("blobs", 20_000_000), "q": ("blobs", 30_000_000)}
    for refused, why in [
        ("p", "is not NAME=SIZE"), ("p=", "is not NAME=SIZE"), ("p=many", "--blob-bucket p=many"),
        ("p=0", "a capacity"),
        ("blob=1GB", "reserved"), ("P=1GB", "not a bucket name"), ("p=1GB,train", "PREFIX=BUCKET"),
        ("p=1GB,s3://x/=none", "no such bucket"), ("b=1GB", "two buckets 'b'"),
    ]:  # fmt: skip
        with pytest.raises(AssertionError, match=why):
            ServerProcess(
                "--dir", str(tmp_path / "other"), "--capacity", "1GB", "--bucket", f"b={tmp_path}",
                "--blob-bucket", refused,
            )  # fmt: skip


def run_cli(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN_CLI, "cache", *arguments, "--endpoint", server.url],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_operators_see_blobs_and_give_them_up(tmp_path: Path) -> None:
    with served(tmp_path / "cache", {}, "--blob-bucket", "p=100MB") as server, linked(server) as link:
        for raw in (b"d/a", b"d/b", b"d/e/f", b"z", b"gone"):
            assert link.put(b"/blob/p/" + raw, raw * 1000) == 201
        assert link.ask(b"DELETE", b"/blob/p/gone")[0] == 204
        said = run_cli(server, "status").stdout
        assert "p  blobs  held 12 KB" in said
        assert "of its quota of 100" in said
        assert run_cli(server, "ls", "stoker://").stdout == "p/\n"
        assert run_cli(server, "ls", "stoker://p/d/").stdout == "d/a\nd/b\nd/e/\n"
        assert run_cli(server, "ls", "stoker://p", "--recursive").stdout == "d/a\nd/b\nd/e/f\nz\n"
        assert "3 blocks are given up" in run_cli(server, "evict", "stoker://p/d/").stdout
        assert [link.get(b"/blob/p/" + raw) for raw in (b"d/a", b"d/e/f", b"z")] == [None, None, b"z" * 1000]
        assert run_cli(server, "ls", "stoker://p", "--recursive").stdout == "z\n"
        top = run_cli(server, "top", "--once", "--interval", "0.1s", "--json")
        assert [(row["name"], row["kind"]) for row in json.loads(top.stdout)["buckets"]] == [("p", "blobs")]
