"""Ranges of large objects from a fleet: each part from its blocks' owners, whoever goes and whatever changes."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

import pytest

from stoker.cache.client.asked import Asked, Item
from stoker.cache.client.client import ByteRange
from stoker.cache.client.fleet import FleetClient, open_client
from stoker.errors import ObjectChanged, ObjectNotFound, StokerError
from tests.e2e.cache_helpers import fill
from tests.e2e.test_cache_fleet import TOKEN, FleetOfServers, fleet_of, wait_until_held
from tests.e2e.test_cache_ranges import counted, versions_of

pytestmark = pytest.mark.real
BLOCK = 4 * 1024 * 1024
SIZES = {"large": 5 * BLOCK + 1234, "large-too": 3 * BLOCK, "small": 50_000, "empty": 0}


def some_ranges(rng: random.Random, count: int) -> list[ByteRange]:
    ranges = []
    for _ in range(count):
        key = rng.choice(list(SIZES))
        start = max(0, rng.choice([0, BLOCK, 2 * BLOCK, 4 * BLOCK, SIZES[key]]) + rng.randint(-3000, 3000))
        length = rng.choice([0, 1, 900, 20_000, 2 * BLOCK, 2**70])
        ranges.append(ByteRange(key, start, start + length))
    return ranges


def right(items: list[Item], objects: dict[str, bytes], ranges: list[ByteRange]) -> bool:
    expected = [objects[key][start:stop] for key, start, stop, _ in ranges]
    return [item if isinstance(item, StokerError) else bytes(item) for item in items] == expected


def misses(fleet: FleetOfServers) -> int:
    total = 0
    for name in fleet.servers:
        with fleet.client(name) as client:
            total += client.status().misses
    return total


def test_ranges_come_from_the_owners_of_their_blocks_and_are_joined(tmp_path: Path) -> None:
    objects = {key: fill(tmp_path / "o", [key], size)[key] for key, size in SIZES.items()}
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        urls = ",".join(server.url for server in fleet.servers.values())
        with open_client(urls, TOKEN, timeout_s=20.0) as client:
            rng = random.Random(1)
            for views in (False, True):
                ranges = some_ranges(rng, 60)
                assert right(list(client.read_ranges("b", ranges, views=views)), objects, ranges)
            whole = [ByteRange(key, 0, 2**64) for key in SIZES]
            assert right(list(client.read_ranges("b", whole)), objects, whole)
            wait_until_held(fleet, 6 + 3 + 1)
            before = misses(fleet)
            for _ in range(5):
                ranges = some_ranges(rng, 60)
                assert right(list(client.read_ranges("b", ranges)), objects, ranges)
            assert misses(fleet) == before, "whoever was asked has it"
            assert fleet.origin_bytes() == sum(SIZES.values())
            version = client.stat("b", "large").version
            parts = [
                ByteRange("large", 10, 3 * BLOCK, version),
                ByteRange("large", 10, 3 * BLOCK, "another"),
                ByteRange("none", 10, 3 * BLOCK),
                ByteRange("small", 10, 20),
            ]
            same, changed, none, small = client.read_ranges("b", parts, errors="return")
            assert (same, small) == (objects["large"][10 : 3 * BLOCK], objects["small"][10:20])
            assert (type(changed), type(none)) == (ObjectChanged, ObjectNotFound)
            with pytest.raises(ObjectChanged):
                client.read_ranges("b", parts)
            found = client.read_many("b", ["small", "none", "large"], errors="return")
            assert right([found[0], found[2]], objects, [whole[2], whole[0]])
            assert isinstance(found[1], ObjectNotFound)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_goes_is_no_matter_to_readers_of_ranges(tmp_path: Path, number: signal.Signals) -> None:
    objects = {key: fill(tmp_path / "o", [key], size)[key] for key, size in SIZES.items()}
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        urls = ",".join(server.url for server in fleet.servers.values())
        # Longer than a server takes to see that another one is silent.
        with open_client(urls, TOKEN, timeout_s=10.0) as client:
            rng = random.Random(2)
            ranges = some_ranges(rng, 60)
            assert right(list(client.read_ranges("b", ranges)), objects, ranges)
            gone = fleet.servers.pop("y")
            fleet.gone.append(gone)
            gone.child.send_signal(number)
            for _ in range(3):
                ranges = some_ranges(rng, 60)
                assert right(list(client.read_ranges("b", ranges)), objects, ranges)


def test_a_range_of_several_owners_is_of_one_version(tmp_path: Path) -> None:
    size = 4 * BLOCK
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "large").write_bytes(counted(0, size))
    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        urls = ",".join(server.url for server in fleet.servers.values())
        seen: set[int] = set()
        with open_client(urls, TOKEN, timeout_s=20.0) as client:
            for version in range(1, 8):

                def change(version: int = version) -> None:
                    (tmp_path / "o" / "new").write_bytes(counted(version, size))
                    (tmp_path / "o" / "new").rename(tmp_path / "o" / "large")
                    client.refresh("b", "")

                changing = threading.Thread(target=change)
                changing.start()
                ranges = [ByteRange("large", 8 * at, size - 8 * at) for at in range(3)]
                found = client.read_ranges("b", ranges, errors="return")
                changing.join()
                found += client.read_ranges("b", ranges, errors="return")
                for part, item in zip(ranges * 2, found, strict=True):
                    if isinstance(item, StokerError):
                        assert isinstance(item, ObjectChanged)
                        continue
                    assert len(item) == part.stop - part.start
                    versions = versions_of(item, part.start)
                    assert len(versions) == 1
                    seen |= versions
        assert len(seen) >= 7


def test_an_object_that_changes_between_two_owners_answers_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 * BLOCK
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "large").write_bytes(counted(0, size))
    whole = FleetClient._read_groups
    versions = iter([1, 2])

    def one_by_one(
        self: FleetClient,
        bucket: str,
        asked: Asked,
        groups: dict[str, list[int]],
        found: dict[int, Item],
        *,
        is_last: bool,
        views: bool,
    ) -> None:
        for url, positions in groups.items():
            whole(self, bucket, asked, {url: positions}, found, is_last=is_last, views=views)
            version = next(versions, None) if len(groups) > 1 else None
            if version is not None:
                (tmp_path / "o" / "large").write_bytes(counted(version, size))
                self.refresh("b", "")

    with fleet_of(tmp_path, "xyz", str(tmp_path / "o")) as fleet:
        urls = ",".join(server.url for server in fleet.servers.values())
        with open_client(urls, TOKEN, timeout_s=20.0) as client:
            client.read_ranges("b", [ByteRange("large", 0, size)])
            monkeypatch.setattr(FleetClient, "_read_groups", one_by_one)
            (item,) = client.read_ranges("b", [ByteRange("large", 0, size)])
            assert next(versions, None) is None
            assert versions_of(item, 0) == {2}
