"""Ranges of many objects in one request: over TCP and a Unix socket, cold and warm, while objects change and leave."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stoker.cache.client.asked import Item, Parts
from stoker.cache.client.batch import split_frames
from stoker.cache.client.client import ByteRange, CacheClient
from stoker.cache.client.descriptors import Descriptor, Places
from stoker.cache.embedded import EmbeddedCache
from stoker.errors import AccessDenied, ConfigError, ObjectChanged, ObjectNotFound, StokerError
from stoker.wire.cache_api import BucketSpec
from stoker.wire.cache_batch import (
    FRAME,
    FRAME_PLACE,
    PLACE,
    PLACE_OBJECT_BYTES_MAX,
    RANGE,
    DescriptorsWanted,
    ReadRequest,
)
from tests.e2e.cache_helpers import fill, served, wait_until_held
from tests.e2e.run_helpers import wait_for

pytestmark = pytest.mark.real
TOKEN = "some-long-token"
BLOCK = 4 * 1024 * 1024
SIZES = {
    "empty": 0, "one": 1, "short": 900, "packed": 70_000, "packed-too": 300_001, "block": BLOCK,
    "large": 3 * BLOCK + 12_345, "large-too": 2 * BLOCK + 1,
}  # fmt: skip
BLOCKS = 5 + 1 + 4 + 3 - 1
"""That there are of all of them: an empty one has none."""


@pytest.fixture
def objects(tmp_path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for key, size_bytes in SIZES.items():
        found |= fill(tmp_path / "origin", [key], size_bytes)
    return found


@pytest.fixture
def cache(tmp_path: Path, objects: dict[str, bytes]) -> Iterator[EmbeddedCache]:
    with EmbeddedCache(None, 10**9, {"b": str(tmp_path / "origin")}, TOKEN) as running:
        yield running


@pytest.fixture(params=["tcp", "unix"])
def client(request: pytest.FixtureRequest, cache: EmbeddedCache) -> Iterator[CacheClient]:
    assert cache.endpoint is not None
    url = cache.endpoint.url if request.param == "tcp" else cache.endpoint.unix_url
    with CacheClient(url, TOKEN) as made:
        yield made


def some_ranges(rng: random.Random, count: int) -> list[ByteRange]:
    """Short ones, long ones, some at the borders of blocks, some behind the end."""
    ranges = []
    for _ in range(count):
        key = rng.choice(list(SIZES))
        border = rng.choice([0, BLOCK, 2 * BLOCK, SIZES[key], rng.randrange(SIZES[key] + 1)])
        start = max(0, border + rng.randint(-2000, 2000))
        length = rng.choice([0, 1, 100, 2047, 2048, 8192, 8193, 100_000, BLOCK + 5000, 2**70])
        ranges.append(ByteRange(key, start, start + length))
    return ranges


def slices(objects: dict[str, bytes], ranges: Sequence[ByteRange]) -> list[bytes]:
    return [objects[key][start:stop] for key, start, stop, _ in ranges]


def same(items: Sequence[Item], expected: Sequence[bytes]) -> bool:
    return [item if isinstance(item, StokerError) else bytes(item) for item in items] == list(expected)


def held(client: CacheClient) -> list[Descriptor]:
    assert client._descriptors is not None
    return list(client._descriptors._held.files.values())


def post(client: CacheClient, request: ReadRequest | dict[str, object]) -> bytes:
    _, body = client._transport.request("POST", "/-/read", body=msgspec.msgpack.encode(request))
    return bytes(body)


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_any_ranges_cold_and_warm_are_what_slices_are(
    client: CacheClient, objects: dict[str, bytes], views: bool
) -> None:
    rng = random.Random(7)
    for _ in range(4):
        ranges = some_ranges(rng, 60)
        assert same(client.read_ranges("b", ranges, views=views), slices(objects, ranges))
    assert same(client.read_many("b", list(objects), views=views), list(objects.values()))
    wait_until_held(client, BLOCKS)
    before = client.status()
    for _ in range(6):
        ranges = some_ranges(rng, 60)
        items = client.read_ranges("b", ranges, views=views)
        assert same(items, slices(objects, ranges))
        assert all(isinstance(item, memoryview if views else bytes) for item in items)
        assert all(item.readonly for item in items if isinstance(item, memoryview))
    after = client.status()
    assert after.misses == before.misses
    assert after.hits - before.hits == 6 * 60
    assert bool(after.local_hits - before.local_hits) == client.endpoint.startswith("unix:")


def test_only_blocks_that_are_touched_are_fetched_and_each_once(
    client: CacheClient, objects: dict[str, bytes]
) -> None:
    ranges = [ByteRange("large", BLOCK + 10 * i, BLOCK + 10 * i + 5) for i in range(500)]
    assert same(client.read_ranges("b", ranges), slices(objects, ranges))
    assert client.status().origin_bytes == BLOCK
    ranges = [ByteRange("large", 3 * BLOCK - 10, 3 * BLOCK + 10), *ranges]
    assert same(client.read_ranges("b", ranges), slices(objects, ranges))
    assert client.status().origin_bytes == 2 * BLOCK + 12_345


def test_a_place_spans_blocks_of_one_file(cache: EmbeddedCache, objects: dict[str, bytes]) -> None:
    with cache.client() as client:
        client.read_many("b", list(objects))
        wait_until_held(client, BLOCKS)
        request = Parts([ByteRange("large", 100, 3 * BLOCK + 100), ByteRange("large", 5, 2**64)])
        wanted = DescriptorsWanted(1, 4)
        body = post(client, request.request("b", wanted))
        places = [PLACE.unpack_from(body, at + FRAME.size) for at in frames(body, FRAME_PLACE)]
        assert [(size, offset) for size, _, offset in places] == [
            (3 * BLOCK, 100),
            (len(objects["large"]) - 5, 5),
        ]


def test_files_of_very_large_objects_are_not_handed_out(tmp_path: Path, cache: EmbeddedCache) -> None:
    for name, size_bytes in (("a", PLACE_OBJECT_BYTES_MAX), ("b", PLACE_OBJECT_BYTES_MAX + 1)):
        with (tmp_path / "origin" / name).open("wb") as file:
            file.truncate(size_bytes)
            file.seek(2**29)
            file.write(name.encode() * 10_000)
    parts = {name: Parts([ByteRange(name, 2**29, 2**29 + 9000)]) for name in "ab"}
    with cache.client() as client:
        for name in "ab":
            assert client.read_ranges("b", parts[name].ranges) == [name.encode() * 9000]
        wait_until_held(client, 2)
        for more in ([], [ByteRange("not there", 0, 1)]):  # the front answers, and the back
            requests = [
                Parts([*parts[name].ranges, *more]).request("b", DescriptorsWanted(1, 4)) for name in "ab"
            ]
            assert [len(frames(post(client, request), FRAME_PLACE)) for request in requests] == [1, 0]


def frames(body: bytes, kind: int) -> list[int]:
    found, at = [], 0
    while at < len(body):
        this, size = FRAME.unpack_from(body, at)
        if this == kind:
            found.append(at)
        at += FRAME.size + size
    return found


def test_a_version_is_that_one_or_an_error_of_its_item(
    tmp_path: Path, client: CacheClient, objects: dict[str, bytes]
) -> None:
    versions = {key: client.stat("b", key).version for key in objects}
    for _ in range(2):
        ranges = [part._replace(version=versions[part.key]) for part in some_ranges(random.Random(3), 50)]
        assert same(client.read_ranges("b", ranges), slices(objects, ranges))
    (tmp_path / "origin" / "packed").write_bytes(b"another")
    assert client.refresh("b", "packed") == 2
    parts = [ByteRange("packed", 0, 5, versions["packed"]), ByteRange("packed", 0, 5)]
    for _ in range(2):  # the first time the back answers, the second time the front would
        old, new = client.read_ranges("b", parts, errors="return")
        assert isinstance(old, ObjectChanged)
        assert "packed" in str(old)
        assert new == b"anoth"
        with pytest.raises(ObjectChanged):
            client.read_ranges("b", parts)
    version = client.stat("b", "packed").version
    both = [ByteRange("packed", 0, 5, version), ByteRange("short", 1, 4, versions["short"])]
    assert client.read_ranges("b", both) == [b"anoth", objects["short"][1:4]]


def test_errors_stand_in_the_places_of_their_items(client: CacheClient, objects: dict[str, bytes]) -> None:
    keys = ["packed", "not there", "large", "\0", "empty"]
    for views in (False, True):
        for _ in range(2):
            found = client.read_many("b", keys, errors="return", views=views)
            assert isinstance(found[1], ObjectNotFound)
            assert isinstance(found[3], ConfigError)
            assert same([found[i] for i in (0, 2, 4)], [objects[keys[i]] for i in (0, 2, 4)])
    parts = [ByteRange("not there", 0, 5), ByteRange("one", 0, 5), ByteRange("not there", 7, 9)]
    first, one, last = client.read_ranges("b", parts, errors="return")
    assert (type(first), one, type(last)) == (ObjectNotFound, objects["one"], ObjectNotFound)
    with pytest.raises(ObjectNotFound, match="not there"):
        client.read_ranges("b", parts)
    with pytest.raises(ObjectNotFound, match="no bucket"):
        client.read_ranges("c", parts, errors="return")
    with pytest.raises(ValueError, match="errors="):
        client.read_many("b", keys, errors="ignore")  # type: ignore[call-overload]
    assert client.read_ranges("b", []) == []
    for start, stop in ((5, 4), (-1, 4), (-2, -1)):
        with pytest.raises(ValueError, match="not a range"):
            client.read_ranges("b", [ByteRange("one", start, stop)])


def test_requests_that_say_what_cannot_be_are_refused(client: CacheClient, objects: dict[str, bytes]) -> None:
    for _ in range(2):
        bad = ReadRequest("b", ["one", "short"], None, RANGE.pack(1, 5, 4) + RANGE.pack(0, 0, 9))
        asked = Parts([ByteRange("short", 5, 5), ByteRange("one", 0, 9)])
        wrong, right = split_frames(post(client, bad), "b", asked)
        assert isinstance(wrong, ConfigError)
        assert right == objects["one"]
        client.read_many("b", ["one", "short"])
    for request in (
        ReadRequest("b", ["one"], None, RANGE.pack(1, 0, 1)),
        ReadRequest("b", [], None, RANGE.pack(0, 0, 1)),
        ReadRequest("b", ["one"], None, b"too short"),
        ReadRequest("b", ["one"], None, RANGE.pack(0, 0, 1) * 65537),
        ReadRequest("b", ["one"], None, None, ["v", "w"]),
    ):
        with pytest.raises(ConfigError):
            post(client, request)
    old = {"bucket": "b", "keys": ["one", "short"]}
    assert split_frames(post(client, old), "b", asked) == [objects["one"], objects["short"]]
    assert post(client, ReadRequest("b", ["one"], None, b"")) == b""


def test_very_many_ranges_of_very_few_objects(client: CacheClient, objects: dict[str, bytes]) -> None:
    """More than the front answers at once, and more than go into one request."""
    rng = random.Random(5)
    ranges = [ByteRange("large", at := rng.randrange(SIZES["large"]), at + 20) for _ in range(70_000)]
    ranges[5:5] = [ByteRange("packed", 0, 9000)] * 5000
    assert same(client.read_ranges("b", ranges), slices(objects, ranges))


def versions_of(data: bytes, start: int) -> set[int]:
    """Which versions of a counted object's words these are, all whole ones at their place."""
    first = -start % 8
    count = max(0, len(data) - first) // 8
    if not count:
        return set()
    words = np.frombuffer(data, ">u4", 2 * count, first).reshape(count, 2)
    assert np.array_equal(words[:, 1], np.arange(count) + (start + first) // 8)
    return set(np.unique(words[:, 0]).tolist())


def counted(version: int, size_bytes: int) -> bytes:
    count = size_bytes // 8
    return np.stack([np.full(count, version), np.arange(count)], axis=1).astype(">u4").tobytes()


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_each_range_is_of_one_version_while_objects_change(tmp_path: Path, views: bool) -> None:
    sizes = {"packed": 80_000, "large": BLOCK + 400_000}
    origin = tmp_path / "origin"
    origin.mkdir()
    path = tmp_path / "socket"

    def write(version: int) -> None:
        for key, size in sizes.items():
            (origin / "new").write_bytes(counted(version, size))
            os.replace(origin / "new", origin / key)

    write(0)
    seen: set[int] = set()
    with (
        served(tmp_path / "cache", {"b": str(origin)}, "--unix", str(path), capacity="20MB"),
        CacheClient(f"unix://{path}") as client,
    ):
        for version in range(1, 25):
            rng = random.Random(version)
            pinned = {key: client.stat("b", key).version for key in sizes}
            ranges = []
            for _ in range(30):
                key = rng.choice(list(sizes))
                start = rng.randrange(sizes[key])
                wanted = rng.choice([None, pinned[key]])
                ranges.append(ByteRange(key, start, start + rng.choice([100, 50_000, BLOCK]), wanted))
            changing = threading.Thread(target=lambda v=version: (write(v), client.refresh("b", "")))
            changing.start()
            kept = client.read_ranges("b", ranges, errors="return", views=views)
            changing.join()
            more = client.read_ranges("b", ranges, errors="return", views=views)
            for part, item in zip(ranges * 2, [*kept, *more], strict=True):
                if isinstance(item, StokerError):
                    assert isinstance(item, ObjectChanged)
                    continue
                found = versions_of(bytes(item), part.start)
                assert len(found) <= 1
                seen |= found
    assert len(seen) > 20


def evicted(client: CacheClient, files: Sequence[Descriptor], more: list[str], capacity: int) -> None:
    """Read others until all of these were given up."""

    def gone() -> bool:
        for key in more:
            client.read_many("b", [key])
        return all(file.is_given_up for file in files)

    wait_for(gone, 150.0)


def test_views_stay_what_they_are_when_the_server_evicts_and_stops(
    tmp_path: Path, objects: dict[str, bytes]
) -> None:
    more = fill(tmp_path / "origin", [f"more/{number:02}" for number in range(12)], 2 * BLOCK + 100)
    more |= fill(tmp_path / "origin", [f"some/{number:03}" for number in range(200)], 200_000)
    path, folder = tmp_path / "socket", tmp_path / "cache"
    ranges = [part for part in some_ranges(random.Random(11), 80) if SIZES[part.key] >= 70_000]
    expected = slices(objects, ranges)
    with CacheClient(f"unix://{path}") as client:
        with served(folder, {"b": str(tmp_path / "origin")}, "--unix", str(path), capacity="60MB"):
            while client.status().local_hits < 60:
                views = client.read_ranges("b", ranges, views=True)
                whole = client.read_many("b", ["large", "packed"], views=True)
            files = held(client)
            assert len(files) >= 3
            with CacheClient(f"unix://{path}") as other:
                evicted(other, files, list(more), 60_000_000)
            assert same(views, expected)
        assert same(views, expected)
        assert same(whole, [objects["large"], objects["packed"]])
        del files
        client.close()
        assert mappings(folder) >= 3, "views keep them"
        assert same(views, expected)
        del views, whole
        gc.collect()
        assert mappings(folder) == 0


def mappings(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_views_outlive_a_server_that_is_killed_and_evicts_when_it_is_back(
    tmp_path: Path, objects: dict[str, bytes]
) -> None:
    """What a server handed out before it began, it makes no holes in either."""
    others = fill(tmp_path / "origin", [f"more/{number:02}" for number in range(12)], 2 * BLOCK + 100)
    path, folder = tmp_path / "socket", tmp_path / "cache"
    arguments = folder, {"b": str(tmp_path / "origin")}, "--unix", str(path)
    with CacheClient(f"unix://{path}") as client:
        with served(*arguments, capacity="60MB") as server:
            while not client.status().local_hits:
                views = client.read_many("b", ["large", "large-too"], views=True)
            server.stop(signal.SIGKILL)
        path.unlink()
        files = held(client)
        with served(*arguments, capacity="60MB"), CacheClient(f"unix://{path}") as other:
            assert same(other.read_ranges("b", [ByteRange("large", 0, 10)]), [objects["large"][:10]])
            evicted(other, files, list(others), 60_000_000)
        assert same(views, [objects["large"], objects["large-too"]])


def test_a_file_that_is_cut_or_grows_is_no_view(cache: EmbeddedCache, objects: dict[str, bytes]) -> None:
    with cache.client() as client:
        client.read_many("b", list(objects))
        wait_until_held(client, BLOCKS)
        whole = client.read_many("b", ["large"], views=True)
        assert same(whole, [objects["large"]])
        sizes = [os.fstat(file.fd).st_size for file in held(client)]
        for file, size in zip(held(client), sizes, strict=True):
            view = file.view(size - 5, 5)
            assert view is not None
            assert bytes(view) == os.pread(file.fd, 5, size - 5)
            assert file.view(size - 5, 6) is None
            assert file.view(2**40, 1) is None


def test_tenants_read_their_own_and_are_passed_nothing_else(tmp_path: Path) -> None:
    sizes = {"packed": 70_000, "large": 2 * BLOCK + 9}
    data = {
        name: {key: fill(tmp_path / name, [key], size)[key] for key, size in sizes.items()}
        for name in ("a", "b")
    }
    path = tmp_path / "socket"
    tokens = ("--token", "token-of-a:a", "--token", "token-of-b:b")
    buckets = {name: str(tmp_path / name) for name in data}
    ranges = [ByteRange("packed", 10, 60_000), ByteRange("large", 10, 2 * BLOCK), ByteRange("large", 5, 9)]
    with served(tmp_path / "cache", buckets, *tokens, "--unix", str(path)) as server:
        clients = {name: CacheClient(f"unix://{path}", f"token-of-{name}") for name in data}
        far = CacheClient(server.url, "token-of-a")
        for name, client in clients.items():
            while not held(client) or client.status().local_hits < 10:
                assert same(client.read_ranges(name, ranges, views=True), slices(data[name], ranges))
        instance = clients["b"]._descriptors.held().instance  # type: ignore[union-attr]
        numbers = b"".join(number.to_bytes(4, "big") for number in range(200))
        for name, client in [*clients.items(), ("a", far)]:
            other = "b" if name == "a" else "a"
            for views in (False, True):
                with pytest.raises(AccessDenied):
                    client.read_ranges(other, ranges, errors="return", views=views)
            # Who claims to have all descriptors is told places of its own bucket only.
            lie = DescriptorsWanted(1, 100, instance + numbers)
            body = post(client, Parts(ranges).request(name, lie))
            for at in frames(body, FRAME_PLACE):
                size, container, offset = PLACE.unpack_from(body, at + FRAME.size)
                there = next((tmp_path / "cache").glob(f"files/*/{container:08x}")).read_bytes()
                assert there[offset : offset + size] in slices(data[name], ranges)
            with pytest.raises(AccessDenied):
                post(client, Parts(ranges).request(other, lie))
        for name, client in clients.items():
            other = "b" if name == "a" else "a"
            for file in held(client):
                content = os.pread(file.fd, 10**9, 0)
                assert not any(secret[:1000] in content for secret in data[other].values())
            client.close()


def test_what_lacks_a_descriptor_comes_as_bytes(
    cache: EmbeddedCache, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object, **__: object) -> None:
        return None

    with cache.client() as client:
        client.read_many("b", list(objects))
        wait_until_held(client, BLOCKS)
        monkeypatch.setattr(Places, "read", lost)
        for views in (False, True):
            ranges = some_ranges(random.Random(2), 60)
            assert same(client.read_ranges("b", ranges, views=views), slices(objects, ranges))


@pytest.mark.parametrize("ttl_s", [0.0, 3600.0])
def test_ranges_of_what_changes_all_the_time_cost_few_questions(tmp_path: Path, ttl_s: float) -> None:
    objects = fill(tmp_path / "origin", ["one"], 100_000)
    spec = BucketSpec(str(tmp_path / "origin"), ttl_s=ttl_s)
    with EmbeddedCache(None, 10**9, {"b": spec}, TOKEN) as cache, cache.client() as client:
        ranges = [ByteRange("one", at, at + 1000) for at in range(0, 100_000, 100)]
        assert same(client.read_ranges("b", ranges), slices(objects, ranges))
        assert client.status().buckets[0].origin_requests <= 3
