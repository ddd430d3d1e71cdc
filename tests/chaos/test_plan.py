"""The chaos runner's pure parts: the plan, and what the event log has to say."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.wire.control import JobEvent
from tests.chaos.check import pause_s, untold
from tests.chaos.inject import Injected
from tests.chaos.job import TOLD, Event
from tests.chaos.plan import (
    DURATIONS,
    KINDS,
    MASTER,
    MOST_DISTURBED,
    NOWHERE,
    ON_MASTER,
    RECOVERY_S,
    WITH_ETCD,
    WITH_FILE,
    Fault,
    Ground,
    Kind,
    make_plan,
)
from tests.chaos.run import GROUND, GROUND_ETCD

SEEDS = st.integers(min_value=0, max_value=1 << 62)


def test_a_plan_is_a_function_of_its_seed() -> None:
    assert make_plan(7, 600) == make_plan(7, 600)
    assert make_plan(7, 600) != make_plan(8, 600)
    assert make_plan(7, 600)[:5] == make_plan(7, 900)[:5]


def disturbing(plan: tuple[Fault, ...], at_s: float) -> list[Fault]:
    """Faults that last at this time or have not been recovered from."""
    return [f for f in plan if f.at_s <= at_s < f.end_s + RECOVERY_S and f.kind not in NOWHERE]


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.integers(3, 6))
def test_a_plan_leaves_enough_hosts_in_peace(seed: int, hosts: int) -> None:
    plan = make_plan(seed, 300, ground=Ground(hosts))
    assert [f.at_s for f in plan] == sorted(f.at_s for f in plan)
    assert all(f.end_s <= 300 for f in plan)
    for fault in plan:
        assert set(fault.hosts) <= set(range(1, hosts + 1))
        assert MASTER not in fault.hosts or fault.kind in ON_MASTER
        ranges = DURATIONS.get(fault.kind, ((0.0, 0.0),))
        assert any(low - 0.1 <= fault.duration_s <= high + 0.1 for low, high in ranges)
        at_the_time = disturbing(plan, fault.at_s)
        if any(f.kind == "cut-master" for f in at_the_time):
            assert len(at_the_time) == 1
            continue
        disturbed = [number for f in at_the_time for number in f.hosts]
        assert len(disturbed) == len(set(disturbed)) <= MOST_DISTURBED


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_etcd_keeps_its_quorum(seed: int) -> None:
    for fault in (plan := make_plan(seed, 300, ground=GROUND_ETCD, kinds=WITH_ETCD)):
        links = [
            f for f in disturbing(plan, fault.at_s) if f.kind in ("kill-host", "cut", "split", "partition")
        ]
        apart = [set(f.hosts) & set(GROUND_ETCD.quorum) for f in links]
        assert sum(bool(members) for members in apart) <= 1


@pytest.mark.parametrize(("ground", "kinds"), [(GROUND, WITH_FILE), (GROUND_ETCD, WITH_ETCD)])
def test_a_long_plan_has_every_kind(ground: Ground, kinds: tuple[Kind, ...]) -> None:
    for seed in range(50):
        assert {f.kind for f in make_plan(seed, 600, ground=ground, kinds=kinds)} == set(kinds)


_numbers = itertools.count(1)


def event(wall_s: float, kind: str, host: int = 0) -> Event:
    return Event(JobEvent(seq=next(_numbers), wall_s=wall_s, kind=kind, why="because", details={}), host)


def test_what_the_event_log_does_not_tell_is_named() -> None:
    fault = Fault(10.0, "partition", (2, 3), 9.0)
    injected = Injected(fault, wall_s=1000.0, lost=frozenset({2, 3}))
    told = [event(1004, "node-lost", 2), event(1004, "node-lost", 3), event(1011, "node-joined", 2)]
    assert untold(injected, told, 30.0) == ["node-joined of h3"]
    assert untold(injected, [*told, event(1012, "node-joined", 3)], 30.0) == []
    assert untold(injected, [*told, event(999, "node-joined", 3)], 30.0) == ["node-joined of h3"], "too early"
    assert untold(injected, [*told, event(1100, "node-joined", 3)], 30.0) == ["node-joined of h3"], "too late"


def test_a_node_that_was_silent_and_waited_for_need_not_join_again() -> None:
    injected = Injected(Fault(10.0, "cut-master", (2, 3), 9.0), wall_s=1000.0, lost=frozenset({2, 3}))
    told = [event(1004, "node-silent", 2), event(1004, "node-silent", 3)]
    assert untold(injected, told, 30.0) == []
    assert untold(injected, [*told, event(1007, "node-lost", 3)], 30.0) == ["node-joined of h3"]
    assert untold(injected, told[:1], 30.0)


def test_a_partition_loses_the_side_without_the_quorum() -> None:
    injected = Injected(
        Fault(10.0, "partition", (2, 3), 9.0), 1000.0, lost=frozenset({1, 4}), takes_master=True
    )
    told = [event(1004, kind, host) for kind in ("node-lost", "node-joined") for host in (1, 4)]
    assert untold(injected, told, 30.0) == ["master-restored"]


def test_a_short_break_may_pass_without_a_word() -> None:
    short = Injected(Fault(10.0, "cut", (2,), 2.0), 1000.0, lost=frozenset({2}))
    assert untold(short, [], 30.0) == []


@pytest.mark.parametrize("kind", ["cut", "partition", "stop-agent"])
def test_a_node_that_is_back_soon_after_a_new_master_need_not_have_been_lost(kind: Kind) -> None:
    injected = Injected(Fault(1.0, kind, (2,), 8.0), wall_s=1000.0, lost=frozenset({2}))
    assert untold(injected, [], 30.0, [1007.0]) == []
    for too_early in (999.0, 1002.0):
        assert untold(injected, [], 30.0, [too_early])
    killed = Injected(Fault(1.0, "kill-agent", (2,), 8.0), wall_s=1000.0, lost=frozenset({2}))
    assert untold(killed, [], 30.0, [1007.0]), "its stream was closed"


def test_a_reset_of_the_masters_host_cuts_the_others_off() -> None:
    injected = Injected(Fault(1.0, "reset", (2,), 0.0), wall_s=1000.0, cut_off=frozenset({1, 3}))
    told = [event(1000, kind, host) for kind in ("node-cut", "node-back") for host in (1, 3)]
    assert untold(injected, told, 30.0) == []
    assert untold(injected, told[:3], 30.0) == ["node-joined or node-back of h3"]
    assert untold(injected, [], 30.0, [1004.0]) == [], "there was no master that could tell"
    assert untold(injected, [], 30.0, [999.0, 1010.0])


def test_two_hosts_that_never_talked_need_not_notice_that_they_cannot() -> None:
    def log(*ring: int) -> list[Event]:
        started = [
            Event(
                JobEvent(next(_numbers), 1.0, "worker-started", "", {"worker": f"w{n}", "node": f"n{n}"}), n
            )
            for n in (1, 2, 3, 4)
        ]
        workers = [f"w{n}" for n in ring]
        return [*started, Event(JobEvent(next(_numbers), 2.0, "world", "", {"workers": workers}), 0)]

    split = Injected(Fault(10.0, "split", (2, 3), 9.0), wall_s=1000.0)
    assert untold(split, log(1, 2, 4, 3), 30.0) == []
    for ring in ((1, 2, 3, 4), (2, 1, 4, 3), (2, 3, 1)):
        assert untold(split, log(*ring), 30.0) == ["generation", "world"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in TOLD])
def test_an_empty_event_log_tells_nothing(kind: Kind) -> None:
    hit = frozenset({2})
    assert untold(Injected(Fault(1.0, kind, (2,), 8.0), 1000.0, lost=hit, cut_off=hit), [], 30.0)


def test_the_longest_pause_that_touches_a_fault() -> None:
    injected = Injected(Fault(1.0, "cut", (2,), 3.0), wall_s=100.0)
    assert pause_s(injected, [50, 90, 99, 102, 102.5, 109, 120]) == 6.5
