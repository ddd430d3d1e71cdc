"""The relaunch policy: from facts to reason, from reason to action; one story each."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from stoker.base.rng import Rng
from stoker.job.relaunch import (
    RULES,
    Budgets,
    Decision,
    RelaunchConfig,
    RelaunchPolicy,
    WorldFacts,
    classify,
    describe,
)
from stoker.wire.exits import ExitFacts, Reason

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "failures.md"
MIB = 2**20

TABLE = """\
| reason | first | counts against | when that is used up | and too few nodes are left | script without Stoker |
|---|---|---|---|---|---|
| finished | done | | | | done |
| evicted | replace | node | cordon | stop | replace |
| oom | replace, more memory | oom, node | shrink | stop | replace, more memory |
| device-oom | replace | oom, node | stop | stop | replace |
| user-error | stop | | | | replace |
| user-error, `--relaunch-errors` | replace | job, node | shrink | stop | replace |
| crashed | replace | job, node | shrink | stop | replace |
| device-error | replace | job, node | shrink | stop | replace |
| hung | replace | job, node | shrink | stop | replace |
| stopped | replace | job, node | shrink | stop | replace |
| not-ready | replace | job, node | shrink | stop | replace |
| hardware | cordon | | | stop | cordon |
| disk-full | cordon | | | stop | cordon |
"""

KILLED = ExitFacts(None, signal.SIGKILL)
TWO_LEFT = WorldFacts(node="n0", slot=0, generation=1, commits=100, min_nodes=2, other_nodes=2)
NONE_LEFT = replace(TWO_LEFT, other_nodes=1)


class Story:
    """A policy, its budgets and a clock, for one failure after another."""

    def __init__(self, config: RelaunchConfig | None = None, world: WorldFacts = TWO_LEFT) -> None:
        self.policy = RelaunchPolicy(config if config is not None else RelaunchConfig())
        self.budgets = Budgets()
        self.world = world
        self.now = 0.0
        self.rng = Rng(1)

    def fails(
        self, reason: Reason, facts: ExitFacts = KILLED, after_s: float = 1.0, **world: object
    ) -> Decision:
        """A worker ends, in a world of its own unless told otherwise."""
        self.now += after_s
        self.world = replace(self.world, generation=self.world.generation + 1)
        where = replace(self.world, **world)  # type: ignore[arg-type]
        return self.policy.decide(reason, facts, self.budgets, where, self.now, self.rng)

    def commits(self, until: int, every_s: float) -> None:
        """The run makes progress."""
        for commit in range(self.world.commits + 1, until + 1):
            self.now += every_s
            self.budgets.note_commits(commit, self.now)
        self.world = replace(self.world, commits=until)


# -- the table ------------------------------------------------------------------------------------------------


def rows() -> list[list[str]]:
    lines = TABLE.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_is_the_one_in_the_docs() -> None:
    assert TABLE in DOCS.read_text(), f"copy the table of {Path(__file__).name} to {DOCS.name}"
    assert {row[0].split(",")[0] for row in rows()} == set(get_args(Reason))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_table(row: list[str]) -> None:
    name, first, accounts, used_up, too_few, plain = row
    reason: Reason = name.split(",")[0]  # type: ignore[assignment]
    config = RelaunchConfig(
        relaunch_errors="errors" in name, memory_bytes=100 * MIB, memory_max_bytes=900 * MIB, max_restarts=3
    )
    facts = ExitFacts(
        None, signal.SIGKILL, oom_killed=reason == "oom", memory_limit_bytes=100 * MIB, message=name
    )

    def said(decision: Decision) -> str:
        assert decision.why
        return decision.action + (", more memory" if decision.memory_bytes > 100 * MIB else "")

    story = Story(config)
    assert said(story.fails(reason, facts)) == first
    charged = ["node" if account.startswith("node ") else account for account in story.budgets.spent]
    assert sorted(charged) == sorted(word.strip() for word in accounts.split(",") if word)

    if used_up:
        for world, expected in ((TWO_LEFT, used_up), (NONE_LEFT, too_few)):
            story = Story(config, world)
            while (decision := story.fails(reason, facts, commits=int(story.now * 10))).action == "replace":
                assert story.now < 100
            assert decision.action == expected, decision.why
    elif too_few:
        assert Story(config, NONE_LEFT).fails(reason, facts).action == too_few
    assert said(Story(config).fails(reason, facts, elastic=False)) == plain


def test_every_reason_but_the_good_one_has_a_rule_with_a_mend() -> None:
    assert set(RULES) == set(get_args(Reason)) - {"finished"}
    assert all(rule.mend for rule in RULES.values())


# -- from facts to reason -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (ExitFacts(0, None), "finished"),
        (ExitFacts(0, None, sign="oom", oom_killed=True), "finished"),
        (ExitFacts(1, None), "user-error"),
        (ExitFacts(200, None), "user-error"),
        (ExitFacts(None, signal.SIGKILL), "evicted"),
        (ExitFacts(None, signal.SIGTERM), "evicted"),
        (ExitFacts(137, None), "evicted"),
        (ExitFacts(143, None), "evicted"),
        (ExitFacts(None, signal.SIGKILL, oom_killed=True), "oom"),
        (ExitFacts(137, None, oom_killed=True), "oom"),
        (ExitFacts(None, signal.SIGTERM, oom_killed=True), "evicted"),
        (ExitFacts(1, None, sign="oom"), "oom"),
        (ExitFacts(1, None, sign="device-oom"), "device-oom"),
        (ExitFacts(1, None, sign="child-killed"), "crashed"),
        (ExitFacts(1, None, sign="child-killed", oom_killed=True), "oom"),
        (ExitFacts(1, None, oom_killed=True), "user-error"),
        (ExitFacts(None, signal.SIGABRT, sign="device-error"), "device-error"),
        (ExitFacts(None, signal.SIGKILL, sign="disk-full"), "evicted"),
        (ExitFacts(None, signal.SIGSEGV), "crashed"),
        (ExitFacts(139, None), "crashed"),
        (ExitFacts(None, 40), "crashed"),
        (ExitFacts(None, signal.SIGBUS), "hardware"),
        (ExitFacts(None, signal.SIGBUS, full_disk="/dev/shm"), "disk-full"),
        (ExitFacts(1, None, sign="disk-full"), "disk-full"),
        (ExitFacts(None, signal.SIGKILL, verdict="hung"), "hung"),
        (ExitFacts(0, None, verdict="not-ready"), "not-ready"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_reasons(facts: ExitFacts, reason: Reason) -> None:
    assert classify(facts) == reason
    assert describe(reason, facts)


def test_facts_travel() -> None:
    facts = ExitFacts(None, 9, "words", sign="oom", oom_killed=True, memory_limit_bytes=5, verdict="hung")
    assert msgspec.json.decode(msgspec.json.encode(facts), type=ExitFacts) == facts


# -- budgets --------------------------------------------------------------------------------------------------


def test_a_month_with_a_failure_a_day_goes_on() -> None:
    story = Story(RelaunchConfig(max_restarts=3))
    for day in range(1, 31):
        story.commits(day * 100, every_s=864.0)
        assert story.fails("crashed").action == "replace", f"day {day}"
    assert story.budgets.used("job") == 1


def test_time_without_new_commits_forgives_nothing() -> None:
    story = Story(RelaunchConfig(max_restarts=2, repeat_limit=99))
    assert [story.fails("crashed", after_s=86400.0).action for _ in range(3)] == [
        "replace",
        "replace",
        "shrink",
    ]


def test_the_time_from_a_failure_to_the_next_commit_is_no_progress() -> None:
    story = Story()
    story.commits(110, every_s=10.0)
    story.fails("crashed")
    story.now += 7200.0
    story.commits(120, every_s=10.0)
    assert story.budgets.progress_s == 90.0 + 90.0
    story.fails("evicted")
    assert story.budgets.used("job") == 1


def test_repeating_what_was_done_before_is_no_progress() -> None:
    story = Story()
    story.commits(200, every_s=10.0)
    before = story.budgets.progress_s
    story.budgets.interrupt()
    story.world = replace(story.world, commits=150)
    story.commits(200, every_s=10.0)
    assert story.budgets.progress_s == before == 990.0
    story.commits(202, every_s=10.0)
    assert story.budgets.progress_s == before + 10.0, "the way back up to 201 is not counted either"


def test_workers_that_end_together_cost_one_restart() -> None:
    story = Story(RelaunchConfig(max_restarts=1))
    for slot in range(8):
        assert story.fails("crashed", slot=slot, generation=7, other_nodes=2).action == "replace"
    assert story.budgets.used("job") == story.budgets.used("node n0") == 1
    assert story.fails("crashed", slot=0, generation=8).action == "shrink"


def test_a_worker_that_never_was_in_a_world_is_an_incident_of_its_own() -> None:
    story = Story(RelaunchConfig(max_restarts=2))
    actions = [story.fails("crashed", generation=0, commits=i).action for i in range(3)]
    assert actions == ["replace", "replace", "shrink"]


def test_evictions_use_up_the_node_and_not_the_job() -> None:
    story = Story(RelaunchConfig(max_restarts=1, max_node_restarts=3))
    assert [story.fails("evicted").action for _ in range(4)] == ["replace", "replace", "replace", "cordon"]
    assert story.budgets.used("job") == 0
    assert story.fails("evicted", node="n1").action == "replace", "another node has its own budget"
    assert story.budgets.cordon_reason("n0", story.now)
    assert not story.budgets.cordon_reason("n1", story.now)


def test_without_restarts_nothing_is_replaced() -> None:
    story = Story(RelaunchConfig(max_restarts=0))
    assert story.fails("evicted").action == "shrink"
    assert story.fails("crashed").action == "shrink"


def test_the_first_replacement_comes_at_once_and_later_ones_wait_longer() -> None:
    config = RelaunchConfig(max_restarts=99, max_node_restarts=99, backoff_limit_s=8.0)
    story = Story(config)
    delays = [story.fails("evicted").delay_s for _ in range(40)]
    assert delays[0] == 0.0
    assert all(0 <= delay <= min(8.0, 2.0 ** (n - 1)) for n, delay in enumerate(delays) if n)
    assert max(delays) > 4.0
    assert story.fails("evicted", slot=1).delay_s == 0.0, "another slot has failed for the first time"
    assert story.fails("evicted", after_s=601.0).delay_s == 0.0, "outside the window it is the first again"


def test_workers_that_failed_together_come_back_together() -> None:
    story = Story(RelaunchConfig(max_restarts=99, max_node_restarts=99))
    for generation in range(1, 20):
        delays = {story.fails("evicted", slot=slot, generation=generation).delay_s for slot in range(4)}
        assert len(delays) == 1
    assert story.fails("evicted", slot=9, generation=19).delay_s == 0.0, "this one fails for the first time"


# -- memory ---------------------------------------------------------------------------------------------------


def oom(limit: int, peak: int = 0) -> ExitFacts:
    return ExitFacts(
        None, 9, oom_killed=True, memory_limit_bytes=limit * MIB, memory_peak_bytes=(peak or limit) * MIB
    )


def test_memory_grows_up_to_the_most() -> None:
    story = Story(RelaunchConfig(memory_bytes=100 * MIB, memory_max_bytes=200 * MIB))
    sizes = [story.fails("oom", oom(limit)).memory_bytes // MIB for limit in (100, 150, 200)]
    assert sizes == [150, 200, 200]
    decision = story.fails("oom", oom(200))
    assert decision.action == "shrink"
    assert "all 3 restarts for want of memory are used" in decision.why


def test_two_workers_that_run_out_together_grow_it_once() -> None:
    story = Story(RelaunchConfig(memory_bytes=100 * MIB, memory_max_bytes=900 * MIB))
    assert story.fails("oom", oom(100)).memory_bytes == 150 * MIB
    assert story.fails("oom", oom(100), slot=1, generation=2).memory_bytes == 150 * MIB
    assert story.fails("crashed", slot=2).memory_bytes == 150 * MIB, "what has grown stays, for every worker"


@pytest.mark.parametrize(
    ("reason", "facts"),
    [
        ("device-oom", ExitFacts(1, None, sign="device-oom", memory_limit_bytes=100 * MIB)),
        ("oom", ExitFacts(1, None, sign="oom", memory_limit_bytes=100 * MIB)),
        ("oom", oom(100, peak=50)),
        ("evicted", KILLED),
    ],
)
def test_more_memory_only_where_it_helps(reason: Reason, facts: ExitFacts) -> None:
    story = Story(RelaunchConfig(memory_bytes=100 * MIB, memory_max_bytes=900 * MIB))
    assert story.fails(reason, facts).memory_bytes == 100 * MIB


def test_without_a_limit_there_is_none_to_grow() -> None:
    assert Story().fails("oom", replace_oom_killed()).memory_bytes == 0


def replace_oom_killed() -> ExitFacts:
    return ExitFacts(None, 9, oom_killed=True)


# -- cordon ---------------------------------------------------------------------------------------------------


def test_broken_hardware_takes_the_node_out_for_ever() -> None:
    story = Story(RelaunchConfig(cordon_s=60.0))
    assert story.fails("hardware").action == "cordon"
    assert story.budgets.cordon_reason("n0", story.now + 1e9)
    again = story.fails("evicted", slot=1)
    assert (again.action, "cordoned" in again.why) == ("cordon", True)


def test_a_lone_node_goes_on_with_its_other_workers() -> None:
    alone = WorldFacts(node="n0", slot=3, min_nodes=1, other_nodes=0, others_here=7)
    assert Story(world=alone).fails("hardware").action == "shrink"
    assert Story(world=alone).fails("disk-full").action == "stop", "they have the same disk"
    assert Story(world=replace(alone, others_here=0)).fails("hardware").action == "stop"
    assert Story(world=replace(alone, others_here=0, newcomers=True)).fails("hardware").action == "cordon"


def test_a_cordon_that_ends_is_twice_as_long_the_next_time() -> None:
    story = Story(RelaunchConfig(max_node_restarts=1, cordon_s=60.0), NONE_LEFT)
    story.fails("evicted")
    lengths = []
    for _ in range(3):
        assert story.fails("evicted").action == "cordon", "it comes again, so the job waits instead of ending"
        begun = story.now
        while story.budgets.cordon_reason("n0", story.now):
            story.now += 1.0
        lengths.append(story.now - begun)
    assert lengths == [60.0, 120.0, 240.0]


def test_a_full_disk_names_where_and_what_to_do() -> None:
    facts = ExitFacts(1, None, sign="disk-full", sign_line="[Errno 28] No space left", full_disk="/scratch")
    why = Story(world=NONE_LEFT).fails("disk-full", facts).why
    assert "/scratch" in why
    assert "free space there" in why


# -- stopping early -------------------------------------------------------------------------------------------


def test_a_step_that_fails_wherever_it_runs_stops_the_job() -> None:
    story = Story(RelaunchConfig(max_restarts=99))
    assert story.fails("crashed", node="n0").action == "replace"
    assert story.fails("device-error", node="n1").action == "replace"
    decision = story.fails("crashed", node="n2")
    assert (decision.action, "3 in a row at commit 100" in decision.why) == ("stop", True)


def test_a_step_that_fails_on_one_node_takes_that_node_out_first() -> None:
    story = Story(RelaunchConfig(max_restarts=99))
    actions = [story.fails("crashed", slot=slot).action for slot in (0, 1, 0)]
    assert actions == ["replace", "replace", "cordon"]
    assert story.fails("crashed", node="n1").action == "stop", "it was not the node"


def test_a_step_that_fails_at_one_slot_of_a_lone_node_takes_that_slot_out_first() -> None:
    alone = WorldFacts(node="n0", slot=3, min_nodes=1, other_nodes=0, others_here=7, commits=5)
    story = Story(RelaunchConfig(max_restarts=99), alone)
    assert [story.fails("crashed").action for _ in range(3)] == ["replace", "replace", "shrink"]
    assert story.fails("crashed", slot=0, others_here=6).action == "stop"


def test_failures_at_different_commits_are_not_a_row() -> None:
    story = Story(RelaunchConfig(max_restarts=99))
    for commits in (100, 100, 101, 101, 100, 100):
        assert story.fails("crashed", commits=commits, node=f"n{commits}").action == "replace"


def test_news_of_commits_come_late() -> None:
    story = Story(RelaunchConfig(max_restarts=99))
    places = zip((5700, 5690, 5705), ("n0", "n1", "n2"), strict=True)
    actions = [story.fails("crashed", commits=c, commits_slack=30, node=n).action for c, n in places]
    assert actions == ["replace", "replace", "stop"]


def test_evictions_at_one_commit_are_not_the_steps_fault() -> None:
    story = Story()
    for node in ("n0", "n1", "n2", "n3", "n4"):
        assert story.fails("evicted", node=node).action == "replace"


def test_more_memory_is_another_try_and_not_the_same_failure() -> None:
    story = Story(RelaunchConfig(memory_bytes=100 * MIB, memory_max_bytes=1000 * MIB, repeat_limit=2))
    assert [story.fails("oom", oom(limit)).action for limit in (100, 150, 226)] == ["replace"] * 3


ERROR = (
    'Traceback (most recent call last):\n  File "train.py", line {}, in step\n    boom()\nValueError: bad {}'
)


def test_the_same_error_on_two_ranks_stops_the_job() -> None:
    story = Story(RelaunchConfig(relaunch_errors=True))
    assert story.fails("user-error", ExitFacts(1, None, ERROR.format(7, 12))).action == "replace"
    other = story.fails("user-error", ExitFacts(1, None, ERROR.format(8, 12)), slot=1)
    assert other.action == "replace", "another line, another error"
    same = story.fails("user-error", ExitFacts(1, None, ERROR.format(7, 99)), slot=2)
    assert (same.action, "2 ranks ended with the same error" in same.why) == ("stop", True)


def test_what_every_rank_says_when_a_peer_dies_is_not_the_same_error() -> None:
    story = Story(RelaunchConfig(relaunch_errors=True, max_restarts=9))
    lost = ExitFacts(1, None, ERROR.format(7, 1) + "\nRuntimeError: gloo: Connection closed by peer")
    assert [story.fails("user-error", lost, slot=slot, generation=5).action for slot in range(3)] == [
        "replace"
    ] * 3


def test_too_little_device_memory_on_two_ranks_stops_the_job() -> None:
    story = Story()
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}.00 GiB. GPU {} has"
    facts = [ExitFacts(1, None, said.format(n, n), sign="device-oom") for n in (2, 4)]
    assert story.fails("device-oom", facts[0]).action == "replace"
    decision = story.fails("device-oom", facts[1], slot=1)
    assert (decision.action, "smaller batch" in decision.why) == ("stop", True)


# -- scripts that do not use Stoker ---------------------------------------------------------------------------


def test_an_unmodified_script_has_no_restarts_unless_it_is_given_some() -> None:
    assert Story().fails("evicted", elastic=False).action == "stop"
    story = Story(RelaunchConfig(max_restarts=2))
    actions = [story.fails("user-error", slot=i, elastic=False, node=f"n{i}") for i in range(3)]
    assert [a.action for a in actions] == ["replace", "replace", "stop"]
    assert actions[1].delay_s > 0, "all workers start anew, so it is the second failure of one place"


# -- the policy of before -------------------------------------------------------------------------------------
