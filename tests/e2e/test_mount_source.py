"""What a mount is shown of a cache: against real servers, with a folder or another fleet behind them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest

from stoker.cache.client.client import CacheClient
from stoker.cache.client.fleet import FleetClient
from stoker.cache.embedded import EmbeddedCache
from stoker.cache.mount.source import MAPPED_FROM_BYTES, CacheSource
from stoker.cache.mount.source_check import check_writable
from stoker.cache.mount.source_port import Found
from stoker.errors import (
    AccessDenied,
    BadKey,
    ObjectChanged,
    OriginError,
    OriginReadOnly,
    StokerError,
    WrongBodyLength,
)
from stoker.wire.cache_api import BucketSpec
from tests.e2e.cache_helpers import fill, served
from tests.e2e.s3_helpers import CountingProxy
from tests.http_servers import running
from tests.s3_server import BUCKET, s3_client, s3_server

pytestmark = pytest.mark.real
BLOCK = 4 * 1024 * 1024
LARGE = 2 * BLOCK + 12_345
ROOM = 2 * 10**9


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, bytes]:
    found = fill(tmp_path / "o", ["data/a/1", "data/a/2", "data/b.txt", "data/b/deep/er/x", "other"], 3000)
    found |= fill(tmp_path / "o", ["data/large"], LARGE)
    return found | fill(tmp_path / "o", ["data/none"], 0)


@pytest.fixture
def cache(tmp_path: Path, objects: dict[str, bytes]) -> Iterator[EmbeddedCache]:
    with EmbeddedCache(None, ROOM, {"b": str(tmp_path / "o")}) as running:
        yield running


@pytest.fixture
def client(cache: EmbeddedCache) -> Iterator[CacheClient]:
    with cache.client() as made:
        yield made


@pytest.fixture
def source(client: CacheClient) -> CacheSource:
    return CacheSource(client, "b", "/data/")


def names(source: CacheSource, path: str = "", limit: int = 1000) -> list[tuple[str, bool]]:
    """All of a folder, page by page."""
    found: list[tuple[str, bool]] = []
    after = None
    while True:
        page = source.page(path, after, limit)
        assert len(page.entries) <= limit
        found += [(name, one.is_folder) for name, one in page.entries]
        after = page.after
        if after is None:
            return found
        assert page.entries


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def held(source: CacheSource, path: str) -> Found:
    """A file that the cache has all of."""
    found = source.find(path)
    assert found is not None
    source.fetch(path, found.version)
    until(lambda: source.held_bytes(path, found.version) == found.size_bytes)
    return found


def test_files_and_folders_are_found(source: CacheSource, objects: dict[str, bytes], tmp_path: Path) -> None:
    assert source.find("") == Found(True)
    assert source.find("a") == source.find("b") == source.find("b/deep") == Found(True)
    found = source.find("a/1")
    assert found is not None
    modified_s = int((tmp_path / "o/data/a/1").stat().st_mtime)
    assert (found.is_folder, found.size_bytes, found.modified_s) == (False, 3000, modified_s)
    assert bytes(source.read("a/1", found.version, 10, 20)) == objects["data/a/1"][10:20]
    empty = source.find("none")
    assert empty is not None
    assert (empty.is_folder, empty.size_bytes) == (False, 0)
    assert source.read("none", empty.version, 0, 100) == b""
    for path in (
        "nothing",
        "a/nothing",
        "a/1/x",
        "other",
        "a//1",
        "./a",
        "../other",
        "a/..",
        "x" * 256,
        "a\0",
    ):
        assert source.find(path) is None, path
    assert source.find("x/" * 2500 + "x") is None
    assert source.find("\udc80") is None
    assert source.page("\udc80", None, 10).entries == []


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
def test_a_folder_comes_page_by_page_without_what_is_below(source: CacheSource, limit: int) -> None:
    assert names(source, "", limit) == [
        ("a", True), ("b.txt", False), ("b", True), ("large", False), ("none", False),
    ]  # fmt: skip
    assert names(source, "a", limit) == [("1", False), ("2", False)]
    assert names(source, "nothing", limit) == []
    for name, found in source.page("", None, 1000).entries:
        assert source.find(name) == found


def test_any_part_of_a_version_is_read(
    source: CacheSource, objects: dict[str, bytes], tmp_path: Path
) -> None:
    data = objects["data/large"]
    found = source.find("large")
    assert found is not None
    for start, stop in [
        (0, 10),
        (5, LARGE),
        (BLOCK - 3, BLOCK + 3),
        (LARGE - 4, LARGE + 9),
        (LARGE, LARGE + 1),
    ]:
        for _ in range(2):
            assert bytes(source.read("large", found.version, start, stop)) == data[start:stop]
    assert source.read("large", found.version, 7, 7) == b""
    (tmp_path / "o/data/large").write_bytes(b"new")
    assert source.refresh("large") == 1
    with pytest.raises(ObjectChanged):
        source.read("large", found.version, 0, 10)
    changed = source.find("large")
    assert changed is not None
    assert changed.version != found.version
    assert bytes(source.read("large", changed.version, 0, 10)) == b"new"
    (tmp_path / "o/data/large").unlink()
    source.refresh("")
    with pytest.raises(ObjectChanged):
        source.read("large", changed.version, 0, 10)


def test_a_small_piece_is_read_and_not_mapped(source: CacheSource, objects: dict[str, bytes]) -> None:
    found = held(source, "large")
    small = source.read("large", found.version, 4096, 8192)
    assert isinstance(small, bytes), "a fault in a mapped file would read all that the disk reads ahead"
    assert small == objects["data/large"][4096:8192]
    assert isinstance(source.read("large", found.version, 0, MAPPED_FROM_BYTES), memoryview)


def test_what_is_refreshed_is_looked_for_again_and_nothing_else(source: CacheSource, tmp_path: Path) -> None:
    assert names(source, "a") == [("1", False), ("2", False)]
    assert source.find("a/3") is None
    fill(tmp_path / "o", ["data/a/3", "data/new"])
    assert len(names(source, "a")) == 2
    assert source.find("new") is not None, "nobody had asked"
    assert source.refresh("b") == 0
    assert len(names(source, "a")) == 2
    assert source.refresh("a") == 3
    assert source.find("a/3") is not None
    assert names(source, "a") == [("1", False), ("2", False), ("3", False)]


def test_a_whole_file_is_passed_once_all_of_it_is_here(
    source: CacheSource, objects: dict[str, bytes]
) -> None:
    found = source.find("large")
    assert found is not None
    assert source.whole_file("large", found.version) is None
    source.read("large", found.version, 0, 10)
    until(lambda: source.held_bytes("large", found.version) == BLOCK)
    assert source.whole_file("large", found.version) is None, "a part of it"
    held(source, "large")
    fd = source.whole_file("large", found.version)
    assert fd is not None
    try:
        assert os.fstat(fd).st_size == LARGE
        assert os.pread(fd, LARGE + 1, 0) == objects["data/large"]
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        os.close(fd)
    small = held(source, "a/1")
    assert source.whole_file("a/1", small.version) is None, "it lies with others"
    assert source.whole_file("large", "another") is None
    assert source.held_bytes("large", "another") == source.held_bytes("nothing", "") == 0
    capacity_bytes, held_bytes = source.room()
    assert capacity_bytes == ROOM
    assert held_bytes >= LARGE


def test_only_who_may_read_all_at_the_socket_is_passed_a_file(
    tmp_path: Path, objects: dict[str, bytes]
) -> None:
    path = tmp_path / "s"
    tokens = "--token", "all-of-it", "--token", "all-of-b:b", "--token", "another-one:other"
    with served(tmp_path / "c", {"b": str(tmp_path / "o")}, "--unix", str(path), *tokens) as server:
        passed = {}
        for url in (server.url, f"unix://{path}"):
            for token in ("all-of-it", "all-of-b"):
                with CacheClient(url, token) as client:
                    source = CacheSource(client, "b", "data")
                    found = held(source, "large")
                    fd = source.whole_file("large", found.version)
                    passed[url, token] = fd is not None
                    if fd is not None:
                        os.close(fd)
        assert passed == {key: key[0] != server.url for key in passed}
        with CacheClient(f"unix://{path}", "another-one") as client:
            with pytest.raises(AccessDenied):
                client.whole_file("b", "data/large", found.version)
            assert CacheSource(client, "b", "data").whole_file("large", found.version) is None
        with FleetClient([server.url], "all-of-it") as client:
            source = CacheSource(client, "b", "data")
            assert source.whole_file("large", found.version) is None
            assert source.held_bytes("large", found.version) == LARGE
            assert source.room()[0] == 10**9


def test_a_file_that_was_given_up_stays_with_who_has_it(
    cache: EmbeddedCache, client: CacheClient, source: CacheSource, objects: dict[str, bytes]
) -> None:
    found = held(source, "large")
    fd = source.whole_file("large", found.version)
    assert fd is not None
    try:
        assert client.evict("b").blocks == 3
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, LARGE, 0) == objects["data/large"]
        assert source.whole_file("large", found.version) is None
        held(source, "large")
        again = source.whole_file("large", found.version)
        assert again is not None
        assert os.fstat(again).st_ino != os.fstat(fd).st_ino
        os.close(again)
    finally:
        os.close(fd)


def test_a_file_is_verified_before_it_is_passed(tmp_path: Path, objects: dict[str, bytes]) -> None:
    folder, buckets = tmp_path / "c", {"b": str(tmp_path / "o")}
    with EmbeddedCache(folder, ROOM, buckets) as cache, cache.client() as client:
        held(CacheSource(client, "b", "data"), "large")
    (file,) = (
        path for path in (folder / "files").rglob("*") if path.is_file() and path.stat().st_size == LARGE
    )
    with EmbeddedCache(folder, ROOM, buckets) as cache, cache.client() as client:
        source = CacheSource(client, "b", "data")
        found = source.find("large")
        assert found is not None
        fd = source.whole_file("large", found.version)
        assert fd is not None, "it is read to be sure"
        os.close(fd)
    with open(file, "r+b") as damaged:
        damaged.seek(BLOCK + 5)
        damaged.write(b"damage")
    with EmbeddedCache(folder, ROOM, buckets) as cache, cache.client() as client:
        source = CacheSource(client, "b", "data")
        assert source.whole_file("large", found.version) is None
        assert bytes(source.read("large", found.version, 0, LARGE)) == objects["data/large"]


def test_what_is_known_is_shown_while_the_origin_is_away(tmp_path: Path, objects: dict[str, bytes]) -> None:
    with EmbeddedCache(None, ROOM, {"b": str(tmp_path / "o")}, is_writable=True) as far:
        assert far.endpoint is not None
        url = f"stoker+{far.endpoint.url}/b/data?timeout_s=2"
        with (
            EmbeddedCache(None, ROOM, {"near": BucketSpec(url, ttl_s=0.001)}) as near,
            near.client() as client,
        ):
            source = CacheSource(client, "near")
            found = held(source, "large")
            entries = source.page("", None, 100)
            far.stop()
            assert source.find("large") == found
            assert bytes(source.read("large", found.version, 0, LARGE)) == objects["data/large"]
            assert source.page("", None, 100) == entries
            with pytest.raises(OriginError):
                source.find("never seen")


@pytest.fixture(params=["folder", "fleet"])
def writable(
    request: pytest.FixtureRequest, tmp_path: Path, objects: dict[str, bytes]
) -> Iterator[CacheSource]:
    """What is written to, with a folder behind, or another fleet with that folder behind it."""
    with EmbeddedCache(None, ROOM, {"b": str(tmp_path / "o")}, is_writable=True) as cache:
        if request.param == "folder":
            with cache.client() as client:
                yield CacheSource(client, "b", "data")
            return
        assert cache.endpoint is not None
        buckets = {"near": f"stoker+{cache.endpoint.url}/b/data"}
        with EmbeddedCache(None, ROOM, buckets, is_writable=True) as near, near.client() as client:
            yield CacheSource(client, "near")


def test_what_is_written_is_at_the_origin_and_seen_at_once(writable: CacheSource, tmp_path: Path) -> None:
    folder, data = tmp_path / "o/data", os.urandom(LARGE)
    assert writable.find("new/file") is None
    assert names(writable, "new") == []
    file = BytesIO(b"before" + data + b"behind")
    file.seek(6)
    written = writable.put("new/file", file, LARGE)
    assert (folder / "new/file").read_bytes() == data
    assert file.read() == b"behind"
    found = writable.find("new/file")
    assert found is not None
    assert (found.size_bytes, found.version) == (LARGE, written.version)
    assert names(writable, "new") == [("file", False)]
    assert bytes(writable.read("new/file", written.version, 0, LARGE)) == data
    over = writable.put("new/file", BytesIO(), 0)
    assert over.size_bytes == 0
    assert (folder / "new/file").read_bytes() == b""
    with pytest.raises(ObjectChanged):
        writable.read("new/file", written.version, 0, 10)
    copied = writable.copy("a/1", "new/copy")
    assert (folder / "new/copy").read_bytes() == (folder / "a/1").read_bytes()
    assert writable.find("new/copy") == copied._replace(modified_s=writable.find("new/copy").modified_s)  # type: ignore[union-attr]
    writable.remove("new/copy")
    writable.remove("new/copy")
    assert not (folder / "new/copy").exists()
    assert writable.find("new/copy") is None
    assert names(writable, "new") == [("file", False)]


def test_a_folder_can_be_made_and_removed(writable: CacheSource) -> None:
    assert writable.find("empty") is None
    writable.make_folder("empty")
    assert writable.find("empty") == Found(True)
    assert ("empty", True) in names(writable)
    assert names(writable, "empty") == []
    writable.put("empty/x", BytesIO(b"1"), 1)
    assert names(writable, "empty") == [("x", False)]
    writable.remove("empty/x")
    assert writable.find("empty") == Found(True)
    writable.remove("empty/")
    assert writable.find("empty") is None
    assert ("empty", True) not in names(writable)


def test_what_cannot_be_written_leaves_what_was_there(writable: CacheSource, source: CacheSource) -> None:
    before = writable.find("a/1")
    with pytest.raises(WrongBodyLength):
        writable.put("a/1", BytesIO(b"short"), 100)
    with pytest.raises(StokerError):
        writable.put("a/1/below", BytesIO(b"x"), 1)
    with pytest.raises(StokerError):
        writable.copy("nothing", "a/1")
    for path in ("", "a//x", "../x", "\udc80", "x" * 256):
        with pytest.raises(BadKey):
            writable.put(path, BytesIO(b"x"), 1)
    assert writable.find("a/1") == before
    for write in (
        lambda: source.put("a/1", BytesIO(b"x"), 1),
        lambda: source.remove("a/1"),
        lambda: source.copy("a/1", "a/2"),
        lambda: source.make_folder("f"),
    ):
        with pytest.raises(OriginReadOnly):
            write()


def test_whether_it_can_be_written_to_is_known_before(
    writable: CacheSource, client: CacheClient, tmp_path: Path
) -> None:
    def at_the_origin() -> list[str]:
        return sorted(str(path) for path in (tmp_path / "o").rglob("*"))

    before = at_the_origin()
    check_writable(writable._client, writable._bucket, writable._prefix)
    assert at_the_origin() == before
    with pytest.raises(OriginReadOnly):
        check_writable(client, "b", "data/")


def test_a_restarted_cache_listens_where_it_did(tmp_path: Path, objects: dict[str, bytes]) -> None:
    cache = EmbeddedCache(tmp_path / "c", ROOM, {"b": str(tmp_path / "o")}, socket_folder=tmp_path)
    with cache, cache.client() as client:
        source = CacheSource(client, "b", "data")
        assert client.endpoint == f"unix://{tmp_path}/socket"
        found = source.find("a/1")
        cache.stop()
        cache.start()
        assert source.find("a/1") == found


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingProxy]:
    """A real S3 server with forty folders of thirty objects each."""
    with s3_server(tmp_path_factory.mktemp("weed")) as endpoint:
        client = s3_client(endpoint)
        for folder in range(40):
            for number in range(30):
                client.put_object(Bucket=BUCKET, Key=f"p/{folder:02}/{number:02}", Body=b"x")
        for key in ("p/a.txt", "p/20-more", "p/made/", "p/z"):
            client.put_object(Bucket=BUCKET, Key=key, Body=b"")
        client.close()
        proxy = CountingProxy(endpoint)
        with running(proxy):
            yield proxy


@pytest.mark.parametrize("is_writable", [False, True])
def test_what_is_in_folders_of_s3_is_not_listed(
    counted: CountingProxy, is_writable: bool, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/p?endpoint={counted.url}&access_key_id=AK&secret_access_key=SK"
    with EmbeddedCache(None, ROOM, {"b": url}, is_writable=is_writable) as far:
        assert far.endpoint is not None
        near_url = f"stoker+{far.endpoint.url}/b"
        with (
            EmbeddedCache(None, ROOM, {"b": near_url}) as near,
            near.client() as client,
            far.client() as other,
        ):
            folders = [f"{number:02}" for number in range(40)]
            expected = sorted([*(f"{name}/" for name in [*folders, "made"]), "20-more", "a.txt", "z"])
            for source, limit in [(CacheSource(other, "b"), 1000), (CacheSource(client, "b"), 1000)]:
                del counted.asked[:]
                for _ in range(2):
                    found = names(source, "", limit)
                    assert [f"{name}/" if is_folder else name for name, is_folder in found] == expected
                assert counted.counted["LIST"] <= 1
            for limit in (7, 1):
                found = names(CacheSource(client, "b"), "", limit)
                # seaweedfs lists in an order of its own.
                assert sorted(f"{name}/" if is_folder else name for name, is_folder in found) == expected
            assert names(CacheSource(client, "b"), "07") == [(f"{n:02}", False) for n in range(30)]
            assert names(CacheSource(client, "b"), "made") == []


def test_a_new_folder_is_listed_as_soon_as_something_is_in_it(writable: CacheSource) -> None:
    before = names(writable)
    writable.put("c/deep/x", BytesIO(b"1"), 1)
    assert names(writable) == sorted([*before, ("c", True)], key=lambda one: one[0] + "/" * one[1])
    assert names(writable, "c") == [("deep", True)]
    writable.remove("c/deep/x")
    assert names(writable) == before
