"""Ranks, sources and the pace of commits."""

from __future__ import annotations

from stoker.job.membership import Candidate, NoSource, form_world
from stoker.job.roster import Roster
from stoker.wire.job import World


def candidate(worker: str, node: str = "a", age: int = 0, slot: int = 0, **state: object) -> Candidate:
    values: dict[str, object] = {"commits": 5, "clean": True, "fresh": False, "store": f"{worker}:1", **state}
    return Candidate(worker=worker, node=node, node_age=age, slot=slot, **values)  # type: ignore[arg-type]


def world_of(*candidates: Candidate) -> World:
    world = form_world(3, candidates)
    assert isinstance(world, World)
    return world


def test_oldest_nodes_get_the_low_ranks() -> None:
    world = world_of(
        candidate("w3", "young", 2, 0), candidate("w2", "old", 1, 1), candidate("w1", "old", 1, 0)
    )
    assert [(m.worker, m.rank, m.local_rank, m.local_world_size, m.group_rank) for m in world.members] == [
        ("w1", 0, 0, 2, 0),
        ("w2", 1, 1, 2, 0),
        ("w3", 2, 0, 1, 1),
    ]
    assert world.store == "w1:1"


def test_equal_survivors_copy_nothing_and_a_newcomer_does() -> None:
    world = world_of(candidate("w1"), candidate("w2", slot=1), candidate("w3", slot=2, fresh=True, commits=0))
    assert world.source == 0
    assert [m.copy_state for m in world.members] == [False, False, True]


def test_the_freshest_survivor_is_the_source() -> None:
    world = world_of(candidate("w1", commits=4), candidate("w2", slot=1, commits=5))
    assert (world.source, world.commits) == (1, 5)
    assert [m.copy_state for m in world.members] == [True, False]


def test_a_state_that_stands_at_no_commit_is_never_copied() -> None:
    world = world_of(candidate("w1", commits=9, clean=False), candidate("w2", slot=1, commits=8))
    assert world.source == 1
    assert [m.copy_state for m in world.members] == [True, False]
    assert isinstance(form_world(1, [candidate("w1", clean=False)]), NoSource)


def test_at_the_start_everybody_copies_rank_zero() -> None:
    world = world_of(*(candidate(f"w{i}", slot=i, fresh=True, commits=0) for i in range(3)))
    assert world.source == 0
    assert [m.copy_state for m in world.members] == [False, True, True]


def test_newcomers_that_have_loaded_the_same_copy_nothing() -> None:
    def alike(worker: str, slot: int, restored: str, **state: object) -> Candidate:
        return candidate(worker, slot=slot, fresh=True, restored=restored, **state)

    def copies(*candidates: Candidate) -> list[bool]:
        return [member.copy_state for member in world_of(*candidates).members]

    assert copies(alike("w1", 0, "x"), alike("w2", 1, "x")) == [False, False]
    assert copies(alike("w1", 0, "x"), alike("w2", 1, "y")) == [False, True]
    assert copies(alike("w1", 0, ""), alike("w2", 1, "")) == [False, True]
    assert copies(alike("w1", 0, "x"), alike("w2", 1, "x", commits=4)) == [False, True]
    assert copies(alike("w1", 0, "x"), alike("w2", 1, "x", clean=False)) == [False, True]
    survivor = candidate("w1", restored="x")
    assert copies(survivor, alike("w2", 1, "x")) == [False, True]


def test_of_equal_commits_a_survivor_is_preferred_to_a_newcomer() -> None:
    world = world_of(candidate("w1", fresh=True), candidate("w2", slot=1))
    assert world.source == 1


def test_the_pace_is_not_fooled_by_reports_that_come_in_bursts() -> None:
    roster = Roster()
    for tick in range(200):
        at = tick * 0.05
        roster._note_commits(tick, at)
        roster._note_commits(tick + 1, at + 0.002)
    assert 15 < roster.pace < 25
