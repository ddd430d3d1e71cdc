"""What holds for every run of the relaunch policy: it comes to an end, keeps its budgets, and gives its reasons."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import get_args

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.job.relaunch import (
    Budgets,
    Decision,
    RelaunchConfig,
    RelaunchPolicy,
    WorldFacts,
    classify,
    describe,
)
from stoker.job.relaunch_budgets import BudgetsKept
from stoker.job.relaunch_reasons import fingerprint
from stoker.wire.exits import ExitFacts, Reason, Sign

BAD: tuple[Reason, ...] = tuple(reason for reason in get_args(Reason) if reason != "finished")
MIB = 2**20
WAITING_S = 300.0
"""How long a job waits below its minimum."""

configs = st.builds(
    RelaunchConfig,
    max_restarts=st.one_of(st.none(), st.integers(0, 6)),
    max_node_restarts=st.integers(1, 6),
    oom_limit=st.integers(0, 4),
    relaunch_errors=st.booleans(),
    repeat_limit=st.integers(1, 5),
    memory_bytes=st.sampled_from([0, 64 * MIB]),
    memory_max_bytes=st.sampled_from([0, 64 * MIB, 100 * MIB, 999 * MIB]),
    memory_factor=st.sampled_from([1.1, 1.5, 4.0]),
    cordon_s=st.sampled_from([None, 20.0]),
    backoff_limit_s=st.sampled_from([0.0, 5.0, 60.0]),
)


@dataclass
class SmallWorld:
    """A few nodes on which the policy's decisions are carried out, and where nothing ever goes well."""

    config: RelaunchConfig
    seed: int
    nodes: int = 3
    slots: int = 2
    min_nodes: int = 1
    elastic: bool = True
    progress: int = 0
    """Commits between two failures."""
    reasons: tuple[Reason, ...] = BAD
    budgets: Budgets = field(default_factory=Budgets)
    now: float = 0.0
    generation: int = 1
    commits: int = 0

    def __post_init__(self) -> None:
        self.rng = Rng(self.seed)
        self.policy = RelaunchPolicy(self.config)
        self.live = {f"n{n}": set(range(self.slots)) for n in range(self.nodes)}
        self.members: set[tuple[str, int]] = set()
        self.cordoned: set[str] = set()
        self.memory = self.config.memory_bytes
        self.decisions: list[Decision] = []

    def run(self, most: int) -> str:
        """Let workers fail until the end; returns what the end was."""
        while len(self.decisions) < most:
            if len(self.usable()) < self.min_nodes and not self.wait_for_a_node():
                return "too few nodes for the whole timeout"
            if self.rng.chance(0.6) or not self.members:
                self.form_world()
            node, slot = self.rng.choice(sorted(self.workers()))
            decision = self.fail(self.rng.choice(self.reasons), node, slot)
            if decision.action in ("stop", "done"):
                return decision.action
        return "no end"

    def workers(self) -> set[tuple[str, int]]:
        return {(node, slot) for node in self.usable() for slot in self.live[node]}

    def usable(self) -> list[str]:
        return [n for n in self.live if self.live[n] and not self.budgets.cordon_reason(n, self.now)]

    def wait_for_a_node(self) -> bool:
        begun = self.now
        while len(self.usable()) < self.min_nodes and self.now - begun < WAITING_S:
            self.now += 10.0
        for node in self.usable():
            if node in self.cordoned:
                self.live[node] = set(range(self.slots))
        return len(self.usable()) >= self.min_nodes

    def form_world(self) -> None:
        self.generation += 1
        self.members = self.workers()
        for _ in range(self.progress):
            self.commits += 1
            self.now += 60.0
            self.budgets.note_commits(self.commits, self.now)

    def fail(self, reason: Reason, node: str, slot: int) -> Decision:
        self.now += 1.0
        was_member = (node, slot) in self.members
        self.members.discard((node, slot))
        facts = ExitFacts(
            None,
            9,
            message=f"ValueError: {reason}",
            oom_killed=reason == "oom",
            memory_limit_bytes=self.memory,
        )
        world = WorldFacts(
            node=node,
            slot=slot,
            elastic=self.elastic,
            generation=self.generation if was_member else 0,
            commits=self.commits,
            min_nodes=self.min_nodes,
            other_nodes=len(set(self.usable()) - {node}),
            others_here=len(self.live[node] - {slot}),
        )
        decision = self.policy.decide(reason, facts, self.budgets, world, self.now, self.rng)
        self.check(decision, world)
        if decision.action == "shrink":
            self.live[node].discard(slot)
        if decision.action == "cordon":
            self.cordoned.add(node)
        if decision.action == "replace":
            self.memory = decision.memory_bytes
        self.decisions.append(decision)
        return decision

    def check(self, decision: Decision, world: WorldFacts) -> None:
        config, budgets = self.config, self.budgets
        assert decision.why.strip()
        assert 0.0 <= decision.delay_s <= config.backoff_limit_s
        assert budgets.used("job") <= config.restarts(elastic=self.elastic)
        assert budgets.used("oom") <= config.oom_limit
        assert budgets.used(f"node {world.node}") <= config.max_node_restarts
        most = max(config.memory_bytes, config.memory_max_bytes if config.memory_bytes else 0)
        if decision.action == "replace":
            assert self.memory <= decision.memory_bytes <= most, "it grows, up to the most"
        if decision.action == "cordon":
            assert budgets.cordon_reason(world.node, self.now)
        if decision.action == "shrink":
            assert world.other_nodes + (world.others_here > 0) >= world.min_nodes


@settings(max_examples=200, deadline=None)
@given(
    configs,
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sets(st.sampled_from(BAD), min_size=1),
)
def test_a_run_without_progress_comes_to_an_end(
    config: RelaunchConfig, seed: int, nodes: int, min_nodes: int, elastic: bool, reasons: set[Reason]
) -> None:
    world = SmallWorld(
        config,
        seed,
        nodes=nodes,
        min_nodes=min(nodes, min_nodes),
        elastic=elastic,
        reasons=tuple(sorted(reasons)),
    )
    incidents = nodes * config.max_node_restarts + config.oom_limit + config.restarts(elastic=elastic)
    cordons = nodes * 6  # each twice as long as the one before, until the job gives up waiting
    bound = (incidents + cordons + nodes * world.slots) * (nodes * world.slots + 1)
    assert world.run(bound) != "no end"


@settings(max_examples=100, deadline=None)
@given(configs, st.integers(0, 2**32), st.integers(0, 90))
def test_budgets_hold_with_progress_too(config: RelaunchConfig, seed: int, progress: int) -> None:
    SmallWorld(config, seed, progress=progress).run(200)


@settings(max_examples=100, deadline=None)
@given(configs, st.integers(0, 2**32), st.integers(0, 30), st.floats(-1e6, 1e6))
def test_a_restarted_master_decides_as_the_old_one_would(
    config: RelaunchConfig, seed: int, after: int, clock_moves_s: float
) -> None:
    """The budgets go through the journal, and the new master's clock has another zero. It may only wait longer."""
    world = SmallWorld(replace(config, cordon_s=None), seed, progress=1)
    world.run(after)
    if world.decisions and world.decisions[-1].action == "stop":
        return
    kept = msgspec.json.decode(msgspec.json.encode(world.budgets.kept()), type=BudgetsKept)
    restored = Budgets.restore(kept, world.now + clock_moves_s)
    assert restored.kept() == kept
    facts = ExitFacts(None, 9)
    for reason in ("evicted", "crashed", "hung", "evicted"):
        world.generation += 1
        where = WorldFacts(
            node="n0", slot=0, generation=world.generation, commits=world.commits, other_nodes=2
        )
        old = world.policy.decide(reason, facts, world.budgets, where, world.now, Rng(seed))
        new = world.policy.decide(reason, facts, restored, where, world.now + clock_moves_s, Rng(seed))
        assert (old.action, old.memory_bytes) == (new.action, new.memory_bytes)
        assert old.delay_s <= new.delay_s


def test_the_journal_is_written_when_something_was_decided_and_once_a_minute() -> None:
    budgets = Budgets()
    written = [budgets.kept()]
    for commit in range(1, 3002):
        budgets.note_commits(commit, commit * 0.1)
        if (kept := budgets.kept()) != written[-1]:
            written.append(kept)
    assert len(written) == 1 + 300 / 60


@settings(max_examples=300, deadline=None)
@given(
    st.builds(
        ExitFacts,
        code=st.one_of(st.none(), st.integers(-1000, 1000)),
        signal=st.one_of(st.none(), st.integers(-5, 100)),
        message=st.text(max_size=200),
        sign=st.sampled_from(get_args(Sign)),
        sign_line=st.text(max_size=20),
        oom_killed=st.booleans(),
        full_disk=st.sampled_from(["", "/tmp"]),
        verdict=st.sampled_from(["", *get_args(Reason)]),
    )
)
def test_every_exit_has_a_reason_and_words_for_it(facts: ExitFacts) -> None:
    reason = classify(facts)
    assert reason in get_args(Reason)
    assert describe(reason, facts)
    assert len(fingerprint(facts)) <= 400
    assert (reason == "finished") == (facts.verdict == "finished" or (not facts.verdict and facts.code == 0))
