"""The node check's plan: groups, culprits, stragglers, nodes that vanish."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.job.health_check import MAX_ROUNDS, RESULT_GRACE_S, TRIES, CheckEffect, NodeCheck, Verdict
from stoker.wire.health import CheckGroup, CheckResult

TIMEOUT_S = 20.0
Answer = Callable[[CheckGroup, str], CheckResult | None]


def fine(matmul_s: float = 0.01, allreduce_s: float = 0.02) -> CheckResult:
    return CheckResult(ok=True, matmul_s=matmul_s, allreduce_s=allreduce_s)


def lonely(matmul_s: float = 0.01) -> CheckResult:
    return CheckResult(ok=False, matmul_s=matmul_s, why="no peer came", stage="meet")


class Trial:
    """Plays the nodes: `answer` says what each reports; None: nothing."""

    def __init__(self, answer: Answer, check: NodeCheck | None = None) -> None:
        self.check = check or NodeCheck(timeout_s=TIMEOUT_S)
        self.answer = answer
        self.now = 0.0
        self.groups: list[CheckGroup] = []
        self.verdicts: dict[str, Verdict] = {}

    def take(self, effects: list[CheckEffect]) -> list[CheckGroup]:
        for effect in effects:
            if isinstance(effect, Verdict):
                assert effect.node not in self.verdicts, "one verdict per node"
                assert effect.why
                self.verdicts[effect.node] = effect
        fresh = [effect for effect in effects if isinstance(effect, CheckGroup)]
        self.groups += fresh
        return fresh

    def run(self, nodes: list[str]) -> dict[str, str]:
        waiting = self.take(self.check.begin(nodes, self.now))
        while self.check.checking:
            later = self.now + TIMEOUT_S + RESULT_GRACE_S
            fresh: list[CheckGroup] = []
            for group in waiting:
                for node in group.nodes:
                    said = self.answer(group, node)
                    if said is not None:
                        fresh += self.take(self.check.result(node, group.group, said, self.now))
            if not fresh:
                self.now = later
                fresh = self.take(self.check.tick(self.now))
            waiting = fresh
            assert self.now < 100 * TIMEOUT_S, "the check never ends"
        return {node: verdict.kind for node, verdict in self.verdicts.items()}

    def grouping(self) -> list[tuple[int, tuple[str, ...]]]:
        return [(group.round, group.nodes) for group in self.groups]


def cut_off(*broken: str) -> Answer:
    """These nodes' network is broken: every group with one of them fails for all its nodes."""
    return lambda group, _: lonely() if len(group.nodes) > 1 and set(broken) & set(group.nodes) else fine()


def test_healthy_nodes_are_cleared_in_one_round() -> None:
    trial = Trial(cut_off())
    assert trial.run(["a", "b", "c", "d", "e"]) == dict.fromkeys("abcde", "good")
    assert trial.grouping() == [(0, ("a", "b")), (0, ("c", "d", "e"))]


def test_a_single_node_checks_alone() -> None:
    trial = Trial(cut_off())
    assert trial.run(["a"]) == {"a": "good"}
    assert trial.grouping() == [(0, ("a",))]


def test_the_culprit_of_a_failed_pair_is_found_with_nodes_known_good() -> None:
    trial = Trial(cut_off("c"))
    kinds = trial.run(["a", "b", "c", "d"])
    assert kinds == {"a": "good", "b": "good", "c": "faulty", "d": "good"}
    assert trial.grouping() == [(0, ("a", "b")), (0, ("c", "d")), (1, ("a", "c")), (1, ("b", "d"))]
    assert "d" in trial.verdicts["c"].why
    assert "which is known good" in trial.verdicts["c"].why


def test_a_node_whose_own_device_fails_is_faulty_at_once_and_its_partner_is_not_suspected() -> None:
    def answer(group: CheckGroup, node: str) -> CheckResult:
        if node == "b":
            return CheckResult(ok=False, why="CUDA error: an illegal memory access", stage="matmul")
        return lonely() if "b" in group.nodes else fine()

    trial = Trial(answer)
    assert trial.run(["a", "b"]) == {"a": "good", "b": "faulty"}
    assert trial.verdicts["b"].why == "CUDA error: an illegal memory access"
    assert trial.grouping() == [(0, ("a", "b")), (1, ("a",))]


def test_a_node_that_says_nothing_is_found_after_its_time_is_over() -> None:
    trial = Trial(lambda group, node: None if node == "b" else cut_off("b")(group, node))
    assert trial.run(["a", "b", "c"]) == {"a": "good", "b": "faulty", "c": "good"}
    assert "gave no result within 25 s" in trial.verdicts["b"].why


def test_of_two_that_cannot_reach_each_other_the_oldest_stays() -> None:
    trial = Trial(cut_off("b"))
    assert trial.run(["a", "b"]) == {"a": "good", "b": "faulty"}
    assert "works alone, and the oldest such node stays" in trial.verdicts["a"].why
    assert "no node known good" in trial.verdicts["b"].why
    assert trial.grouping() == [(0, ("a", "b")), (1, ("a",)), (1, ("b",))]


def test_the_culprit_among_three_is_found() -> None:
    for broken in "abc":
        kinds = Trial(cut_off(broken)).run(["a", "b", "c"])
        assert kinds == {node: "faulty" if node == broken else "good" for node in "abc"}


def test_a_slow_device_is_a_straggler_only_when_it_is_slow_twice() -> None:
    def slow_in(rounds: set[int]) -> Answer:
        return lambda group, node: fine(0.03 if node == "c" and group.round in rounds else 0.01)

    hiccup = Trial(slow_in({0}))
    assert set(hiccup.run(["a", "b", "c", "d"]).values()) == {"good"}
    assert hiccup.grouping()[2:] == [(1, ("a", "c"))], "tried again with another partner"

    lasting = Trial(slow_in({0, 1}))
    assert lasting.run(["a", "b", "c", "d"]) == {"a": "good", "b": "good", "c": "straggler", "d": "good"}
    assert "3.0 x the median of 10.0 ms of 4 nodes" in lasting.verdicts["c"].why


def test_two_nodes_are_not_compared() -> None:
    trial = Trial(lambda _, node: fine(0.09 if node == "b" else 0.01))
    assert trial.run(["a", "b"]) == {"a": "good", "b": "good"}


def test_a_slow_link_is_told_from_its_partners() -> None:
    trial = Trial(lambda group, _: fine(0.01, 0.1 if "f" in group.nodes else 0.02))
    kinds = trial.run(list("abcdefgh"))
    assert kinds == {node: "straggler" if node == "f" else "good" for node in "abcdefgh"}
    assert trial.verdicts["f"].why.startswith("an all-reduce takes it 100.0 ms")


def test_a_group_of_three_takes_longer_and_is_not_slow() -> None:
    trial = Trial(lambda group, _: fine(0.01, 0.02 if len(group.nodes) == 2 else 0.02 * 4 / 3))
    assert set(trial.run(list("abcdefg")).values()) == {"good"}
    assert len(trial.groups) == 3


def test_a_newcomer_is_compared_with_those_measured_before() -> None:
    trial = Trial(lambda _, node: fine(0.05 if node == "late" else 0.01))
    trial.run(["a", "b", "c"])
    assert trial.run(["late"])["late"] == "straggler"
    assert trial.grouping()[-2:] == [(0, ("late",)), (1, ("late",))], "alone, and once more"


def test_newcomers_are_checked_while_others_are() -> None:
    check = NodeCheck(timeout_s=TIMEOUT_S)
    (first,) = check.begin(["a", "b"], 0.0)
    (second,) = check.begin(["a", "c"], 1.0)
    assert isinstance(first, CheckGroup)
    assert isinstance(second, CheckGroup)
    assert (first.nodes, second.nodes) == (("a", "b"), ("c",))
    (verdict,) = check.result("c", second.group, fine(), 2.0)
    assert isinstance(verdict, Verdict)
    assert verdict.node == "c"
    assert check.checking == ("a", "b")


def test_results_of_old_groups_and_doubled_ones_change_nothing() -> None:
    check = NodeCheck(timeout_s=TIMEOUT_S)
    (group,) = check.begin(["a", "b"], 0.0)
    assert isinstance(group, CheckGroup)
    assert check.result("a", group.group + 1, fine(), 1.0) == []
    assert check.result("x", group.group, fine(), 1.0) == []
    assert check.result("a", group.group, fine(), 1.0) == []
    assert check.result("a", group.group, lonely(), 1.0) == []
    verdicts = check.result("b", group.group, fine(), 1.0)
    assert [v.kind for v in verdicts if isinstance(v, Verdict)] == ["good", "good"]
    assert check.result("b", group.group, lonely(), 1.0) == []


def test_the_partner_of_a_node_that_vanishes_is_checked_without_it() -> None:
    check = NodeCheck(timeout_s=TIMEOUT_S)
    (group,) = check.begin(["a", "b"], 0.0)
    assert isinstance(group, CheckGroup)
    check.result("a", group.group, lonely(), 1.0)
    (alone,) = check.gone("b", 2.0)
    assert isinstance(alone, CheckGroup)
    assert alone.nodes == ("a",)
    (verdict,) = check.result("a", alone.group, fine(), 3.0)
    assert verdict == Verdict("a", "good", "its check passed")


def test_a_group_that_fails_while_a_stream_is_broken_is_tried_again_a_few_times() -> None:
    check = NodeCheck(timeout_s=TIMEOUT_S)
    (group,) = check.begin(["a", "b"], 0.0)
    for _ in range(TRIES - 1):
        assert isinstance(group, CheckGroup)
        assert group.nodes == ("a", "b")
        check.disturb("b")
        assert check.result("a", group.group, lonely(), 1.0) == []
        (group,) = check.result("b", group.group, lonely(), 1.0)
    assert isinstance(group, CheckGroup)
    check.disturb("b")
    check.result("a", group.group, lonely(), 1.0)
    alone = check.result("b", group.group, lonely(), 1.0)
    assert [effect.nodes for effect in alone if isinstance(effect, CheckGroup)] == [("a",), ("b",)]


def test_a_broken_stream_excuses_no_broken_device_and_spoils_no_check_that_passes() -> None:
    check = NodeCheck(timeout_s=TIMEOUT_S)
    (group,) = check.begin(["a"], 0.0)
    assert isinstance(group, CheckGroup)
    check.disturb("a")
    (verdict,) = check.result("a", group.group, CheckResult(ok=False, why="no device", stage="start"), 1.0)
    assert verdict == Verdict("a", "faulty", "no device")
    (group,) = check.begin(["a", "b"], 2.0)
    assert isinstance(group, CheckGroup)
    check.disturb("a")
    check.result("a", group.group, fine(), 3.0)
    verdicts = check.result("b", group.group, fine(), 3.0)
    assert [v.kind for v in verdicts if isinstance(v, Verdict)] == ["good", "good"]


def test_a_stream_that_breaks_after_the_result_is_there_excuses_nothing() -> None:
    check = NodeCheck(timeout_s=TIMEOUT_S)
    (group,) = check.begin(["a", "b"], 0.0)
    assert isinstance(group, CheckGroup)
    check.result("a", group.group, lonely(), 1.0)
    check.disturb("a")
    alone = check.result("b", group.group, lonely(), 1.0)
    assert [effect.nodes for effect in alone if isinstance(effect, CheckGroup)] == [("a",), ("b",)]


def test_two_of_three_go_on_together() -> None:
    check = NodeCheck(timeout_s=TIMEOUT_S)
    check.begin(["a", "b", "c"], 0.0)
    (group,) = check.gone("b", 1.0)
    assert isinstance(group, CheckGroup)
    assert group.nodes == ("a", "c")
    assert check.gone("b", 1.0) == []


@settings(deadline=None)
@given(
    count=st.integers(1, 12),
    faults=st.dictionaries(st.integers(0, 11), st.sampled_from(["device", "network", "silent"]), max_size=8),
    slow=st.integers(0, 11),
    seed=st.integers(0, 2**32),
)
@example(count=4, faults={2: "device"}, slow=1, seed=0)
@example(count=5, faults={0: "silent", 2: "device"}, slow=4, seed=0)
def test_whatever_is_broken_every_node_gets_its_verdict(
    count: int, faults: dict[int, str], slow: int, seed: int
) -> None:
    nodes = [f"n{i}" for i in range(count)]
    fault = {f"n{i}": kind for i, kind in faults.items() if i < count}
    rng = Rng(seed)

    def answer(group: CheckGroup, node: str) -> CheckResult | None:
        kind = fault.get(node)
        if kind == "device":
            return CheckResult(ok=False, why="no device", stage="start")
        if kind == "silent":
            return None
        matmul_s = 0.01 * rng.uniform(0.9, 1.1) * (4 if node == f"n{slow}" else 1)
        if len(group.nodes) > 1 and any(n in fault for n in group.nodes):
            return lonely(matmul_s)
        return fine(matmul_s)

    trial = Trial(answer)
    kinds = trial.run(nodes)
    assert set(kinds) == set(nodes)
    healthy = [node for node in nodes if node not in fault]
    for node in nodes:
        if fault.get(node) in ("device", "silent"):
            assert kinds[node] == "faulty"
        elif node not in fault and len(healthy) > 1:
            slow_one = node == f"n{slow}" and len(healthy) >= 3
            assert kinds[node] == ("straggler" if slow_one else "good"), trial.verdicts[node].why
        elif node in fault and len(healthy) > 1:
            assert kinds[node] == "faulty", trial.verdicts[node].why
    assert max(group.round for group in trial.groups) <= MAX_ROUNDS
    cleared = [kind for kind in kinds.values() if kind != "faulty"]
    assert bool(cleared) == any(kind not in ("device", "silent") for kind in (fault.get(n) for n in nodes))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nodes_may_vanish_and_streams_break_at_any_time(seed: int) -> None:
    rng = Rng(seed)
    check = NodeCheck(timeout_s=TIMEOUT_S)
    nodes = [f"n{i}" for i in range(1 + rng.below(7))]
    open_groups: dict[str, CheckGroup] = {}
    decided: set[str] = set()
    gone: set[str] = set()
    now = 0.0

    def take(effects: list[CheckEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Verdict):
                assert effect.node not in decided | gone
                decided.add(effect.node)
                open_groups.pop(effect.node, None)
            else:
                assert not set(effect.nodes) & (gone | decided)
                open_groups.update(dict.fromkeys(effect.nodes, effect))

    take(check.begin(nodes, now))
    for _ in range(200):
        if not check.checking:
            break
        now += rng.choice([0.0, 1.0, TIMEOUT_S])
        action = rng.choice(["result", "result", "result", "result", "gone", "disturb", "tick"])
        node = rng.choice(check.checking)
        if action == "result" and node in open_groups:
            said = rng.choice([fine(), fine(), lonely(), fine(0.1)])
            take(check.result(node, open_groups[node].group, said, now))
        elif action == "gone":
            gone.add(node)
            open_groups.pop(node, None)
            take(check.gone(node, now))
        elif action == "disturb":
            check.disturb(node)
        else:
            take(check.tick(now))
    while check.checking and now < 1e5:
        now += TIMEOUT_S + RESULT_GRACE_S
        take(check.tick(now))
    assert decided | gone == set(nodes)


@pytest.mark.parametrize("count", [1000])
def test_a_thousand_nodes_with_some_broken(count: int) -> None:
    nodes = [f"n{i}" for i in range(count)]
    broken = {f"n{i}" for i in range(0, count, 37)}
    trial = Trial(cut_off(*broken))
    kinds = trial.run(nodes)
    assert {node for node, kind in kinds.items() if kind == "faulty"} == broken
    assert max(group.round for group in trial.groups) == 1
