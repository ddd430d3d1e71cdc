"""Node checks in a job: streams that break under them, cordons that end, and how long they may take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import pytest

from stoker.job.events import (
    Event,
    Keep,
    NodeChecked,
    NodeCut,
    NodeJoined,
    NodeLost,
    NodeReported,
    Record,
    Tell,
    Tick,
)
from stoker.job.health_check import TRIES
from stoker.job.machine import JobConfig, JobMachine
from stoker.job.relaunch import RelaunchConfig
from stoker.wire.exits import ExitFacts
from stoker.wire.health import CheckReply, CheckResult, CheckTask
from stoker.wire.job import Join, NodeReport, WorkerPhase, WorkerReport, WorkerState

FINE = CheckResult(ok=True, matmul_s=0.01, allreduce_s=0.02)
BROKEN = CheckResult(ok=False, why="wrong product", stage="matmul")
LONELY = CheckResult(ok=False, why="no peer came", stage="meet")


def config(timeout_s: float = 300.0, cordon_s: float | None = None) -> JobConfig:
    return JobConfig(
        min_nodes=1,
        max_nodes=3,
        check_nodes=True,
        timeout_s=timeout_s,
        beat_timeout_s=1e6,
        last_call_s=0.0,
        relaunch=RelaunchConfig(cordon_s=cordon_s),
    )


@dataclass
class Master:
    """A job's machine, its journal, and what the nodes were told."""

    machine: JobMachine
    now: float = 0.0
    kept: dict[str, bytes] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    told: dict[str, list[CheckTask]] = field(default_factory=dict)
    reports: int = 0

    def feed(self, *events: Event) -> None:
        """Events that come together."""
        for event in events:
            self.machine.apply(event, self.now)
        for effect in self.machine.decide(self.now):
            if isinstance(effect, Keep) and effect.record is None:
                self.kept.pop(effect.key, None)
            elif isinstance(effect, Keep):
                self.kept[effect.key] = msgspec.msgpack.encode(effect.record)
            elif isinstance(effect, Record):
                self.said.append(f"{effect.kind} {effect.details.get('node', '')}: {effect.why}")
            elif isinstance(effect, Tell) and isinstance(effect.message, CheckTask):
                self.told.setdefault(effect.node, []).append(effect.message)

    def join(self, *nodes: str, resumes: bool = False) -> None:
        for name in nodes:
            join = Join(name, "none", name, f"10.0.0.{ord(name[0])}", slots=1, resumes=resumes)
            self.feed(NodeJoined(join))
        self.feed(*(self.report(name) for name in nodes))

    def report(self, name: str, *workers: WorkerReport) -> NodeReported:
        self.reports += 1
        port = 4000 + self.reports
        return NodeReported(NodeReport(name, self.reports, workers, spare_port=port, directive_seq=99))

    def reply(self, name: str, result: CheckResult) -> None:
        self.feed(NodeChecked(name, CheckReply(self.told[name][-1].group, result)))

    def wait(self, seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.feed(Tick())

    def blip(self, name: str) -> None:
        """Its stream is reset; it is back a little later."""
        self.feed(NodeCut(name, "reset"))
        self.now += 0.2
        self.join(name, resumes=True)

    def saw(self, kind: str) -> list[str]:
        return [line for line in self.said if line.startswith(f"{kind} ")]

    def workers(self, name: str) -> list[str]:
        return [w.worker for w in self.machine.roster.on_node(name) if not w.ended]


def a_master(timeout_s: float = 300.0, cordon_s: float | None = None) -> Master:
    return Master(JobMachine(config(timeout_s, cordon_s)))


# -- streams that break ----------------------------------------------------------------------------------------


def test_a_check_whose_task_was_lost_is_told_again_when_the_node_is_back() -> None:
    master = a_master()
    master.join("a")
    master.blip("a")
    first, second = master.told["a"]
    assert first == second
    master.reply("a", FINE)
    master.wait(70)
    assert master.workers("a")
    assert len(master.told["a"]) == 2


def test_a_check_whose_reply_was_lost_unseen_is_told_again_until_it_is_there() -> None:
    master = a_master()
    master.join("a", "b")
    master.reply("a", FINE)
    master.wait(5)
    assert len(master.told["a"]) == 1
    assert len(set(master.told["b"])) == 1
    assert len(master.told["b"]) == 3
    master.reply("b", FINE)
    master.wait(70)
    assert len(master.told["b"]) == 3
    assert master.workers("a")
    assert master.workers("b")


def test_a_node_that_never_replies_is_faulty_and_one_that_was_cut_off_meanwhile_is_asked_anew() -> None:
    silent = a_master()
    silent.join("a")
    silent.wait(66)
    assert silent.saw("node-checked") == ["node-checked a: it gave no result within 65 s"]

    master = a_master()
    master.join("a")
    master.wait(30)
    master.blip("a")
    master.wait(40)
    assert master.saw("node-checked") == []
    assert len({task.group for task in master.told["a"]}) == 2
    master.reply("a", FINE)
    assert master.saw("node-checked") == ["node-checked a: its check passed"]


def test_two_that_did_not_meet_because_one_was_told_late_try_again() -> None:
    master = a_master()
    master.join("a", "b")
    master.blip("b")
    master.reply("a", LONELY)
    master.reply("b", LONELY)
    assert master.saw("node-checked") == []
    master.reply("a", FINE)
    master.reply("b", FINE)
    assert [line.partition(":")[0] for line in master.saw("node-checked")] == [
        "node-checked a",
        "node-checked b",
    ]
    assert master.saw("node-cordoned") == []


def test_a_node_that_fails_whenever_it_is_cut_off_is_told_so_in_the_end() -> None:
    master = a_master()
    master.join("a")
    for _ in range(TRIES):
        assert master.saw("node-checked") == []
        master.blip("a")
        master.wait(66)
    assert master.saw("node-checked") == ["node-checked a: it gave no result within 65 s"]


def test_a_node_that_is_gone_is_asked_nothing_more() -> None:
    master = a_master()
    master.join("a", "b")
    master.feed(NodeLost("b", "it ended"))
    asked = len(master.told["b"])
    master.wait(10)
    assert len(master.told["b"]) == asked


def test_a_masters_groups_have_other_numbers_than_those_of_the_master_before() -> None:
    first = a_master()
    first.now = 1.0
    first.join("a")
    second = Master(JobMachine.restore(config(), first.kept, 2.0), now=2.0, reports=first.reports)
    second.join("a", resumes=True)
    second.wait(0.5)
    (task,) = second.told["a"]
    assert task.group != first.told["a"][-1].group
    second.feed(NodeChecked("a", CheckReply(first.told["a"][-1].group, BROKEN)))
    assert second.saw("node-checked") == [], "what the master before asked for"
    second.reply("a", FINE)
    assert second.workers("a")


# -- cordons ---------------------------------------------------------------------------------------------------


def test_a_node_that_failed_its_check_is_checked_again_when_its_cordon_is_over() -> None:
    master = a_master(cordon_s=10.0)
    master.join("a")
    master.reply("a", BROKEN)
    master.wait(9)
    assert master.machine.roster.nodes["a"].cordoned
    assert len(master.told["a"]) == 1
    master.wait(2)
    assert not master.machine.roster.nodes["a"].cordoned
    assert len(master.told["a"]) == 2
    master.reply("a", BROKEN)
    master.wait(15)
    assert master.machine.roster.nodes["a"].cordoned, "twice as long the second time"
    master.wait(6)
    master.reply("a", FINE)
    assert master.workers("a")


def test_without_a_time_a_cordon_lasts_for_ever_and_a_new_agent_there_is_not_checked() -> None:
    master = a_master()
    master.join("a")
    master.reply("a", BROKEN)
    master.wait(250)
    master.feed(NodeLost("a", "it ended"))
    master.join("a2")
    master.wait(10)
    assert master.machine.roster.nodes["a2"].cordoned
    assert "a2" not in master.told
    assert master.machine.care.being_checked() == 0


def test_a_new_agent_on_a_cordoned_host_is_checked_when_the_cordon_is_over() -> None:
    master = a_master(cordon_s=10.0)
    master.join("a")
    master.reply("a", BROKEN)
    master.feed(NodeLost("a", "it ended"))
    master.join("a2")
    master.wait(5)
    assert "a2" not in master.told
    master.wait(6)
    master.reply("a2", FINE)
    assert master.workers("a2")


def test_a_node_that_was_cordoned_for_its_worker_is_checked_before_it_comes_in_again() -> None:
    master = a_master(cordon_s=10.0)
    master.join("a", "b")
    master.reply("a", FINE)
    master.reply("b", FINE)
    (name,) = master.workers("b")
    state = WorkerState(elastic=True)
    full = ExitFacts(code=1, signal=None, message="no space left", sign="disk-full", full_disk="/data")
    master.feed(master.report("b", WorkerReport(name, 0, 1, state)))
    master.feed(master.report("b", WorkerReport(name, 0, 1, state, exit=full)))
    assert master.machine.roster.nodes["b"].cordoned
    asked = len(master.told["b"])
    master.wait(11)
    assert not master.machine.roster.nodes["b"].cordoned
    assert len(master.told["b"]) == asked + 1
    assert master.workers("b") == []
    master.reply("b", FINE)
    assert master.workers("b")


def until_c_is_a_straggler(min_nodes: int) -> Master:
    """Three nodes that train, of which one takes five times as long as the others for its own work."""
    relaunch = RelaunchConfig(cordon_s=10.0)
    excluding = replace(
        config(), min_nodes=min_nodes, check_nodes=False, exclude_stragglers=True, relaunch=relaunch
    )
    master = Master(JobMachine(excluding))
    master.join("a", "b", "c")
    (generation,) = {master.machine.generation}
    workers = {name: master.workers(name)[0] for name in "abc"}

    def say(phase: WorkerPhase, steps: int) -> None:
        for name, worker in workers.items():
            busy_s = steps * (5.0 if name == "c" else 1.0)
            state = WorkerState(
                phase, generation, commits=steps, elastic=True, busy_s=busy_s, fresh=not steps
            )
            master.feed(master.report(name, WorkerReport(worker, 0, 1, state)))

    say("parked", 0)
    assert master.machine.phase == "running"
    for step in range(1, 120):
        say("member", step)
        master.wait(0.5)
        if master.saw("straggler"):
            break
    (verdict,) = master.saw("straggler")
    assert verdict.startswith("straggler c: rank 2 takes 5.0 x the median's")
    return master


def test_a_straggler_is_excluded_for_as_long_as_a_cordon_lasts() -> None:
    master = until_c_is_a_straggler(min_nodes=2)
    assert master.machine.roster.nodes["c"].cordoned.startswith("rank 2 takes 5.0 x the median's")
    master.wait(11)
    assert not master.machine.roster.nodes["c"].cordoned


def test_a_straggler_that_the_minimum_needs_is_named_and_kept() -> None:
    master = until_c_is_a_straggler(min_nodes=3)
    master.wait(11)
    assert not master.machine.roster.nodes["c"].cordoned
    assert (master.machine.phase, len(master.machine.state.generations.members)) == ("running", 3)


@pytest.mark.parametrize(("min_nodes", "is_kept"), [(3, True), (2, False)])
def test_a_node_that_its_check_finds_slow_is_excluded_only_where_the_others_are_enough(
    min_nodes: int, is_kept: bool
) -> None:
    master = Master(JobMachine(replace(config(), min_nodes=min_nodes, exclude_stragglers=True)))
    master.join("a", "b", "c")
    slow = CheckResult(ok=True, matmul_s=0.1, allreduce_s=0.02)
    while len(master.saw("node-checked")) < 3:
        for name in "abc":
            master.reply(name, slow if name == "c" else FINE)
    assert any("node-checked c" in line and "x" in line for line in master.saw("node-checked"))
    assert bool(master.machine.roster.nodes["c"].cordoned) != is_kept
    assert [bool(master.workers(name)) for name in "abc"] == [True, True, is_kept]


# -- time ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [4.0, 10.0, 60.0, 129.0, 130.0, 300.0, 3600.0])
def test_a_check_takes_at_most_half_the_users_timeout(timeout_s: float) -> None:
    check = a_master(timeout_s).machine.care.check
    assert check.timeout_s + check.grace_s == min(timeout_s / 2, 65.0)
    assert check.timeout_s >= 3 * check.grace_s


def test_nodes_that_are_being_checked_are_counted() -> None:
    master = a_master(cordon_s=10.0)
    care = master.machine.care
    assert care.being_checked() == 0
    master.join("a", "b")
    assert care.being_checked() == 2
    master.reply("b", BROKEN)
    master.reply("a", LONELY)
    assert master.machine.roster.nodes["b"].cordoned
    assert care.being_checked() == 1
    master.wait(11)
    assert care.being_checked() == 2
    master.reply("a", FINE)
    master.reply("b", FINE)
    assert care.being_checked() == 0
