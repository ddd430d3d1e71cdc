"""Transcripts of the job machine: events on the left, what it decides on the right, readable by eye.

Each `transcripts/*.txt` has lines `> event` and, below each, the decisions it led to. Set STOKER_REWRITE=1 to write
what the machine says now, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from stoker.base.units import parse_size_bytes
from stoker.job.events import (
    End,
    Event,
    Keep,
    NodeAsked,
    NodeBeat,
    NodeCut,
    NodeJoined,
    NodeLost,
    NodeReported,
    Record,
    Refuse,
    ScaleRequested,
    Send,
    StopRequested,
    Tick,
)
from stoker.job.machine import JobConfig, JobMachine
from stoker.job.relaunch import RelaunchConfig
from stoker.wire.exits import ExitFacts
from stoker.wire.job import PROTOCOL, Beat, Directive, Join, NodeReport, WorkerReport, WorkerSpec, WorkerState

FOLDER = Path(__file__).parent / "transcripts"
MIB = 1024 * 1024


class Player:
    """Turns the lines of a transcript into events."""

    def __init__(self) -> None:
        self.machine = JobMachine(JobConfig())
        self.now = 0.0
        self.seq: dict[str, int] = {}
        self.reports: dict[str, dict[str, WorkerReport]] = {}
        self.leaving: dict[str, str] = {}
        self.kept: dict[str, bytes] = {}

    def play(self, line: str) -> list[str]:
        verb, *rest = line.split()
        words = dict(word.split("=", 1) for word in rest if "=" in word)
        names = [word for word in rest if "=" not in word]
        if verb == "config":
            restarts, cordon_s = words.pop("max_restarts", None), words.pop("cordon_s", None)
            memory, memory_max = words.pop("memory", "0"), words.pop("memory_max", "0")
            relaunch = RelaunchConfig(
                max_restarts=None if restarts is None else int(restarts),
                cordon_s=None if cordon_s is None else float(cordon_s),
                memory_bytes=parse_size_bytes(memory),
                memory_max_bytes=parse_size_bytes(memory_max),
            )
            values = {k: (float(v) if k.endswith("_s") else int(v)) for k, v in words.items()}
            self.machine = JobMachine(JobConfig(relaunch=relaunch, **values))  # type: ignore[arg-type]
            return []
        self.now += float(words.pop("after", 0))
        if verb == "work":
            self.machine.note_work(int(names[0]), self.now)
            return []
        if verb == "master-restart":
            self.machine = JobMachine.restore(self.machine.config, dict(self.kept), self.now)
            effects = self.machine.decide(self.now)
        else:
            effects = self.machine.step(self.event(verb, names, words), self.now)
        for effect in effects:
            if isinstance(effect, Keep):
                self.keep(effect)
        return [line for effect in effects if not isinstance(effect, Keep) for line in show(effect)]

    def keep(self, effect: Keep) -> None:
        if effect.record is None:
            self.kept.pop(effect.key, None)
        else:
            self.kept[effect.key] = msgspec.msgpack.encode(effect.record)

    def event(self, verb: str, names: list[str], words: dict[str, str]) -> Event:
        if verb == "tick":
            return Tick()
        if verb == "stop":
            return StopRequested("somebody asked", 130)
        node = names[0]
        if verb == "join":
            join = Join(
                node=node,
                job=words.get("job", "none"),
                host=node,
                address=f"10.0.0.{ord(node[0]) - 96}",
                slots=int(words.get("slots", "1")),
                rank_hint=int(words.get("rank", "-1")),
                protocol=int(words.get("protocol", PROTOCOL)),
                resumes=words.get("resumes", "no") == "yes",
                generation=int(words.get("generation", "0")),
                directive_seq=int(words.get("directive_seq", "0")),
            )
            return NodeJoined(join)
        if verb == "lost":
            return NodeLost(node, "its agent has ended")
        if verb == "cut":
            return NodeCut(node, "its stream was reset")
        if verb == "ask":
            return NodeAsked(node, "drained by somebody")
        if verb == "scale":
            return ScaleRequested(int(node), "somebody asked")
        if verb == "beat":
            return NodeBeat(Beat(node, self.seq[node], 10**6))
        if verb == "leave":
            self.leaving[node] = "preempted"
        elif verb == "worker":
            self.worker(node, names[1], words)
        problem = " ".join(names[1:]).replace("_", " ") if verb == "problem" else ""
        return NodeReported(self.report(node, late=verb == "late", problem=problem))

    def worker(self, node: str, name: str, words: dict[str, str]) -> None:
        ended = None
        if "exit" in words:
            ended = ExitFacts(code=int(words["exit"]), signal=None, message="Traceback: no")
        if "full_disk" in words:
            ended = ExitFacts(
                code=1, signal=None, message="full", sign="disk-full", full_disk=words["full_disk"]
            )
        if "signal" in words:
            ended = ExitFacts(code=None, signal=int(words["signal"]))
        if "oom" in words:
            ended = ExitFacts(
                code=None, signal=9, oom_killed=True, memory_limit_bytes=parse_size_bytes(words["oom"])
            )
        known = self.reports.setdefault(node, {}).get(name)
        state = known.state if known is not None else WorkerState()
        state = WorkerState(
            phase=words.get("phase", state.phase),  # type: ignore[arg-type]
            generation=int(words.get("generation", state.generation)),
            left=int(words.get("left", state.left)),
            commits=int(words.get("commits", state.commits)),
            clean=words.get("clean", "yes" if state.clean else "no") == "yes",
            fresh=words.get("fresh", "yes" if state.fresh else "no") == "yes",
            store=f"{name}:1",
            elastic=words.get("elastic", "yes") == "yes",
        )
        self.reports[node][name] = WorkerReport(
            worker=name,
            slot=0,
            pid=1,
            state=state,
            exit=ended,
            stopped_s=float(words.get("stopped_s", "0")),
        )

    def report(self, node: str, *, late: bool, problem: str = "") -> NodeReport:
        self.seq[node] = self.seq.get(node, 0) + (0 if late else 1)
        return NodeReport(
            node=node,
            seq=self.seq[node] - (1 if late else 0),
            workers=tuple(self.reports.get(node, {}).values()),
            spare_port=4000,
            leaving=self.leaving.get(node, ""),
            problem=problem,
            directive_seq=10**6,
        )


def show(effect: object) -> list[str]:
    match effect:
        case Record(kind, why, details):
            extra = " ".join(
                f"{k}={v}" for k, v in details.items() if k not in ("generation", "stop_at_commit")
            )
            return [f"  [{kind}] {why}" + (f" ({extra})" if extra else "")]
        case Send(node, directive):
            return [f"  -> {node}: {describe(directive)}"]
        case Refuse(node, why):
            return [f"  -> {node}: refused, {why}"]
        case End(outcome):
            return [f"  END success={outcome.success} exit_code={outcome.exit_code}: {outcome.why}"]
    raise AssertionError(effect)


def describe(directive: Directive) -> str:
    parts = [f"generation {directive.generation}"]
    if directive.stop_at_commit >= 0:
        parts.append(f"stop at commit {directive.stop_at_commit}")
    if directive.world is not None:
        members = ", ".join(f"{m.worker}{'*' if m.copy_state else ''}" for m in directive.world.members)
        source = f"rank {directive.world.source} at {directive.world.commits}"
        parts.append(f"world [{members}] of {directive.world.size} from {source}")
    parts.append("run [" + ", ".join(describe_worker(spec) for spec in directive.run) + "]")
    if directive.leave:
        parts.append(f"leave: {directive.leave}")
    if directive.note:
        parts.append(directive.note)
    if directive.outcome is not None:
        parts.append("over")
    return ", ".join(parts)


def describe_worker(spec: WorkerSpec) -> str:
    memory = f" with {spec.memory_bytes // MIB} MiB" if spec.memory_bytes else ""
    return f"{spec.worker}:{spec.rank}/{spec.world_size}{memory}"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda p: p.stem)
def test_transcript(path: Path) -> None:
    player = Player()
    written = path.read_text().splitlines()
    told: list[str] = []
    for line in written:
        if line.startswith("> "):
            told += [line, *player.play(line[2:])]
        elif not line.startswith("  "):
            told.append(line)
    if os.environ.get("STOKER_REWRITE"):
        path.write_text("\n".join(told) + "\n")
    assert told == written


def test_replacements_are_told_of_the_restarts_under_every_master() -> None:
    player = Player()
    for line in (FOLDER / "budgets_outlive_the_master.txt").read_text().splitlines():
        if line.startswith("> "):
            player.play(line[2:])
    counts = {w.worker: w.spec.restart_count for w in player.machine.roster.workers.values()}
    assert counts == {"worker-0": 0, "worker-4": 3}


def test_there_are_transcripts() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 8


def test_worlds_of_workers_that_never_commit_count_as_long_as_work_is_done() -> None:
    player = Player()
    player.play("config min_nodes=1 max_nodes=30 timeout_s=60 beat_timeout_s=9000 last_call_s=0")
    player.play("join a")
    player.play("report a")
    names = ["a"]
    for number in range(26):
        newest = names[-1]
        generation = player.machine.generation
        for age, name in enumerate(names):
            player.play(f"worker {name} worker-{age} phase=parked generation={generation}")
        for age, name in enumerate(names):
            player.play(f"worker {name} worker-{age} phase=member fresh=no")
        assert player.machine.phase == "running", newest
        player.play(f"work {10 * (number + 1)} after=10")
        names.append(chr(ord("b") + number))
        player.play(f"join {names[-1]}")
        player.play(f"report {names[-1]}")
        told = player.play(f"worker {names[-1]} worker-{number + 1} phase=parked generation={generation}")
        assert not any("stop at commit" in line for line in told), "a commit may never come"
    assert player.machine.state.generations.fruitless == 0


def test_failures_are_forgiven_where_shards_were_done_before_the_steps() -> None:
    player = Player()
    player.play("config min_nodes=1 max_nodes=1 timeout_s=60 beat_timeout_s=90000 last_call_s=0")
    player.play("join a")
    player.play("report a")
    commits = 0
    for failure in range(6):
        generation = player.machine.generation
        name = f"worker-{failure}"
        player.play(f"worker a {name} phase=parked generation={generation} commits={commits}")
        player.play(f"worker a {name} phase=member fresh=no")
        if failure == 0:
            player.play("work 10000 after=1")
        for _ in range(400):
            commits += 1
            player.play(f"worker a {name} commits={commits} after=10")
        told = player.play(f"worker a {name} signal=11")
        assert any("[worker-replace]" in line and "restart 1 of 3" in line for line in told), told


def test_where_rank_0s_node_is_lost_another_writes_the_snapshots() -> None:
    player = Player()

    def saving() -> list[str]:
        nodes = player.machine.state.roster.nodes.values()
        return [node.node for node in nodes if node.sent is not None and node.sent.saves]

    player.play("config min_nodes=2 max_nodes=2 timeout_s=20 beat_timeout_s=9000 last_call_s=0")
    for name in "ab":
        player.play(f"join {name}")
        player.play(f"report {name}")
    assert saving() == [], "there was no world yet"
    generation = player.machine.generation
    for age, name in enumerate("ab"):
        player.play(f"worker {name} worker-{age} phase=parked generation={generation}")
    assert player.machine.phase == "running"
    assert saving() == ["a"]
    player.play("lost a")
    assert saving() == ["b"]
    player.play("tick after=21")
    assert player.machine.phase == "ended"
    assert saving() == ["b"]
    too_late = player.machine.step(NodeJoined(Join("z", "none", "h", "127.0.0.1", 1)), player.now)
    refused = next(effect for effect in too_late if isinstance(effect, Refuse))
    assert refused.outcome == player.machine.state.outcome is not None, "it is told how it ended"


def test_who_was_to_write_at_the_end_is_not_relieved_by_others() -> None:
    player = Player()
    player.play("config min_nodes=2 max_nodes=2 timeout_s=60 beat_timeout_s=9000 last_call_s=0")
    for name in "ab":
        player.play(f"join {name}")
        player.play(f"report {name}")
    generation = player.machine.generation
    for age, name in enumerate("ab"):
        player.play(f"worker {name} worker-{age} phase=parked generation={generation}")
    for age, name in enumerate("ab"):
        player.play(f"worker {name} worker-{age} phase=finished")
    assert player.machine.phase == "ended"
    player.play("lost a")
    nodes = player.machine.state.roster.nodes
    assert {name: node.sent is not None and node.sent.saves for name, node in nodes.items()} == {"b": False}
