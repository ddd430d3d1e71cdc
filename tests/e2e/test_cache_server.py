"""A real server process: reading, tokens, bad requests, many readers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache
from stoker.errors import (
    AccessDenied,
    CacheUnavailable,
    ConfigError,
    EnvironmentProblem,
    ObjectChanged,
    ObjectNotFound,
    WireError,
)
from tests.e2e.cache_helpers import RUN_CLI, ServerProcess, client_of, fill, served, wait_until_held
from tests.e2e.children import ended_well, start_child
from tests.e2e.run_helpers import alive, wait_for

pytestmark = pytest.mark.real
ALL = "all-buckets-token"
ONE = "only-one-token"
AUTH = f"Host: h\r\nAuthorization: Bearer {ALL}\r\n\r\n".encode()


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("origin")
    objects = fill(folder, [f"small/{n:03}" for n in range(300)], 900)
    objects |= fill(folder, ["mid", "odd/ü %41?#.bin"], 100_000)
    objects |= fill(folder, ["big"], 9_000_001)
    objects |= fill(folder, ["empty"], 0)
    return folder, objects


@pytest.fixture(scope="module")
def server(
    origin: tuple[Path, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    buckets = {"one": str(origin[0]), "two": str(origin[0])}
    with served(tmp_path_factory.mktemp("dir"), buckets, "--token", ALL, "--token", f"{ONE}:one") as running:
        yield running


def raw(server: ServerProcess, request: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 60) as sock:
        sock.sendall(request)
        answer = b""
        while data := sock.recv(65536):
            answer += data
        return answer


def test_objects_and_ranges_are_right_cold_and_warm(
    server: ServerProcess, origin: tuple[Path, dict[str, bytes]]
) -> None:
    with client_of(server, ALL) as client:
        for _ in range(2):
            for key, data in origin[1].items():
                if not key.startswith("small"):
                    assert client.read("one", key) == data
            big = origin[1]["big"]
            for start, stop in [(0, 1), (4194303, 4194305), (5, 9_000_001), (8_999_999, None), (1, 10**9)]:
                assert client.read("one", "big", start, stop) == big[start:stop]
            assert client.read("one", "mid", 10**6) == b""
            assert client.read("one", "empty", 5, 9) == b""
            assert client.stat("one", "big").size_bytes == len(big)
            assert client.stat("one", "empty").size_bytes == 0


def test_a_batch_keeps_its_order_and_mixes_sizes(
    server: ServerProcess, origin: tuple[Path, dict[str, bytes]]
) -> None:
    keys = [*origin[1], *reversed(origin[1]), "big", "big"]
    with client_of(server, ALL) as client:
        for _ in range(2):
            assert client.read_many("two", keys) == [origin[1][key] for key in keys]
        assert client.read_many("two", []) == []
        with pytest.raises(ObjectNotFound, match="missing-key"):
            client.read_many("two", ["mid", "missing-key", "big"])
        assert client.read_many("two", ["mid"]) == [origin[1]["mid"]]


def test_list_is_whole_and_sorted(server: ServerProcess, origin: tuple[Path, dict[str, bytes]]) -> None:
    with client_of(server, ALL) as client:
        assert [info.key for info in client.list_objects("one", "")] == sorted(origin[1])
        pages, after = [], None
        while True:
            page = client.list_page("one", "small/", after, 7)
            pages += [info.key for info in page.objects]
            if (after := page.after) is None:
                break
        assert pages == sorted(key for key in origin[1] if key.startswith("small/"))


def test_tokens_open_what_they_should_and_no_more(server: ServerProcess) -> None:
    with client_of(server, ONE) as client:
        assert client.read("one", "empty") == b""
        assert [bucket.name for bucket in client.status().buckets] == ["one"]
        for forbidden in (
            lambda: client.read("two", "mid"),
            lambda: client.read_many("two", ["mid"]),
            lambda: client.list_objects("two", ""),
            lambda: client.refresh("two", ""),
            lambda: client.add_bucket("mine", "/"),
        ):
            with pytest.raises(AccessDenied):
                forbidden()
    for token in (None, "wrong-token", ALL + "x", ALL[:-1]):
        with client_of(server, token) as client, pytest.raises(AccessDenied):
            client.read("one", "mid")


def test_what_is_noted_of_other_buckets_is_for_those_who_may_do_everything(tmp_path: Path) -> None:
    objects = fill(tmp_path / "one", ["k"])
    (tmp_path / "d").mkdir()
    added = {"theirs": {"origin_url": "nosuch://user:pass@word@host/x?key=SECRET"}}
    (tmp_path / "d" / "buckets.json").write_text(json.dumps(added))
    tokens = ["--token", ALL, "--token", f"{ONE}:one"]
    with served(tmp_path / "d", {"one": str(tmp_path / "one")}, *tokens) as server:
        with client_of(server, ALL) as client:
            (note,) = client.status().notes
            assert "'theirs'" in note
            assert not any(secret in note for secret in ("pass", "word", "SECRET"))
        with client_of(server, ONE) as client:
            assert client.read("one", "k") == objects["k"]
            assert client.status().notes == []


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET /one/mid HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /one/" + b"a" * 20_000 + b" HTTP/1.1\r\nConnection: close\r\n" + AUTH, 400),
        (b"POST /-/read HTTP/1.1\r\nContent-Length: 99999999999\r\n" + AUTH, 413),
        (b"POST /-/read HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999\r\n\r\n", 401),
        (b"POST /-/read HTTP/1.1\r\nConnection: close\r\nContent-Length: 3\r\n" + AUTH + b"abc", 400),
        (b"GET /one/mid HTTP/1.1\r\nHost: h\r\n\r\n", 401),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(server: ServerProcess, request_bytes: bytes, status: int) -> None:
    assert raw(server, request_bytes).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/one/../../../etc/passwd", 404), ("/one/%2e%2e/%2e%2e/etc/passwd", 404), ("/one//etc/passwd", 404),
        ("/one/..%2f..%2fetc%2fpasswd", 404), ("/one/a%00b", 400), ("/one/%ff", 400), ("/one/", 404),
        ("/none/x", 404), ("/-/nothing", 404), ("/one/mid", 200), ("/-/health", 200),
    ],
)  # fmt: skip
def test_odd_names_lead_nowhere(server: ServerProcess, target: str, status: int) -> None:
    head = f"GET {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nAuthorization: Bearer {ALL}\r\n\r\n"
    assert raw(server, head.encode()).startswith(b"HTTP/1.1 %d " % status)


def test_pipelined_requests_are_answered_in_order(
    server: ServerProcess, origin: tuple[Path, dict[str, bytes]]
) -> None:
    names = ["mid", "small/001", "big", "empty", "small/002"]
    requests = [
        f"GET /one/{name} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {ALL}\r\n\r\n" for name in names
    ]
    requests[-1] = requests[-1].replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
    answer = raw(server, "".join(requests).encode())
    position = 0
    for name in names:
        found = answer.index(b"\r\n\r\n", position) + 4
        assert answer[found : found + len(origin[1][name])] == origin[1][name]
        position = found + len(origin[1][name])
    assert position == len(answer)


def test_head_and_conditions(server: ServerProcess, origin: tuple[Path, dict[str, bytes]]) -> None:
    auth = f"Host: h\r\nAuthorization: Bearer {ALL}\r\nConnection: close\r\n"
    answer = raw(server, f"HEAD /one/mid HTTP/1.1\r\n{auth}\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"Content-Length: 100000\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")
    etag = answer.split(b"ETag: ")[1].split(b"\r\n")[0].decode()
    ask = f"GET /one/mid HTTP/1.1\r\n{auth}"
    assert raw(server, f"{ask}If-None-Match: {etag}\r\n\r\n".encode()).startswith(b"HTTP/1.1 304 ")
    assert raw(server, f"{ask}If-Match: {etag}\r\n\r\n".encode()).endswith(origin[1]["mid"])
    assert raw(server, f'{ask}If-Match: "other"\r\n\r\n'.encode()).startswith(b"HTTP/1.1 412 ")
    assert raw(server, f"{ask}Range: bytes=999999-\r\n\r\n".encode()).startswith(b"HTTP/1.1 416 ")


def test_two_hundred_cold_readers_cost_the_origin_one_read(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", ["big"], 4_500_000) | fill(tmp_path / "o", ["s1", "s2"], 900)
    url = f"file://{tmp_path}/o/?stoker_latency_ms=50"
    with served(tmp_path / "d", {"b": url}) as server:
        wrong: list[str] = []
        barrier = threading.Barrier(200)

        def read() -> None:
            with client_of(server) as client:
                barrier.wait()
                for key, data in objects.items():
                    if client.read("b", key) != data:
                        wrong.append(key)

        threads = [threading.Thread(target=read) for _ in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        with client_of(server) as client:
            status = client.status()
        assert status.origin_bytes == sum(map(len, objects.values()))
        assert status.hits + status.misses == 600


def test_a_bucket_can_be_added_once(tmp_path: Path, server: ServerProcess) -> None:
    objects = fill(tmp_path / "o", ["x"])
    with client_of(server, ALL) as client:
        client.add_bucket("added", str(tmp_path / "o"))
        client.add_bucket("added", str(tmp_path / "o"))
        assert client.read("added", "x") == objects["x"]
        for name, url in [
            ("added", "/tmp"),
            ("blob", "/tmp"),
            ("-", "/tmp"),
            ("UPPER", "/tmp"),
            ("n", "/not/there"),
        ]:
            with pytest.raises(ConfigError):
                client.add_bucket(name, url)


def test_refresh_shows_what_is_new(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["x"])
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        before = client.read("b", "x")
        version = client.stat("b", "x").version
        after = fill(tmp_path / "o", ["x"], 1234)["x"]
        assert client.read("b", "x") == before
        assert client.refresh("b", "") == 1
        with pytest.raises(ObjectChanged):
            client.read("b", "x", version=version)
        assert client.read("b", "x") == after
        wait_until_held(client, 1)
        assert client.status().held_blocks == 1


def test_an_object_that_changed_is_read_whole_at_its_new_version(tmp_path: Path) -> None:
    fill(tmp_path / "o", ["x", "y"], 5_000_000)
    with served(tmp_path / "d", {"b": str(tmp_path / "o")}) as server, client_of(server) as client:
        version = client.stat("b", "x").version
        client.list_objects("b", "")
        after = fill(tmp_path / "o", ["x", "y"], 5_000_001)
        assert client.read("b", "y") == after["y"]
        with pytest.raises(ObjectChanged):
            client.read("b", "x", 4_500_000, version=version)
        assert client.read_many("b", ["x"]) == [after["x"]]


def test_the_file_system_reads_and_survives_a_fork(
    server: ServerProcess, origin: tuple[Path, dict[str, bytes]]
) -> None:
    fs = fsspec.filesystem("stoker", endpoint=server.url, token=ALL, skip_instance_cache=True)
    assert sorted(fs.ls("one/", detail=False)) == ["one/big", "one/empty", "one/mid", "one/odd", "one/small"]
    assert len(fs.find("stoker://one/small")) == 300
    assert fs.info("one/small")["type"] == "directory"
    assert fs.cat_file("stoker://one/mid", 5, 9) == origin[1]["mid"][5:9]
    assert fs.cat_file("one/mid", -7) == origin[1]["mid"][-7:]
    with fs.open("stoker://one/big") as file:
        file.seek(4_000_000)
        assert file.read(1_000_000) == origin[1]["big"][4_000_000:5_000_000]
    with pytest.raises(FileNotFoundError):
        fs.cat_file("one/none")
    with pytest.raises(PermissionError):
        fs.open("one/mid", "wb")
    child = start_child(lambda: bool(fs.cat_file("one/mid") == origin[1]["mid"]))
    assert fs.cat_file("one/big") == origin[1]["big"]
    assert ended_well(child)


def test_no_server_is_one_clear_error() -> None:
    with (
        CacheClient("http://127.0.0.1:9", timeout_s=2) as client,
        pytest.raises(CacheUnavailable, match="stoker cache serve"),
    ):
        client.read("b", "k")
    for endpoint in ("127.0.0.1:80", "http://host", "ftp://h:1", "unix://"):
        with pytest.raises(ConfigError):
            CacheClient(endpoint)


def test_a_port_that_is_no_cache_server_is_said_to_be_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            sock, _ = other.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with CacheClient(f"http://127.0.0.1:{other.getsockname()[1]}") as client, pytest.raises(WireError):
            client.status()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--dir", "{d}", "--capacity", "lots"], 2, "not a size"),
        (["--dir", "{d}"], 2, "--capacity"),
        (["--capacity", "1GB"], 2, "--dir"),
        (["--dir", "{d}", "--capacity", "1GB", "--bucket", "b=/not/there"], 2, "/not/there"),
        (["--dir", "{d}", "--capacity", "1GB", "--bucket", "b=nothing://x"], 2, "nothing"),
        (["--dir", "{d}", "--capacity", "1GB", "--bucket", "blob=/tmp"], 2, "reserved"),
        (["--dir", "{d}", "--capacity", "1GB", "--bucket", "b=/tmp", "--policy", "b=best"], 2, "best"),
        (["--dir", "{d}", "--capacity", "1GB", "--listen", "0.0.0.0:0"], 2, "without a token"),
        (["--dir", "{d}", "--capacity", "1GB", "--listen", "nonsense"], 2, "HOST:PORT"),
        (["--dir", "{d}", "--capacity", "1GB", "--listen", "127.0.0.1:{port}"], 5, "in use"),
        (["--dir", "/proc/nothing", "--capacity", "1GB", "--listen", "127.0.0.1:0"], 5, "/proc/nothing"),
        (["--config", "/not/there.toml"], 2, "/not/there.toml"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_and_the_right_code(
    tmp_path: Path, server: ServerProcess, arguments: list[str], code: int, says: str
) -> None:
    port = server.url.rpartition(":")[2]
    filled = [argument.format(d=tmp_path, port=port) for argument in arguments]
    command = [sys.executable, "-c", RUN_CLI, "cache", "serve", *filled]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_config_file_says_the_same(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", ["x"])
    (tmp_path / "c.toml").write_text(
        f'dir = "{tmp_path}/d"\ncapacity = "10MB"\ntokens = ["{ALL}"]\n'
        f'[buckets.b]\norigin_url = "{tmp_path}/o"\npolicy = "uniform"\n'
    )
    server = ServerProcess("--config", str(tmp_path / "c.toml"))
    with client_of(server, ALL) as client:
        assert client.read("b", "x") == objects["x"]
    command = [sys.executable, "-c", RUN_CLI, "cache", "status", "--endpoint", server.url, "--token", ALL]
    shown = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=90, check=True)
    status = json.loads(shown.stdout)
    assert (status["capacity_bytes"], status["buckets"][0]["policy"]) == (10_000_000, "uniform")
    assert "uniform" in subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    assert server.stop()[0] == 0


def test_the_embedded_server_starts_fast_and_dies_with_its_parent(tmp_path: Path) -> None:
    objects = fill(tmp_path / "o", ["x"])
    with EmbeddedCache(buckets={"b": str(tmp_path / "o")}) as cache:
        with cache.client() as client:
            assert client.read("b", "x") == objects["x"]
        with pytest.raises(EnvironmentProblem):
            EmbeddedCache(listen=cache.endpoint.url.removeprefix("http://")).start()
    with pytest.raises(ConfigError, match="/not/there"):
        EmbeddedCache(buckets={"b": "/not/there"}).start()
    script = (
        "import os, sys\nfrom stoker.cache.embedded import EmbeddedCache\n"
        "print(EmbeddedCache().start().pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False
    )
    wait_for(lambda: not alive([int(done.stdout)]), 60)
