"""Buckets that another server of the fleet has otherwise, or that cannot be opened here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker.cache.origin.open import open_origin
from stoker.cache.server import added
from stoker.cache.server.added import AddedBuckets
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
        world.engine._open_origin = open_origin
        world.engine.fleet._take([ME, member("y")])
        buckets = AddedBuckets(world.engine, tmp_path, lambda: None)
        for origin in ("\0", "file:///\0x", "file://["):
            await buckets.meet(member("y"), says("y", "c", origin))
            assert "is no URL of an origin" in "".join(buckets.notes)
        assert world.engine.buckets.keys() == {"b"}

    run(World(tmp_path), story)
