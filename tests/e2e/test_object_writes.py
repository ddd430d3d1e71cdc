"""Objects that are written by Stoker's own protocol: with a folder and a real S3 server behind."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import FleetClient
from stoker.cache.mount.source import CacheSource
from stoker.errors import (
    AccessDenied,
    BadKey,
    CacheUnavailable,
    NotAuthenticated,
    ObjectChanged,
    ObjectNotFound,
    OriginReadOnly,
    PreconditionFailed,
    StokerError,
    WriteDenied,
    WrongBodyLength,
)
from stoker.wire.cache_writes import SHA256
from tests.e2e.cache_helpers import ServerProcess, fill, served
from tests.e2e.run_helpers import wait_for
from tests.e2e.test_s3_writing import Here, members
from tests.s3_server import BUCKET, KEYS, s3_server

pytestmark = pytest.mark.real
MIB = 1024 * 1024
TOKEN = "fleet-token"


@pytest.fixture(scope="module", params=["folder", "s3"])
def here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """Two servers of a fleet."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "origin").mkdir()
    if request.param == "s3":
        with s3_server(folder) as endpoint:
            yield from fleet(folder, f"s3://{BUCKET}/w?endpoint={endpoint}")
    else:
        yield from fleet(folder, str(folder / "origin"))


def fleet(folder: Path, origin: str) -> Iterator[Here]:
    (folder / "members").mkdir()
    options = "--fleet", f"file://{folder / 'members'}", "--token", TOKEN, "--writable", "data"
    buckets = {"data": origin, "fixed": origin}
    with (
        served(folder / "one", buckets, *options, environment=KEYS) as one,
        served(folder / "two", buckets, *options, environment=KEYS) as two,
    ):
        for server in (one, two):
            with CacheClient(server.url, TOKEN) as client:
                wait_for(lambda client=client: members(client) == 2, 30, why="the fleet")
        yield Here([one.url, two.url], origin)


def put(client: CacheClient, key: str, data: bytes, bucket: str = "data") -> str:
    said = client.put(bucket, key, BytesIO(data), len(data))
    assert said.size_bytes == len(data)
    return said.version


def test_what_is_put_copied_and_removed_at_one_server_is_so_at_all(here: Here) -> None:
    with CacheClient(here.urls[0], TOKEN) as first, CacheClient(here.urls[1], TOKEN) as second:
        for key in ("a/plain", "odd é+&=%2F", "empty"):
            for data in (b"" if key == "empty" else b"one", os.urandom(5 * MIB + 1), b"three"):
                version = put(first, key, data)
                assert here.at_origin(key) == data, "the origin has it when it is acknowledged"
                for client in (first, second):
                    assert client.read("data", key, version=version) == data
                    assert client.known("data", key).size_bytes == len(data)
                    (listed,) = client.list_page("data", key, None, 10).objects
                    assert (listed.key, listed.size_bytes, listed.version) == (key, len(data), version)
            copied = second.copy("data", key, f"copies/{key}")
            assert here.at_origin(f"copies/{key}") == b"three"
            assert first.read("data", f"copies/{key}", version=copied.version) == b"three"
            first.remove("data", key)
            first.remove("data", key)
            assert here.at_origin(key) is None
            assert second.known("data", key).is_absent


def test_a_fleets_client_writes_by_whoever_answers(here: Here) -> None:
    with FleetClient(["http://127.0.0.1:1", *here.urls], TOKEN) as client:
        for number in range(8):
            version = put(client, f"by-some/{number}", b"%d" % number)
            assert client.read("data", f"by-some/{number}", version=version) == b"%d" % number
        source = CacheSource(client, "data", "by-some")
        found = source.put("8", BytesIO(b"12345678"), 8)
        assert source.find("8") == found._replace(modified_s=source.find("8").modified_s)  # type: ignore[union-attr]
        assert [name for name, _ in source.page("", None, 100).entries] == [str(n) for n in range(9)]


def raw(
    url: str, method: str, target: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[int, dict[str, Any]]:
    parts = urlsplit(url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    try:
        link.putrequest(method, target, skip_accept_encoding=True)
        for name, value in {"Authorization": f"Bearer {TOKEN}", **headers}.items():
            link.putheader(name, value)
        link.endheaders(body)
        answer = link.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if data else {}
    finally:
        link.close()


def test_nothing_is_written_that_is_not_what_its_sender_meant(here: Here) -> None:
    with CacheClient(here.urls[0], TOKEN) as client:
        put(client, "k", b"before")
        other = {SHA256: hashlib.sha256(b"other").hexdigest(), "Content-Length": "5"}
        status, said = raw(here.urls[0], "PUT", "/data/k", other, b"12345")
        assert (status, said["code"]) == (400, "wrong_checksum")
        status, said = raw(here.urls[0], "PUT", "/data/k", {SHA256: "x", "Content-Length": "5"}, b"12345")
        assert (status, said["code"]) == (400, "bad_request")
        status, said = raw(
            here.urls[0], "PUT", "/data/k", {"Transfer-Encoding": "chunked"}, b"3\r\nabc\r\n0\r\n\r\n"
        )
        assert (status, said["code"]) == (411, "length")
        status, said = raw(here.urls[0], "PUT", "/data/k?a=b", {"Content-Length": "1"}, b"x")
        assert (status, said["code"]) == (400, "bad_request")
        with pytest.raises(WrongBodyLength):
            client.put("data", "k", BytesIO(b"short"), 6)
        status, said = raw(here.urls[0], "POST", "/data/k", {"Content-Length": "0"})
        assert (status, said["code"]) == (405, "method")
        assert here.at_origin("k") == b"before"
        assert client.read("data", "k") == b"before"
        right = {SHA256: hashlib.sha256(b"12345").hexdigest(), "Content-Length": "5"}
        status, said = raw(here.urls[0], "PUT", "/data/k", right, b"12345")
        assert (status, said["size_bytes"]) == (200, 5)
        assert here.at_origin("k") == b"12345"
        assert raw(here.urls[0], "DELETE", "/data/k", {}) == (204, {})


def test_conditions_hold(here: Here) -> None:
    with CacheClient(here.urls[0], TOKEN) as client:
        put(client, "c", b"first")
        new = {"If-None-Match": "*", "Content-Length": "1"}
        assert raw(here.urls[1], "PUT", "/data/c", new, b"x")[1]["code"] == "precondition"
        over = {"If-Match": '"another"', "Content-Length": "1"}
        assert raw(here.urls[1], "PUT", "/data/c", over, b"x")[1]["code"] == "precondition"
        assert raw(here.urls[1], "DELETE", "/data/c", {"If-Match": '"another"'})[1]["code"] == "read_only"
        assert here.at_origin("c") == b"first"
        assert raw(here.urls[1], "PUT", "/data/new-c", new, b"x")[0] == 200
        assert here.at_origin("new-c") == b"x"
    assert issubclass(PreconditionFailed, ObjectChanged)


def test_what_cannot_be_written_is_refused_in_words(here: Here) -> None:
    def refused(error: type[StokerError], write: Callable[[CacheClient], object]) -> None:
        for url in here.urls:
            with CacheClient(url, TOKEN) as client, pytest.raises(error):
                write(client)

    refused(OriginReadOnly, lambda client: put(client, "k", b"x", "fixed"))
    refused(OriginReadOnly, lambda client: client.remove("fixed", "k"))
    refused(ObjectNotFound, lambda client: put(client, "k", b"x", "nowhere"))
    refused(ObjectNotFound, lambda client: client.copy("data", "is not there", "to"))
    refused(BadKey, lambda client: put(client, "a//b", b"x"))
    refused(CacheUnavailable, lambda _: CacheClient("http://127.0.0.1:1").remove("data", "k"))
    for token in ("wrong-token", None):
        with CacheClient(here.urls[0], token) as client, pytest.raises(NotAuthenticated):
            put(client, "k", b"x")
    wrong = {"Authorization": "Bearer wrong-token"}
    assert raw(here.urls[0], "DELETE", "/data/k", wrong)[1]["code"] == "no_token"


FILE = """
[principals.team]
tokens = ["token-of-team"]
rules = ["data/team/: read, list, write", "data/shared/: read", "data/drop/: write"]

[principals.cleaner]
tokens = ["token-of-cleaner"]
rules = ["data: delete"]

[principals.reader]
tokens = ["token-of-reader"]
rules = ["data: read, list"]

[principals.stranger]
tokens = ["token-of-stranger"]
rules = ["other: all"]
"""


def restricted(tmp_path: Path, text: str, *options: str) -> ServerProcess:
    fill(tmp_path / "o", ["team/a", "shared/a", "drop/a", "private/a"])
    (tmp_path / "access.toml").write_text(text)
    return served(  # type: ignore[return-value]
        tmp_path / "c", {"data": str(tmp_path / "o"), "other": str(tmp_path / "o")},
        "--access", str(tmp_path / "access.toml"), "--writable", "data", *options,
    )  # fmt: skip


def test_only_who_has_the_right_writes_copies_or_removes(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    with restricted(tmp_path, FILE, "--audit-log", str(log)) as server:  # type: ignore[attr-defined]

        def may(who: str, write: Callable[[CacheClient], object]) -> bool:
            with CacheClient(server.url, f"token-of-{who}") as client:
                try:
                    write(client)
                except AccessDenied:
                    return False
                return True

        assert may("team", lambda client: put(client, "team/new", b"x"))
        assert not may("team", lambda client: put(client, "shared/new", b"x"))
        assert not may("team", lambda client: put(client, "teamwork", b"x"))
        assert not may("team", lambda client: client.remove("data", "team/a"))
        assert may("team", lambda client: client.copy("data", "shared/a", "team/copy"))
        assert not may("team", lambda client: client.copy("data", "private/a", "team/copy"))
        assert not may("team", lambda client: client.copy("data", "drop/a", "team/copy")), "it cannot be read"
        assert not may("team", lambda client: client.copy("data", "team/a", "shared/copy"))
        for who in ("reader", "stranger"):
            assert not may(who, lambda client: put(client, "team/new", b"y"))
            assert not may(who, lambda client: client.remove("data", "team/new"))
        assert not may("stranger", lambda client: put(client, "x", b"x", "nowhere")), (
            "nor is told what there is"
        )
        assert may("cleaner", lambda client: client.remove("data", "private/a"))
        assert not may("cleaner", lambda client: put(client, "private/a", b"x"))
        with CacheClient(server.url) as client, pytest.raises(NotAuthenticated):
            put(client, "team/new", b"y")
        assert (tmp_path / "o/team/new").read_bytes() == b"x"
        assert not (tmp_path / "o/private/a").exists()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        said = [(one["principal"], one["method"], one["path"], one["status"]) for one in lines]
        assert ("team", "PUT", "/data/team/new", 200) in said
        assert ("team", "PUT", "/data/shared/new", 403) in said
        assert ("cleaner", "DELETE", "/data/private/a", 204) in said


def test_who_is_nobody_at_the_origin_writes_nothing_where_somebody_must(tmp_path: Path) -> None:
    with restricted(tmp_path, "writes_need_user = true\n" + FILE) as server:  # type: ignore[attr-defined]
        with CacheClient(server.url, "token-of-team") as client:
            for write in (
                lambda: put(client, "team/new", b"x"),
                lambda: client.copy("data", "team/a", "team/copy"),
            ):
                with pytest.raises(WriteDenied, match="nobody at the origin"):
                    write()
        with CacheClient(server.url, "token-of-cleaner") as client, pytest.raises(WriteDenied):
            client.remove("data", "team/a")
        assert not (tmp_path / "o/team/new").exists()
        assert (tmp_path / "o/team/a").exists()
