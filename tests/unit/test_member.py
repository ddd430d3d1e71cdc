"""A worker's side of membership."""

from __future__ import annotations

from stoker.train.member import MemberCore
from stoker.wire.job import Member, Order, WorldView


def world(generation: int, *workers: str) -> WorldView:
    members = tuple(Member(w, "n", i, i, len(workers), 0, i > 0) for i, w in enumerate(workers))
    return WorldView(generation, len(members), members, 0, 0, "127.0.0.1:1", all_receive=True)


def parked(generation: int = 1) -> MemberCore:
    core = MemberCore("w0")
    core.on_order(Order(generation=generation))
    core.park(commits=0, clean=True, store="h:1")
    return core


def test_it_acknowledges_and_enters() -> None:
    core = parked()
    assert core.state().generation == 1
    core.on_order(Order(generation=1, world=world(1, "w0", "w1")))
    offered = core.offered_world()
    assert offered is not None
    core.enter(offered)
    core.synced(5)
    assert (core.state().phase, core.state().commits, core.state().fresh) == ("member", 5, False)


def test_a_world_without_it_or_of_another_generation_is_not_offered() -> None:
    core = parked()
    core.on_order(Order(generation=1, world=world(1, "w1")))
    assert core.offered_world() is None
    core.on_order(Order(generation=3, world=world(2, "w0")))
    assert core.offered_world() is None


def test_a_world_that_it_has_left_is_not_offered_again() -> None:
    core = parked()
    core.on_order(Order(generation=1, world=world(1, "w0")))
    core.enter(core.order.world or world(1, "w0"))
    core.leave(clean=True)
    assert core.state().left == 1
    assert core.offered_world() is None


def test_an_older_order_is_refused() -> None:
    core = parked(4)
    core.on_order(Order(generation=3, world=world(3, "w0")))
    assert core.order.generation == 4


def test_interruptions() -> None:
    core = parked()
    core.enter(world(1, "w0"))
    assert core.interruption() == "no"
    core.on_order(Order(generation=2, stop_at_commit=2))
    assert core.interruption() == "at-commit"
    core.commit()
    assert core.interruption() == "at-commit"
    core.commit()
    assert core.interruption() == "now"
    core.on_order(Order(generation=3))
    assert core.interruption() == "now"
    assert core.acknowledged == 1, "a member acknowledges nothing before it has left"
    core.leave(clean=False)
    assert (core.acknowledged, core.clean) == (3, False)


def test_a_finished_worker_leaves_at_once() -> None:
    core = parked()
    core.enter(world(1, "w0"))
    core.finish()
    core.on_order(Order(generation=2, stop_at_commit=99))
    assert core.interruption() == "now"
    core.on_order(Order(generation=2, released=True))
    assert core.released


def test_what_it_was_loaded_from_counts_until_it_has_another_state() -> None:
    core = MemberCore("w0")
    core.loaded(7, "x")
    core.park(commits=core.commits, clean=True, store="h:1")
    assert (core.state().commits, core.state().restored, core.state().fresh) == (7, "x", True)
    core.loaded(9, "")  # a copy came, and the world broke before it was there
    core.leave(clean=True)
    assert (core.state().commits, core.state().restored, core.state().fresh) == (9, "", True)
    core.loaded(7, "x")
    core.synced(9)
    assert (core.state().commits, core.state().restored, core.state().fresh) == (9, "", False)
