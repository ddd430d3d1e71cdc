"""What an auto-scaler's decisions do to a job, and what a master that is started anew makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from stoker.job.events import Event, Keep, NodeJoined, NodeReported, Record, ScaleRequested, Tick
from stoker.job.machine import JobConfig, JobMachine
from stoker.job.scaling import Mode
from stoker.wire.job import Join, NodeReport, WorkerPhase, WorkerReport, WorkerState


@dataclass
class Master:
    """A job's machine and its journal."""

    machine: JobMachine
    kept: dict[str, bytes] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    commits: int = 0
    seq: int = 1

    def feed(self, event: Event, now: float) -> None:
        for effect in self.machine.step(event, now):
            if isinstance(effect, Keep) and effect.record is None:
                self.kept.pop(effect.key, None)
            elif isinstance(effect, Keep):
                self.kept[effect.key] = msgspec.msgpack.encode(effect.record)
            elif isinstance(effect, Record):
                self.said.append(f"{effect.kind}: {effect.why}")

    def join(self, *nodes: str) -> None:
        for name in nodes:
            self.feed(NodeJoined(Join(name, "none", name, f"10.0.0.{name}", slots=1)), 0.0)
            self.feed(NodeReported(NodeReport(name, seq=1, workers=(), spare_port=4000)), 0.0)

    def train(self, begin: int, seconds: int) -> None:
        """Two steps a second while there is a world; whoever is to leave one has done so by the next second."""
        for now in range(begin, begin + seconds):
            self.commits += 2 * (self.machine.phase == "running")
            self.seq += 1
            for name in list(self.machine.roster.nodes):
                live = [w for w in self.machine.roster.on_node(name) if not w.ended]
                said = tuple(WorkerReport(w.worker, 0, 1, self.state_of(w.worker)) for w in live)
                report = NodeReport(name, self.seq, said, spare_port=4000, directive_seq=9999)
                self.feed(NodeReported(report), now)
            self.feed(Tick(), now)

    def state_of(self, worker: str) -> WorkerState:
        machine = self.machine
        is_member = worker in machine.state.generations.members
        phase: WorkerPhase = "member" if is_member and machine.phase == "running" else "parked"
        commits = self.commits if is_member else 0
        return WorkerState(phase, machine.generation, commits=commits, fresh=not commits, elastic=True)

    def successor(self, now: float) -> Master:
        return Master(JobMachine.restore(self.machine.config, self.kept, now), self.kept)


def a_master(mode: Mode) -> Master:
    return Master(JobMachine(JobConfig(min_nodes=1, max_nodes=3, auto_scale=mode, last_call_s=0.0)))


def test_a_job_begins_with_the_smallest_world() -> None:
    first = a_master("apply")
    first.feed(Tick(), 0.0)
    first.join("a", "b", "c")
    assert first.machine.state.target_nodes == 1
    assert "scale: 3 -> 1 nodes: auto-scale begins with the smallest world" in first.said
    assert first.machine.phase == "forming"


def test_what_is_measured_is_recommended_with_its_reason_and_nothing_is_changed() -> None:
    """Every world makes two steps a second: more nodes are of no use."""
    master = a_master("recommend")
    master.join("a")
    master.train(1, 60)
    master.join("b", "c")
    master.train(61, 100)
    advice = master.machine.growth.advice
    assert advice is not None
    assert (advice.nodes, advice.kind, advice.change) == (1, "shrink", False)
    assert master.said[-1] == f"scale-advice: {advice.why}"
    assert advice.why.startswith("3 → 1 node, 1.00 times as fast: the last 2 nodes do 0% of a node's work")
    assert (master.machine.state.target_nodes, master.machine.state.generations.node_count) == (3, 3)


def test_what_is_measured_is_applied_and_taken_back_where_it_does_not_help() -> None:
    master = a_master("apply")
    master.feed(Tick(), 0.0)
    master.join("a", "b", "c")
    master.train(1, 300)
    begins, grows, shrinks = [line for line in master.said if line.startswith("scale:")]
    assert begins.startswith("scale: 3 -> 1 nodes")
    assert grows.startswith("scale: 1 -> 2 nodes: only 1 node measured so far and 1 more stand by")
    assert shrinks.startswith("scale: 2 -> 1 nodes: 2 nodes taken back: measured 1.00 times as fast as 1")
    assert [line[:15] for line in master.said if line.startswith("world:")] == [
        "world: 1 worker",
        "world: 2 worker",
        "world: 1 worker",
    ]
    assert master.said[-1] == "scale-advice: keep 1: 2 was tried and is not worth it"


def test_the_next_master_keeps_the_size_that_the_job_has_come_to() -> None:
    first = a_master("apply")
    first.feed(Tick(), 0.0)
    first.join("a", "b", "c")
    first.feed(ScaleRequested(3, "measured"), 1.0)
    first.feed(Tick(), 1.5)
    second = first.successor(2.0)
    for now in (2.5, 3.0, 8.0):
        second.feed(Tick(), now)
    assert second.machine.state.target_nodes == 3
    assert second.machine.growth.scaler.wanted == 3
    assert not [line for line in second.said if line.startswith("scale:")]


def test_a_size_that_was_asked_for_before_the_first_world_is_kept_too() -> None:
    first = a_master("apply")
    first.feed(Tick(), 0.0)
    first.feed(ScaleRequested(2, "somebody asked"), 1.0)
    second = first.successor(2.0)
    second.feed(Tick(), 2.5)
    assert second.machine.phase == "waiting"
    assert second.machine.state.target_nodes == 2


def test_a_master_that_knows_of_no_world_begins_with_the_smallest() -> None:
    second = Master(a_master("apply").successor(0.0).machine)
    second.feed(Tick(), 0.5)
    assert second.machine.state.target_nodes == 1
