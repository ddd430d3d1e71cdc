"""Seeded worlds around the cores of blobs, and proof that they can find a fault."""

from __future__ import annotations

import re

import pytest

from stoker.cache.blobs import votes
from stoker.cache.blobs.standing import Standing
from tests.sim.blob_world import BlobWorld, run_world


def test_hundreds_of_worlds_never_give_what_was_overwritten() -> None:
    figures = [[int(number) for number in re.findall(r"\d+", run_world(seed))] for seed in range(200)]
    _, acknowledged, refused, served, missed = (sum(column) for column in zip(*figures, strict=True))
    assert min(acknowledged, refused, served, missed) > 1000


def test_a_world_is_a_function_of_its_seed() -> None:
    assert [run_world(seed) for seed in range(20)] == [run_world(seed) for seed in range(20)]


def test_the_worlds_notice_who_writes_what_another_may_be_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Standing, "objection", lambda *_: None)
    with pytest.raises(AssertionError, match=r"blob world \d+: .* was acknowledged; the last events"):
        _ = [run_world(seed) for seed in range(200, 600)]


def test_the_worlds_notice_who_asks_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(votes, "missing_max", lambda others: 2)
    with pytest.raises(AssertionError, match=r"blob world \d+: .* was acknowledged; the last events"):
        _ = [run_world(seed) for seed in range(600)]


def test_the_worlds_notice_a_gap_between_promises_that_is_taken_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Standing._extend

    def extend(self: Standing, now: float) -> None:
        term = self.term
        original(self, now)
        self.term = term

    monkeypatch.setattr(Standing, "_extend", extend)
    with pytest.raises(AssertionError, match=r"blob world \d+: .* was acknowledged; the last events"):
        _ = [run_world(seed) for seed in range(200, 1000)]


class Planless(BlobWorld):
    """Nothing happens but what a test has happen."""

    def plan(self) -> None:
        pass


def two_are_lost() -> BlobWorld:
    """Of three servers two are cut off from where the fleet meets, and from the third, but not from each other; two new
    ones come, and the blob is written anew there while it is asked for here."""
    world = next(
        w
        for w in map(Planless, range(1000))
        if len(w.servers) == 3 and not w.is_static and w.delays_s == [0.01]
    )
    key = world.keys[0]
    first, second, third = world.orders[key]
    world.horizon_s = 110.0
    world.after(14.0, lambda: world.put_at(key, first))

    def part() -> None:
        world.cut |= {frozenset((first, third)), frozenset((second, third))}
        world.servers[first].meets_again_at = world.servers[second].meets_again_at = 1e9

    world.after(16.0, part)
    for _ in range(2):
        world.after(17.0, world.come)

    def isolate() -> None:
        world.cut |= {frozenset((old, new)) for old in (first, second) for new in ("s3", "s4")}

    world.after(17.1, isolate)
    for at_s in range(80, 100):
        world.after(at_s, lambda: world.put_at(key, world.owner(world.servers[third], key)))
    for at_s in range(15, 110):
        world.after(at_s + 0.5, lambda: world.get_at(key, first))
    return world


def test_servers_that_their_fleet_has_lost_do_not_go_on_beside_it() -> None:
    world = two_are_lost()
    world.run()
    assert world.served > 1
    assert world.acknowledged > 2


def test_the_worlds_notice_servers_that_go_on_beside_their_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Standing.confirm
    monkeypatch.setattr(Standing, "confirm", lambda self, until, now: original(self, 1e9, now))
    with pytest.raises(AssertionError, match="was acknowledged; the last events"):
        two_are_lost().run()
