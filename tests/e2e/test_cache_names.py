"""Odd names through a real server, from a folder and from a real S3 server: exactly that object, or a clear refusal."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from botocore.exceptions import ClientError

from stoker.errors import ConfigError, ObjectNotFound
from tests.e2e.cache_helpers import ServerProcess, client_of, served
from tests.s3_server import BUCKET, KEYS, s3_client, s3_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
ODD_KEYS = [
    "x", "%78", "%2578", "x?y=z", "x#y", "x%00", "x%2e", "a+b", "a b", " a", "a ", "a;b=c&d", "a'b\"<>|*", "a:b@c",
    "~", "~root", "--help", "...", "..a", "a..", ".hidden", "a/b", "a/..b/c", "a%2Fb", "-/status",
    "a\\b", "..\\x", "caf\u00e9", "cafe\u0301", "\U0001f980/\U0001f469\u200d\U0001f680", "\u202egnp.exe", "\ufeffx",
    "\uff0e\uff0e/x", "\u2025/x", "\u0130i\u0131I", "\u00df", "\U0010ffff",
    "n" * 255, "/".join("d" * 100 for _ in range(9)),
]  # fmt: skip
CONTROL_KEYS = ["a\nb", "a\r\nX-Injected: y", "a\tb", "\x7f", "\x1b[31m"]
"""Legal in a folder, and refused as a line of HTTP: they come quoted."""
REFUSED = {
    404: [
        "/b/..", "/b/.", "/b/../x", "/b/../../secret", "/b/%2e%2e/secret", "/b/%2E%2E%2fsecret", "/b/..%2fsecret",
        "/b/a/../x", "/b/a/./b", "/b/a//b", "/b//x", "/b/%2fx", "/b/a/b/", "/b/a/b/.", "/b/a%2f%2fb", "/b/", "/b",
        "/b/..%5csecret", "/b/%5c..%5csecret", "/b/%e2%80%ae%2e%2e/secret", "/b/x/", "/b/x/y", "//b/x",
        "/../b/x", "/./b/x", "/b/%uff0e%uff0e/secret", "/B/x", "/none/x", "/b%2fx", "/b%00/x", "/-/../b/x",
        "/b/" + "n" * 256, "/b/" + "n/" * 1500 + "n", "/b/X",
    ],
    400: [
        "/b/a%00b", "/b/%00", "/b/%c0", "/b/x%00.png", "/b/%ff", "/b/%c0%ae%c0%ae/secret", "/b/%ed%a0%80",
        "/b/%f5%80%80%80", "/b/" + "n" * 4097, "/b/" + "%6e" * 4097, "x", "b/x", "*", "http://h/b/x", "h:80",
    ],
}  # fmt: skip


BARE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in "%?#")
"""What may stand in a target as it is."""


def put(folder: Path, objects: dict[str, bytes]) -> None:
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


def fill_s3(endpoint: str, objects: dict[str, bytes]) -> None:
    """Leaves out of `objects` what this S3 server does not take, or takes for another name."""
    client = s3_client(endpoint)
    for key, data in list(objects.items()):
        try:
            client.put_object(Bucket=BUCKET, Key=f"o/{key}", Body=data)
        except ClientError:
            del objects[key]
    client.put_object(Bucket=BUCKET, Key="o/a/b", Body=objects["a/b"])
    for key, data in list(objects.items()):
        # seaweedfs takes a backslash for a slash; what is read back tells.
        if client.get_object(Bucket=BUCKET, Key=f"o/{key}")["Body"].read() != data or "\\" in key:
            del objects[key]
    client.put_object(Bucket=BUCKET, Key="secret", Body=b"a secret")
    client.close()


@pytest.fixture(scope="module", params=["folder", "s3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def objects(kind: str) -> dict[str, bytes]:
    return {key: f"<{number}>".encode() * 20 for number, key in enumerate(dict.fromkeys(ODD_KEYS))}


@pytest.fixture(scope="module")
def server(
    kind: str, objects: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("names")
    if kind == "folder":
        put(folder / "o", objects)
        (folder / "secret").write_text("a secret")
        with served(folder / "d", {"b": str(folder / "o")}) as running:
            yield running
        return
    with s3_server(folder) as endpoint:
        fill_s3(endpoint, objects)
        url = f"s3://{BUCKET}/o?endpoint={endpoint}"
        with served(folder / "d", {"b": url}, environment=KEYS) as running:
            yield running


def ask(server: ServerProcess, target: bytes) -> tuple[int, bytes]:
    """Status and body for a request of exactly that target."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as link:
        link.sendall(b"GET %b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" % target)
        answer = b""
        while data := link.recv(65536):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body


@pytest.mark.parametrize("safe", ["/", BARE], ids=["quoted", "bare"])
def test_a_name_leads_to_the_object_of_that_name(
    server: ServerProcess, objects: dict[str, bytes], safe: str
) -> None:
    """However much of it is quoted, cold and warm."""
    for _ in range(2):
        for key, data in objects.items():
            assert ask(server, b"/b/" + quote(key, safe=safe).encode()) == (200, data), key
            if key.isascii():
                everything = "".join(f"%{byte:02x}" for byte in key.encode())
                assert ask(server, f"/b/{everything}".encode()) == (200, data), key


def test_a_client_reads_stats_and_lists_them(server: ServerProcess, objects: dict[str, bytes]) -> None:
    with client_of(server) as client:
        assert client.read_many("b", list(objects)) == list(objects.values())
        for key, data in objects.items():
            assert client.read("b", key) == data
            assert client.stat("b", key).size_bytes == len(data)
        assert [info.key for info in client.list_objects("b", "")] == sorted(objects, key=str.encode)
        for key in objects:
            assert key in [info.key for info in client.list_page("b", key, None, 10).objects]
        for key in ("", ".", "..", "../secret", "a/../x", "a//b", "/x", "a/b/", "caf\u00e8", "n" * 256):
            with pytest.raises(ObjectNotFound):
                client.read("b", key)
            with pytest.raises(ObjectNotFound):
                client.read_many("b", ["x", key])
        for key in ("a\0b", "n" * 4097, "\u00e9" * 2049):
            with pytest.raises(ConfigError):
                client.read_many("b", ["x", key])


@pytest.mark.parametrize("status", REFUSED)
def test_what_is_no_name_is_refused_and_nothing_else_is_served(
    server: ServerProcess, objects: dict[str, bytes], kind: str, status: int
) -> None:
    for target in REFUSED[status]:
        if kind == "s3" and is_refused_by_s3(target):
            continue
        found, body = ask(server, target.encode())
        assert (found, target) == (status, target), body
        assert json.loads(body)["code"] in ("not_found", "bad_request"), target
    with client_of(server) as client:
        client.refresh("b", "")
        assert client.read_many("b", list(objects)) == list(objects.values())


def is_refused_by_s3(target: str) -> bool:
    """S3 itself takes no name of more than 1024 bytes; seaweedfs takes those, and none with `..` before a backslash."""
    return "%5c" in target


def test_names_that_an_origin_does_not_take_are_no_failures_of_it(server: ServerProcess, kind: str) -> None:
    """Were they, whoever asks for some would have it left alone, for all."""
    for number in range(20):
        assert ask(server, b"/b/%d" % number + b"n" * 3000)[0] == 404
        if kind != "s3":
            assert ask(server, b"/b/..%%5c%d" % number)[0] == 404
    with client_of(server) as client:
        assert client.status().buckets[0].origin_state == "closed"


def test_control_characters_are_a_part_of_a_name_like_any(tmp_path: Path) -> None:
    objects = {key: os.urandom(50) for key in CONTROL_KEYS}
    put(tmp_path / "o", objects)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        for _ in range(2):
            for key, data in objects.items():
                assert ask(server, b"/b/" + quote(key).encode()) == (200, data)
        assert client.read_many("b", list(objects)) == list(objects.values())
        assert {info.key for info in client.list_objects("b", "")} == set(objects)
        for key in ("a\nb ", "a\r\nb"):
            status, body = ask(server, b"/b/" + quote(key).encode())
            assert (status, json.loads(body)["code"]) == (404, "not_found")


def test_names_of_the_disk_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    put(tmp_path / "o", {"x": b"data", "d/y": b"data"})
    for name in (b"\xff\xfe", b"caf\xe9"):
        (tmp_path / "o" / os.fsdecode(name)).write_bytes(b"no text")
    (tmp_path / "o" / os.fsdecode(b"d\xe9")).mkdir()
    (tmp_path / "o" / os.fsdecode(b"d\xe9") / "z").write_bytes(b"no text")
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        assert [info.key for info in client.list_objects("b", "")] == ["d/y", "x"]
        assert ask(server, b"/b/%ff%fe")[0] == 400
        assert client.read_many("b", ["x", "d/y"]) == [b"data", b"data"]
