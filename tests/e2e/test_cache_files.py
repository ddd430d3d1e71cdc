"""Objects as files, through fsspec: what they give is what a local file gives, and what that costs."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from stoker.cache.client import filesystem
from stoker.cache.client.client import CacheClient, Part
from stoker.cache.client.files import AHEAD_BYTES_MIN, HEAD_BYTES
from stoker.cache.client.filesystem import StokerFileSystem
from stoker.errors import CacheUnavailable, ConfigError, ObjectChanged
from stoker.settings import ClientTlsFiles
from tests.e2e.cache_helpers import ServerProcess, client_of, fill, served

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
ALL, ONE = "all-buckets-token", "only-one-token"
BIG = 9_000_001


class CountingClient(CacheClient):
    """Keeps which parts were asked for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parts: list[tuple[int, int | None]] = []

    def read(self, bucket: str, key: str, start: int = 0, stop: int | None = None, **options: Any) -> bytes:
        self.parts.append((start, stop))
        return super().read(bucket, key, start, stop, **options)

    def part(self, bucket: str, key: str, start: int, stop: int, **options: Any) -> Part:
        self.parts.append((start, stop))
        return super().part(bucket, key, start, stop, **options)

    @property
    def cost_bytes(self) -> int:
        return sum((BIG if stop is None else stop) - start for start, stop in self.parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("origin")


@pytest.fixture(scope="module")
def objects(folder: Path) -> dict[str, bytes]:
    found = fill(folder, ["big"], BIG) | fill(folder, ["mid"], 200_000) | fill(folder, ["small"], 5000)
    found["empty"] = b""
    found["head"] = os.urandom(HEAD_BYTES)
    found["lines"] = b"".join(b"%07d%s\n" % (n, b"." * (n % 90)) for n in range(100_000))
    found["text.txt"] = "zeile eins\r\nzwölf\nende".encode()
    found["text.txt.gz"] = gzip.compress(found["text.txt"])
    for name, data in found.items():
        (folder / name).write_bytes(data)
    return found


@pytest.fixture(scope="module")
def server(
    folder: Path, objects: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    buckets = {"b": str(folder), "other": str(folder)}
    tokens = ("--token", ALL, "--token", f"{ONE}:other")
    with served(tmp_path_factory.mktemp("cache"), buckets, *tokens) as running:
        yield running


@pytest.fixture
def fs(server: ServerProcess) -> StokerFileSystem:
    found = StokerFileSystem(endpoint=server.url, token=ALL, skip_instance_cache=True)
    found._client = CountingClient(server.url, ALL)
    return found


def client_in(fs: StokerFileSystem) -> CountingClient:
    assert isinstance(fs._client, CountingClient)
    return fs._client


@pytest.mark.parametrize("block_size", [None, 0, 1000, 1_000_000])
@pytest.mark.parametrize("name", ["big", "mid", "small", "empty", "head", "lines"])
def test_a_file_gives_what_a_local_file_gives(
    fs: StokerFileSystem, objects: dict[str, bytes], name: str, block_size: int | None
) -> None:
    """Reads, lines and seeks as a seed says, beside the same on the bytes."""
    rng = random.Random(f"{name} {block_size}")
    data = objects[name]
    local = io.BytesIO(data)
    with fs.open(f"b/{name}", block_size=block_size) as file:
        assert (file.size, file.readable(), file.seekable(), file.writable()) == (
            len(data),
            True,
            True,
            False,
        )
        for _ in range(60):
            size = rng.choice([0, 1, 10, 5000, 70_000, 300_000, 5_000_000])
            place = rng.randrange(len(data) + 10)
            for step in rng.choices(["read", "readinto", "read1", "line", "to", "by", "end", "tell"], k=3):
                match step:
                    case "read":
                        assert file.read(size) == local.read(size)
                    case "readinto":
                        ours, theirs = bytearray(size), bytearray(size)
                        assert file.readinto(ours) == local.readinto(theirs)
                        assert ours == theirs
                    case "read1":
                        found = file.read1(size)
                        assert len(found) <= size
                        assert found == local.read(len(found))
                        assert found or not size or local.tell() >= len(data)
                    case "line":
                        assert file.readline(4000) == local.readline(4000)
                    case "to":
                        assert file.seek(place) == local.seek(place)
                    case "by":
                        by = rng.randrange(-local.tell(), 20_000)
                        assert file.seek(by, os.SEEK_CUR) == local.seek(by, os.SEEK_CUR)
                    case "end":
                        assert file.seek(-min(size, len(data)), os.SEEK_END) == local.seek(
                            -min(size, len(data)), os.SEEK_END
                        )
                    case "tell":
                        assert file.tell() == local.tell()
        file.seek(0)
        assert file.read() == data
        assert file.read() == b""
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_a_small_file_is_one_request(fs: StokerFileSystem, objects: dict[str, bytes]) -> None:
    for name in ("small", "head", "empty"):
        client_in(fs).parts.clear()
        with fs.open(f"b/{name}") as file:
            file.seek(0, os.SEEK_END)
            file.seek(0)
            assert file.read() == objects[name]
        assert client_in(fs).parts == [(0, HEAD_BYTES)]


def test_lines_are_read_by_few_requests(fs: StokerFileSystem, objects: dict[str, bytes]) -> None:
    with fs.open("b/lines") as file:
        assert list(file) == objects["lines"].splitlines(keepends=True)
    stops = [stop for _, stop in client_in(fs).parts if stop is not None]
    assert stops == sorted(stops)
    assert client_in(fs).cost_bytes == len(objects["lines"]), "each byte once"
    assert len(client_in(fs).parts) <= 8
    client_in(fs).parts.clear()
    with fs.open("b/lines", "r", encoding="ascii") as text:
        assert sum(1 for _ in text) == 100_000
    assert len(client_in(fs).parts) <= 8


def test_reading_here_and_there_costs_what_is_read(fs: StokerFileSystem, objects: dict[str, bytes]) -> None:
    with fs.open("b/big") as file:
        for start in (8_000_000, 3_000_000, 5_500_000, 1_000_000):
            file.seek(start)
            assert file.read(700_000) == objects["big"][start : start + 700_000]
        assert client_in(fs).cost_bytes == HEAD_BYTES + 4 * 700_000
        client_in(fs).parts.clear()
        file.seek(-8, os.SEEK_END)
        assert file.read(8) == objects["big"][-8:]
        assert client_in(fs).cost_bytes == 8
        client_in(fs).parts.clear()
        file.seek(2_000_000)
        assert file.read(100) == objects["big"][2_000_000:2_000_100]
        assert client_in(fs).cost_bytes == AHEAD_BYTES_MIN
    client_in(fs).parts.clear()
    with fs.open("b/big", block_size=0) as file:
        file.seek(2_000_000)
        assert file.read(100) == objects["big"][2_000_000:2_000_100]
        assert client_in(fs).parts == [(0, HEAD_BYTES), (2_000_000, 2_000_100)]


def test_large_reads_in_a_row_cost_no_more_than_they_read(
    fs: StokerFileSystem, objects: dict[str, bytes]
) -> None:
    """As columns that lie side by side are read."""
    with fs.open("b/big") as file:
        file.seek(1_000_000)
        for n in range(4):
            at = 1_000_000 + n * 1_000_000
            assert file.read(1_000_000) == objects["big"][at : at + 1_000_000]
    assert client_in(fs).cost_bytes == HEAD_BYTES + 4_000_000
    client_in(fs).parts.clear()
    with fs.open("b/big") as file:
        assert file.read() == objects["big"]
    assert client_in(fs).parts == [(0, HEAD_BYTES), (0, BIG)]


def test_text_and_compression(fs: StokerFileSystem, objects: dict[str, bytes]) -> None:
    assert fs.read_text("b/text.txt", encoding="utf-8") == "zeile eins\nzwölf\nende"
    assert fs.read_text("b/text.txt", encoding="utf-8", newline="") == objects["text.txt"].decode()
    with fs.open("b/text.txt.gz", "rt", encoding="utf-8", compression="infer") as file:
        assert file.read() == "zeile eins\nzwölf\nende"
    with fs.open("b/text.txt.gz", compression="gzip") as file:
        assert file.read() == objects["text.txt"]


@pytest.mark.parametrize("cache_type", ["none", "readahead", "bytes", "blockcache", "background", "all"])
def test_fsspecs_own_caches_are_there_for_who_asks(
    fs: StokerFileSystem, objects: dict[str, bytes], cache_type: str
) -> None:
    with fs.open("b/big", cache_type=cache_type, block_size=100_000) as file:
        file.seek(2_000_000)
        assert file.read(300_000) == objects["big"][2_000_000:2_300_000]
        file.seek(-100, os.SEEK_END)
        assert file.read() == objects["big"][-100:]


def test_a_file_is_one_version(fs: StokerFileSystem, server: ServerProcess, folder: Path) -> None:
    (folder / "changing").write_bytes(b"1" * 1_000_000)
    with fs.open("b/changing") as file, client_of(server, ALL) as client:
        assert file.read(10) == b"1" * 10
        (folder / "changing").write_bytes(b"2" * 1_000_000)
        client.refresh("b", "changing")
        client.evict("b", "changing")
        with pytest.raises(ObjectChanged):
            file.read()
    with fs.open("b/changing") as file:
        assert file.read() == b"2" * 1_000_000


def test_files_and_file_systems_are_pickled(
    server: ServerProcess, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("stoker", endpoint=server.url, token=ALL)
    with fs.open("b/big", block_size=1_000_000) as file:
        file.seek(4_000_000)
        assert file.read(10) == objects["big"][4_000_000:4_000_010]
        with pickle.loads(pickle.dumps(file)) as again:
            assert again.tell() == 4_000_010
            assert again.version == file.version
            assert again.read() == objects["big"][4_000_010:]
    again_fs = pickle.loads(pickle.dumps(fs))
    assert again_fs == fs
    assert again_fs.cat_file("b/small") == objects["small"]
    assert type(fs).from_json(fs.to_json()).cat_file("b/small") == objects["small"]
    monkeypatch.setenv("STOKER_CACHE_ENDPOINT", server.url)
    monkeypatch.setenv("STOKER_CACHE_TOKEN", ALL)
    with fsspec.open("stoker://b/small") as opened:
        assert opened.read() == objects["small"]
    assert b"token" not in pickle.dumps(fsspec.filesystem("stoker")), (
        "what came from the settings stays there"
    )


def test_a_file_system_of_other_settings_is_not_used_again(
    server: ServerProcess, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for endpoint, token in (("http://127.0.0.1:9", ALL), (server.url, ONE), (server.url, ALL)):
        monkeypatch.setenv("STOKER_CACHE_ENDPOINT", endpoint)
        monkeypatch.setenv("STOKER_CACHE_TOKEN", token)
        fs = fsspec.filesystem("stoker")
        assert fsspec.filesystem("stoker") is fs
    assert fs.cat_file("b/small") == objects["small"]


def test_after_a_fork_parent_and_child_read_on_in_the_same_file(
    fs: StokerFileSystem, objects: dict[str, bytes]
) -> None:
    with fs.open("b/big") as file:
        assert file.read(100_000) == objects["big"][:100_000]
        child = os.fork()
        if child == 0:
            right = False
            try:
                right = file.read() == objects["big"][100_000:]
            finally:
                os._exit(0 if right else 1)
        assert file.read() == objects["big"][100_000:]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_share_one_client(server: ServerProcess) -> None:
    """fsspec makes a file system for each thread, and keeps them for good."""
    found: list[StokerFileSystem] = []

    def make() -> None:
        found.append(fsspec.filesystem("stoker", endpoint=server.url, token=ALL))

    threads = [threading.Thread(target=make) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(fs._client) for fs in found}) == 1
    assert found[0]._client is filesystem._client(server.url, ALL, ClientTlsFiles())


def test_what_a_token_may_not_read_is_a_permission_error(server: ServerProcess) -> None:
    fs = fsspec.filesystem("stoker", endpoint=server.url, token=ONE)
    assert fs.ls("", detail=False) == ["other"]
    assert fs.isdir("other")
    for ask in (fs.cat_file, fs.open, fs.info, fs.exists, fs.isfile):
        with pytest.raises(PermissionError):
            ask("b/small")
    for ask in (fs.ls, fs.find):
        with pytest.raises(PermissionError):
            ask("b")
    with pytest.raises(PermissionError):
        fs.cat(["b/small", "other/small"])
    told = fs.cat(["b/small", "other/small"], on_error="return")
    assert isinstance(told["b/small"], PermissionError)
    assert isinstance(told["other/small"], bytes)


def test_a_cache_that_does_not_answer_is_no_missing_file() -> None:
    fs = fsspec.filesystem("stoker", endpoint="http://127.0.0.1:9", token=None)
    for ask in (fs.exists, fs.isfile, fs.isdir, fs.find, fs.glob, fs.open, fs.cat_file):
        with pytest.raises(CacheUnavailable):
            ask("b/*" if ask == fs.glob else "b/small")
    assert isinstance(fs.cat(["b/small"], on_error="return")["b/small"], CacheUnavailable)


def test_without_an_endpoint_it_is_said_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_CACHE_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="STOKER_CACHE_ENDPOINT"):
        fsspec.filesystem("stoker", skip_instance_cache=True)


def test_files_of_a_fleet_are_read_where_they_are_owned(
    server: ServerProcess, objects: dict[str, bytes]
) -> None:
    """Also when the server that is named first is gone."""
    fs = fsspec.filesystem("stoker", endpoint=f"http://127.0.0.1:9,{server.url}", token=ALL)
    with fs.open("b/big") as file:
        assert file.read(100) == objects["big"][:100]
        file.seek(4_000_000)
        assert file.read(1_000_000) == objects["big"][4_000_000:5_000_000]
    assert fs.cat(["b/small", "b/empty"]) == {"b/small": objects["small"], "b/empty": b""}
    assert fs.cat_ranges(["b/small", "b/big"], [1, 8_999_000], [5, None]) == [
        objects["small"][1:5],
        objects["big"][8_999_000:],
    ]


def test_threads_that_are_apart_move_about_in_one_file(
    server: ServerProcess, objects: dict[str, bytes]
) -> None:
    fs = fsspec.filesystem("stoker", endpoint=server.url, token=ALL, threads_apart=True)
    wrong: list[int] = []
    with fs.open("b/big") as file:

        def read(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(100):
                start = rng.randrange(BIG)
                file.seek(start)
                if file.read(1000) != objects["big"][start : start + 1000] or file.tell() != min(
                    start + 1000, BIG
                ):
                    wrong.append(start)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (file.size, file.seekable()) == (BIG, True)
    assert wrong == []
    with pytest.raises(ValueError, match="closed"):
        file.read(1)
