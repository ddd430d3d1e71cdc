"""A server's view of its fleet, and its parts that wait for nobody."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from stoker.base.clock import BootClock
from stoker.base.rng import Rng
from stoker.cache.fleet.folder import MARGIN_S, FolderMembership
from stoker.cache.fleet.open import open_membership, parse_member
from stoker.cache.fleet.static import StaticMembership, as_listed
from stoker.cache.maglev import Member
from stoker.cache.route import FleetView
from stoker.cache.server.lists import Lists
from stoker.cache.server.vetting import refusal
from stoker.errors import ConfigError
from stoker.wire.cache_api import HOPS_MAX, PROTOCOL, FleetMember, FleetStatus, ObjectInfo, ObjectPage

NAMES = [f"b/k{n}" for n in range(60)]


def view_of(me: str, names: str) -> FleetView:
    view = FleetView(me)
    view.set_members([Member(name) for name in names])
    return view


def test_exactly_one_server_goes_to_the_origin() -> None:
    rng = Rng(1)
    views = {name: view_of(name, "wxyz") for name in "wxyz"}
    for name in NAMES:
        routes = {me: view.route(name, 1, 0, HOPS_MAX, rng) for me, view in views.items()}
        owners = [me for me, route in routes.items() if not route.peers]
        assert len(owners) == 1
        assert [me for me, route in routes.items() if route.keeps] == owners
        assert {route.peers[0] for me, route in routes.items() if me not in owners} == set(owners)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4), st.integers(0, 3), st.sets(st.sampled_from("wxyz"), max_size=3))
def test_requests_that_are_handed_on_come_to_an_end(replicas: int, hops: int, down: set[str]) -> None:
    """Whatever the servers think of each other, nobody asks itself, and the last does not ask on."""
    rng = Rng(2)
    for me in "wxyz":
        view = view_of(me, "wxyz")
        for name in sorted(down - {me}):
            view.failed(name, 0.0, rng)
        for name in NAMES[:10]:
            route = view.route(name, replicas, hops, HOPS_MAX, rng)
            assert me not in route.peers
            assert not set(route.peers) & (down - {me})
            assert hops < HOPS_MAX or not route.peers
            assert route.keeps or route.peers or hops >= HOPS_MAX


def test_copies_are_kept_by_as_many_as_may() -> None:
    for replicas in (1, 2, 3):
        views = [view_of(name, "wxyz") for name in "wxyz"]
        for name in NAMES:
            keeping = [view.me for view in views if view.route(name, replicas, 0, HOPS_MAX, Rng(3)).keeps]
            assert len(keeping) == replicas
    assert all(view_of(me, "wxyz").route("b/k", 0, 0, HOPS_MAX, Rng(3)).keeps for me in "wxyz")


def test_one_outage_is_one_failure_however_many_find_out() -> None:
    view = view_of("x", "xyz")
    for _ in range(50):
        view.failed("y", 10.0, Rng(4))
    assert view.down() == {"y"}
    assert view.due(9.0) == []
    assert view.due(12.0) == ["y"], "it is asked again soon"
    view.answered("y")
    assert view.down() == frozenset()


def test_who_owned_it_before_is_known_while_it_can_be_asked() -> None:
    view = view_of("z", "xy")
    before = {name: view.placement().owner(name) for name in NAMES}
    assert view.set_members([Member(name) for name in "xyz"])
    assert not view.set_members([Member(name) for name in "zyx"])
    for name in NAMES:
        owner = before[name]
        assert owner is not None
        assert view.owner_before(name) == owner.name
    view.failed("y", 0.0, Rng(5))
    assert {view.owner_before(name) for name in NAMES} == {"x", None}


def test_a_server_that_is_no_member_asks_and_keeps_what_it_was_asked_for() -> None:
    view = view_of("other", "xy")
    assert all(view.route(name, 1, 0, HOPS_MAX, Rng(6)).keeps for name in NAMES)
    alone = FleetView("x")
    assert alone.route("b/k", 1, 0, HOPS_MAX, Rng(6)).peers == ()


def test_a_list_of_members_is_read_or_refused() -> None:
    member = parse_member("cache-1=http://10.0.0.1:7070/;weight=3;zone=rack1")
    assert member == FleetMember("cache-1", "http://10.0.0.1:7070", 3, "rack1")
    assert parse_member("http://a:1").name == parse_member("https://a:1").name == "a:1"
    for bad in (
        "a:1",
        "http://a",
        "ftp://a:1",
        "http://a:1/path",
        "http://a:1;colour=red",
        "x y=http://a:1",
        "http://a:99999",
    ):
        with pytest.raises(ConfigError):
            parse_member(bad)
    for where in ("", ",", "etcd:///stoker"):
        with pytest.raises(ConfigError):
            open_membership(where, {})
    static = open_membership("a=http://a:1,http://b:2", {})
    assert isinstance(static, StaticMembership)
    with pytest.raises(ConfigError, match="none of its fleet's members"):
        asyncio.run(static.announce(FleetMember("c", "http://c:3")))


def test_a_member_of_a_folder_is_sure_of_its_fleet_as_long_as_it_writes_and_reads(tmp_path: Path) -> None:
    async def story() -> None:
        folder, clock = tmp_path / "members", BootClock()
        one = FolderMembership(folder, beat_s=0.05, lease_s=2.0)
        assert one.confirmed_until < clock.now()
        await one.announce(FleetMember("one", "http://one:1"))
        assert one.confirmed_until < clock.now(), "who else is there it has not read yet"
        reading = asyncio.create_task(_read_on(one))
        while one.confirmed_until < clock.now() + 1.0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert one.confirmed_until < clock.now() + 2.0 - MARGIN_S + 0.001
        os.rename(folder, tmp_path / "away")
        before = 0.0
        while one.confirmed_until != before:  # one that had begun may still come to its end
            before = one.confirmed_until
            await asyncio.sleep(0.3)
        reading.cancel()
        await one.leave()
        assert one.confirmed_until < 0

    asyncio.run(asyncio.wait_for(story(), 60))


async def _read_on(membership: FolderMembership) -> None:
    async for _ in membership.members():
        pass


def test_members_meet_in_a_folder_and_are_gone_once_they_fall_silent(tmp_path: Path) -> None:
    async def story() -> None:
        folder = tmp_path / "members"
        one, two = (FolderMembership(folder, beat_s=0.05, lease_s=2.0) for _ in range(2))
        await one.announce(FleetMember("one", "http://one:1"))
        await two.announce(FleetMember("two", "http://two:2"))
        (folder / "bad.member").write_bytes(b"{half a file")
        seen = one.members()
        while {member.name for member in await anext(seen)} != {"one", "two"}:
            pass
        os.rename(folder, tmp_path / "away")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(seen), 0.3)  # those who were known stay
        seen = one.members()
        (tmp_path / "members").rmdir() if (tmp_path / "members").exists() else None
        os.rename(tmp_path / "away", folder)
        while {member.name for member in await anext(seen)} != {"one", "two"}:
            pass
        assert two._beating is not None
        two._beating.cancel()  # killed
        while {member.name for member in await anext(seen)} != {"one"}:
            pass
        await two.announce(FleetMember("two", "http://two:2", 0))
        while {(m.name, m.weight) for m in await anext(seen)} != {("one", 1), ("two", 0)}:
            pass
        await two.leave()
        while {member.name for member in await anext(seen)} != {"one"}:
            pass
        await one.leave()
        await seen.aclose()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_member_is_used_only_if_it_is_who_it_is_said_to_be() -> None:
    said = FleetStatus("x", [], block_size_bytes=1000)
    assert refusal(said, "x", 1000) == ""
    for other, why in (
        (msgspec.structs.replace(said, name="y"), "calls itself 'y'"),
        (
            msgspec.structs.replace(said, block_size_bytes=999),
            "blocks have 999 bytes, and this server's 1000",
        ),
        (msgspec.structs.replace(said, protocol=PROTOCOL + 1), f"speaks version {PROTOCOL + 1}"),
        (msgspec.structs.replace(said, is_trusting=False), "give all servers the same first token"),
    ):
        assert why in refusal(other, "x", 1000)


def test_lists_are_bounded_and_dropped_by_prefix() -> None:
    lists = Lists(bytes_max=10_000)
    page = ObjectPage([ObjectInfo(f"a/{n}", 1, "v") for n in range(9)])
    lists.put("b", "a/", None, 1000, page, 10.0)
    assert lists.get("b", "a/", None, 1000, 5.0, 12.0) == (page, 2.0)
    assert lists.get("b", "a/", None, 1000, 5.0, 16.0) is None
    assert lists.get("b", "a/", "x", 1000, 5.0, 12.0) is None
    for n in range(50):
        lists.put("b", f"p{n}/", None, 1000, page, 10.0)
        assert 0 < lists.size_bytes <= 10_000
    assert lists.get("b", "a/", None, 1000, 5.0, 12.0) is None
    lists.put("b", "a/b/", None, 1, page, 10.0)
    lists.refresh("b", "a/b/c", 0.0)
    assert lists.get("b", "a/b/", None, 1, 5.0, 10.0) is None
    lists.put("b", "a/b/", None, 1, page, 10.0)
    lists.refresh("other", "", 0.0)
    assert lists.get("b", "a/b/", None, 1, 5.0, 10.0) is not None
    lists.refresh("b", "a/", 0.0)
    assert lists.get("b", "a/b/", None, 1, 5.0, 10.0) is None


def test_a_page_from_before_a_refresh_is_not_kept() -> None:
    lists, page = Lists(), ObjectPage([ObjectInfo("a/b/c", 1, "v")])

    def is_kept(prefix: str, asked_at: float, bucket: str = "b") -> bool:
        lists.put(bucket, prefix, None, 1000, page, asked_at)
        return lists.get(bucket, prefix, None, 1000, 1000.0, asked_at) is not None

    lists.refresh("b", "a/b/", 10.0)
    for prefix in ("", "a/", "a/b/", "a/b/c"):
        assert not is_kept(prefix, 9.9)
        assert not is_kept(prefix, 10.0)
        assert is_kept(prefix, 10.1)
    assert is_kept("a/x", 9.0)
    assert is_kept("a/b/", 9.0, "other")
    for number in range(1000):
        lists.refresh("b", f"z/{number}", 20.0 + number)
    assert not is_kept("a/y", 500.0), "what was refreshed then is forgotten by now"
    assert is_kept("a/y", 1100.0)


def test_a_server_is_what_its_fleets_list_says_of_it() -> None:
    listed = FleetMember("a", "http://a:1", 3, "far")
    me = FleetMember("a", "http://10.0.0.1:1")
    assert as_listed(me, None, listed) == FleetMember("a", "http://10.0.0.1:1", 3, "far")
    assert as_listed(replace(me, weight=3, zone="far"), 3, listed).weight == 3
    for other, weight in ((me, 1), (replace(me, zone="near"), None)):
        with pytest.raises(ConfigError, match="fleet's list says weight 3 and zone 'far' of a"):
            as_listed(other, weight, listed)
