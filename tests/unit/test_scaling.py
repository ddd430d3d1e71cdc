"""The auto-scaler over synthetic runs: it stays within its limits, comes to rest, and rests at the right size."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.errors import ConfigError
from stoker.job.scaling import AutoScaler, Mode, Policy
from stoker.job.scaling_advice import Advice
from stoker.job.scaling_model import Curve, Meter

TICK_S = 10.0
LASTS_S = 1800.0


@dataclass
class Run:
    """A run whose step time is a curve with noise, and a master that carries out what the scaler decides."""

    scaler: AutoScaler
    curve: Curve
    rng: Rng
    noise: float = 0.0
    """Step times of windows scatter by up to this share."""
    outliers: float = 0.0
    """Share of windows with something else in them, like an evaluation."""
    pause_s: float = 3.0
    available: int = 1000
    nodes: int = 1
    now: float = 0.0
    generation: int = 1
    commits: float = 0.0
    visited: list[int] = field(default_factory=list)
    said: list[Advice] = field(default_factory=list)

    def tick(self) -> Advice:
        step_s = self.curve.step_s(self.nodes) * (1 + self.noise * self.rng.uniform(-1, 1))
        if self.rng.chance(self.outliers):
            step_s *= self.rng.uniform(1.5, 4)
        self.now += TICK_S
        self.commits += TICK_S / step_s
        self.note()
        advice = self.scaler.decide(nodes=self.nodes, available=self.available, now=self.now)
        self.said.append(advice)
        if advice.change:
            self.become(advice.nodes)
        return advice

    def become(self, nodes: int) -> None:
        self.visited.append(nodes)
        self.nodes, self.generation, self.now = nodes, self.generation + 1, self.now + self.pause_s
        self.note()

    def note(self) -> None:
        self.scaler.note(
            generation=self.generation, nodes=self.nodes, commits=int(self.commits), now=self.now
        )


def a_run(policy: Policy, curve: Curve, seed: int = 1, **more: float) -> Run:
    run = Run(AutoScaler(policy, Meter(window_s=TICK_S)), curve, Rng(seed), **more)  # type: ignore[arg-type]
    run.nodes = run.scaler.wanted
    run.note()
    return run


def best_size(curve: Curve, policy: Policy, target: float, available: int = 1000) -> int:
    """By trying each: the largest size all steps up to which are worth it."""
    sizes = list(policy.limits(available).sizes())
    best = sizes[0]
    for before, after in pairwise(sizes):
        if curve.efficiency(before, after) < target:
            return best
        best = after
    return best


curves = st.builds(
    Curve,
    shared_s=st.floats(0.05, 0.2),
    fixed_s=st.floats(0.0, 0.05),
    each_s=st.floats(0.0, 0.005),
)
policies = st.builds(
    lambda low, more, unit, target: Policy("apply", low * unit, (low + more) * unit, unit, target),
    st.integers(1, 4),
    st.integers(0, 30),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.2, 0.5, 0.8]),
)


@given(policies, curves, st.integers(0, 200), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_every_size_is_within_the_limits_and_a_multiple_of_the_unit(
    policy: Policy, curve: Curve, available: int, seed: int
) -> None:
    run = a_run(policy, curve, seed, noise=0.1, outliers=0.1)
    rng = Rng(seed + 1)
    for _ in range(80):
        run.available = available if rng.chance(0.8) else rng.below(available + 1)
        run.tick()
    for nodes in run.visited:
        assert policy.min_nodes <= nodes <= policy.max_nodes
        assert nodes % policy.unit == 0
    assert max(run.visited, default=0) <= max(available, policy.min_nodes)
    assert all(advice.why for advice in run.said)


@given(policies, curves, st.integers(0, 2**32), st.floats(0, 0.1), st.floats(0, 0.15))
@settings(max_examples=40, deadline=None)
def test_noise_that_does_not_change_moves_the_world_a_few_times_and_then_no_more(
    policy: Policy, curve: Curve, seed: int, noise: float, outliers: float
) -> None:
    run = a_run(policy, curve, seed, noise=noise, outliers=outliers)
    for _ in range(200):
        run.tick()
    settled = len(run.visited)
    for _ in range(100):
        run.tick()
    doublings = (policy.max_nodes // policy.min_nodes).bit_length()
    assert len(run.visited) <= 2 * doublings + 3
    assert len(run.visited) <= settled + 2
    assert len(run.visited) <= 1 + len(set(run.visited)) * 2, "no size is come back to again and again"


@given(policies, curves, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
@example(Policy("apply", 1, 64, 1, 0.5), Curve(0.1, 0.0, 0.0), 0)
def test_it_comes_to_the_best_size_in_a_few_changes(policy: Policy, curve: Curve, seed: int) -> None:
    run = a_run(policy, curve, seed)
    for _ in range(150):
        run.tick()
    best = best_size(curve, policy, policy.target_efficiency)
    decisions = [a.why for a in run.said if a.change]
    if run.nodes <= best:  # changes of less than a fifth are not made
        assert best - policy.unit < run.nodes * 1.25, decisions
    elif (
        run.nodes > best * 1.5
    ):  # nor is a world made smaller before it is certain that its last nodes are not worth it
        assert curve.efficiency(best, run.nodes) > 0.7 * policy.target_efficiency, decisions
    doublings = (policy.max_nodes // policy.min_nodes).bit_length()
    assert len(run.visited) <= doublings + 3


reports = st.tuples(
    st.integers(0, 3), st.integers(0, 9), st.integers(0, 5000), st.floats(0, 200), st.integers(0, 12)
)


@given(st.sampled_from(["recommend", "apply"]), st.integers(1, 3), st.lists(reports, max_size=80))
@settings(max_examples=100, deadline=None)
def test_whatever_is_reported_it_answers_with_a_size_that_is_allowed(
    mode: Mode, unit: int, notes: list[tuple[int, int, int, float, int]]
) -> None:
    scaler = AutoScaler(Policy(mode, 2, 8, unit, cooldown_s=20), Meter(window_s=1, warmup_steps=0))
    now, commits = 0.0, 0
    for generation, nodes, made, passed, available in notes:
        now, commits = now + passed, commits + made
        scaler.note(generation=generation // 2, nodes=nodes, commits=commits, now=now)
        advice = scaler.decide(nodes=nodes, available=available, now=now)
        if advice.change or mode == "recommend":
            assert advice.nodes == nodes or advice.nodes in scaler.policy.limits(99).every_size()
        assert mode == "apply" or not advice.change


def story(run: Run, ticks: int) -> list[str]:
    """Each change, and what is said at the end."""
    said = [run.tick() for _ in range(ticks)]
    return [f"{a.kind} {a.nodes}: {a.why}" for a in [*(a for a in said if a.change), said[-1]]]


def test_a_run_that_scales_well_is_doubled_until_nodes_no_longer_count() -> None:
    run = a_run(Policy("apply", 2, 32), Curve(shared_s=0.2, fixed_s=0.01, each_s=0.0))
    assert story(run, 60) == [
        "explore 4: only 2 nodes measured so far and 2 more stand by: try 4 for a while",
        "grow 8: 4 → 8 nodes, 1.72 times as fast: each node added would do 72% of a node's work, 50% is asked for",
        "grow 16: 8 → 16 nodes, 1.54 times as fast: each node added would do 54% of a node's work, 50% is asked for",
        "keep 16: keep 16 nodes: 19 is too little a change to be worth a pause",
    ]


def test_a_larger_world_that_did_not_help_is_taken_back_and_not_tried_again() -> None:
    run = a_run(Policy("apply", 2, 16, 2), Curve(shared_s=0.01, fixed_s=0.05, each_s=0.01))
    assert story(run, 60) == [
        "explore 4: only 2 nodes measured so far and 2 more stand by: try 4 for a while",
        "undo 2: 4 nodes taken back: measured 0.79 times as fast as 2, each node added does -21% of a node's work, "
        "50% is asked for; not tried again until conditions change",
        "keep 2: keep 2: 4 was tried and is not worth it",
    ]
    assert story(run, 300)[:-1] == []


def test_when_conditions_change_it_measures_and_tries_anew() -> None:
    run = a_run(Policy("apply", 1, 8), Curve(shared_s=0.01, fixed_s=0.1, each_s=0.0))
    story(run, 40)
    assert run.visited == [2, 1]
    run.curve = Curve(shared_s=0.4, fixed_s=0.01, each_s=0.0)  # say, a larger model from the second phase on
    assert [line.split(":")[0] for line in story(run, 80)] == ["explore 2", "grow 4", "grow 8", "keep 8"]


class Cliff(Curve):
    """What no curve of the model is: 6 nodes are as fast as 8, 4 are half as fast."""

    def step_s(self, nodes: int) -> float:
        return 0.1 if nodes >= 6 else 0.2


def test_a_smaller_world_that_cost_too_much_is_undone() -> None:
    run = a_run(Policy("apply", 4, 8), Cliff(0.0, 0.0, 0.0))
    run.become(8)
    run.scaler.wanted = 8
    for _ in range(10):
        run.tick()
    run.become(6)  # two nodes fail for good
    run.available = 6
    for _ in range(5):
        run.tick()
    assert story(run, 100) == [
        "shrink 4: 6 → 4 nodes, 1.00 times as fast: the last 2 nodes do 0% of a node's work, 50% is asked for",
        "undo 6: back to 6 nodes: each one given up did 200% of a node's work, 50% is asked for; 4 is not tried again "
        "until conditions change",
        "keep 6: keep 6 nodes: no more stand by",
    ]


def test_nodes_that_fail_and_come_back_are_not_the_scalers_doing() -> None:
    run = a_run(Policy("apply", 2, 4), Curve(shared_s=0.2, fixed_s=0.01, each_s=0.0))
    story(run, 20)
    assert (run.nodes, run.scaler.wanted) == (4, 4)
    run.available = 3
    run.become(3)
    assert [a.change for a in (run.tick() for _ in range(20))] == [False] * 20
    assert run.scaler.wanted == 4, "the fourth is taken in again when it is back"


def test_an_order_that_is_not_carried_out_is_given_up() -> None:
    run = a_run(Policy("apply", 1, 4), Curve(shared_s=0.2, fixed_s=0.01, each_s=0.0))
    for _ in range(10):
        run.now += TICK_S
        run.commits += 100
        run.note()
    first = run.scaler.decide(nodes=1, available=4, now=run.now)
    waiting = run.scaler.decide(nodes=1, available=4, now=run.now + 1)
    later = run.scaler.decide(nodes=1, available=1, now=run.now + 61)
    assert [(a.kind, a.nodes, a.change) for a in (first, waiting, later)] == [
        ("explore", 2, True),
        ("wait", 2, False),
        ("keep", 1, False),
    ]
    assert run.scaler.wanted == 1


def test_recommend_only_advises() -> None:
    run = a_run(Policy("recommend", 1, 8), Curve(shared_s=0.2, fixed_s=0.01, each_s=0.0))
    assert story(run, 10) == ["explore 2: only 1 node measured so far and 1 more stand by: try 2 for a while"]
    run.become(2)  # the user followed
    (last,) = story(run, 10)
    assert last.startswith("grow 4: 2 → 4 nodes, 1.8")
    off = a_run(Policy("off", 1, 8), Curve(shared_s=0.2, fixed_s=0.01, each_s=0.0))
    assert story(off, 10) == ["off 1: auto-scale is off"]


def test_a_run_that_has_only_begun_is_left_alone() -> None:
    policy = Policy("recommend", 1, 8)
    run = Run(AutoScaler(policy, Meter(window_s=2.0)), Curve(shared_s=0.2, fixed_s=0.0, each_s=0.0), Rng(1))
    run.note()
    for _ in range(6):
        run.now += 2.0
        run.commits += 10
        run.note()
    advice = run.scaler.decide(nodes=1, available=8, now=run.now)
    assert (advice.nodes, advice.why) == (
        1,
        "keep 1 node: trying 2 costs a pause of 5.0 s, and the run has only lasted 12.0 s",
    )


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"mode": "always"}, "--auto-scale always"),
        ({"min_nodes": 0}, "no world has 0 to 4 nodes"),
        ({"min_nodes": 3, "unit": 5}, "no multiple of 5"),
        ({"target_efficiency": 0.0}, "target efficiency 0"),
        ({"cooldown_s": -1.0}, "cooldown of -1 s"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Policy(**{"mode": "apply", "min_nodes": 1, "max_nodes": 4, **values})  # type: ignore[arg-type]


def test_over_many_runs_it_costs_little_and_comes_near_the_best() -> None:
    """Half an hour each of 40 made-up runs on 1 to 32 nodes, with noise and evaluations in between."""
    policy, rng = Policy("apply", 1, 32), Rng(1)
    changes, near, trained, node_time = [], [], [], []
    for seed in range(40):
        each_s = rng.uniform(0, 0.005) if rng.chance(0.7) else 0.0
        curve = Curve(rng.uniform(0.05, 0.2), rng.uniform(0, 0.05), each_s)
        run = a_run(policy, curve, seed, noise=0.03, outliers=0.05)
        node_seconds = 0.0
        while run.now < LASTS_S:
            node_seconds += run.nodes * TICK_S
            run.tick()
        best = best_size(curve, policy, policy.target_efficiency)
        changes.append(len(run.visited))
        near.append(curve.speedup(best, run.nodes))
        trained.append(run.commits * curve.step_s(best) / LASTS_S)
        node_time.append(node_seconds / run.commits / (32 * curve.step_s(32)))
    for name, values in (
        ("changes of the world", changes),
        ("speed at rest, as a share of the best size's", near),
        ("steps, as a share of those at the best size from the start", trained),
        ("node time for a step, as a share of that with all 32 nodes", node_time),
    ):
        low, middle, high = (sorted(values)[int(len(values) * q)] for q in (0.05, 0.5, 0.95))
        print(f"{name}: median {middle:.2f}, 5 % {low:.2f}, 95 % {high:.2f}")
    assert sorted(changes)[len(changes) // 2] <= 4
    assert sorted(near)[2] > 0.8
    assert sorted(trained)[2] > 0.7
    assert sorted(node_time)[len(node_time) // 2] < 0.7
