"""Buckets that another server of the fleet has otherwise, or that cannot be opened here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker.cache.origin.open import open_origin
from stoker.cache.server import added
from stoker.cache.server.added import BUCKETS_FILE, REMOVED_FILE, AddedBuckets
from stoker.errors import EnvironmentProblem
from stoker.wire.cache_api import BucketSpec, FleetMember, FleetStatus
from tests.unit.test_cache_engine import World, run

ME = FleetMember("me", "http://me:1")


def member(name: str) -> FleetMember:
    return FleetMember(name, f"http://{name}:1")


def says(name: str, bucket: str, origin: str) -> FleetStatus:
    return FleetStatus(name, [], [], added={bucket: BucketSpec(origin)})


def noted(buckets: AddedBuckets, names: Sequence[str]) -> list[str]:
    """Of which members there are notes."""
    return [name for name in names if any(f"is not the same at {name}:" in note for note in buckets.notes)]


def test_members_that_left_are_told_of_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(added, "DIFFERING_MAX", 3)
    names = [f"y{n}" for n in range(5)]

    async def story(world: World) -> None:
        fleet = world.engine.fleet
        buckets = AddedBuckets(world.engine, tmp_path, lambda: None)
        for name in names:
            await buckets.meet(member(name), says(name, "b", "memory://other"))
            fleet._take([ME, member("y0"), member(name)])
            assert noted(buckets, names) == sorted({"y0", name})
        fleet._take([ME])
        assert buckets.notes == []
        assert len(buckets._differing) <= 3
        fleet._take([ME, member("y0")])
        assert noted(buckets, names) == ["y0"]

    run(World(tmp_path), story)


def test_an_origin_that_cannot_be_one_is_told_of_and_ends_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.engine._origins._open_origin = open_origin
        world.engine.fleet._take([ME, member("y")])
        buckets = AddedBuckets(world.engine, tmp_path, lambda: None)
        for origin in ("\0", "file:///\0x", "file://["):
            await buckets.meet(member("y"), says("y", "c", origin))
            assert "is no URL of an origin" in "".join(buckets.notes)
        assert world.engine.buckets.keys() == {"b"}

    run(World(tmp_path), story)


def made(at_ms: int) -> BucketSpec:
    """As S3 clients make them."""
    return BucketSpec("memory://made", made_ms=at_ms)


def test_what_is_removed_while_others_are_told_of_it_is_not_told(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        buckets = AddedBuckets(world.engine, tmp_path, lambda: None)
        for name in ("c", "d", "e"):
            assert buckets.add(name, made(5))
        told: list[str] = []

        async def add_bucket(url: str, name: str, spec: BucketSpec, *, is_check: bool = False) -> None:
            told.append(name)
            for other in {"c", "d", "e"} - {name}:
                if other in buckets.specs:
                    buckets.remove(other, 7)

        world.engine.fleet.peers.add_bucket = add_bucket  # type: ignore[method-assign, assignment]
        await buckets.meet(member("y"), FleetStatus("y", []))
        assert len(told) == 1
        assert set(buckets.removed) == {"c", "d", "e"} - set(told)

    run(World(tmp_path), story)


def test_a_removal_that_the_disk_refuses_leaves_all_as_it_was(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        buckets = AddedBuckets(world.engine, tmp_path, lambda: None)
        buckets.add("c", made(5))
        open_bucket = world.engine.store.open_bucket

        def refuses(*arguments: object, **options: object) -> object:
            raise EnvironmentProblem("the disk is full")

        world.engine.store.open_bucket = refuses  # type: ignore[method-assign, assignment]
        with pytest.raises(EnvironmentProblem):
            buckets.remove("c", 7)
        assert ("c" in world.engine.buckets, "c" in buckets.specs, buckets.removed) == (True, True, {})
        world.engine.store.open_bucket = open_bucket  # type: ignore[method-assign]
        buckets.remove("c", 7)
        assert ("c" in world.engine.buckets, "c" in buckets.specs, buckets.removed) == (
            False,
            False,
            {"c": 7},
        )

    run(World(tmp_path), story)


def test_a_removal_of_which_only_half_was_written_down_counts(tmp_path: Path) -> None:
    """As where the power went between the two files."""

    async def story(world: World) -> None:
        folder = tmp_path / "state"
        folder.mkdir()
        buckets = AddedBuckets(world.engine, folder, lambda: None)
        buckets.add("c", made(5))
        buckets.add("d", made(9))
        before = (folder / BUCKETS_FILE).read_bytes()
        buckets.remove("c", 7)
        buckets.remove("d", 9)
        buckets.add("d", made(11))
        assert (folder / REMOVED_FILE).stat().st_mtime_ns <= (folder / BUCKETS_FILE).stat().st_mtime_ns
        (folder / BUCKETS_FILE).write_bytes(before)
        again = AddedBuckets(world.engine, folder, lambda: None)
        again.restore()
        assert again.specs == {}
        assert again.removed == {"c": 7, "d": 9}

    run(World(tmp_path), story)
