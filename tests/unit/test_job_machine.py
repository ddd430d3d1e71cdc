"""Transcripts of the job machine: events on the left, what it decides on the right, readable by eye.

Each `transcripts/*.txt` has lines `> event` and, below each, the decisions it led to. Set STOKER_REWRITE=1 to write
what the machine says now, then read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.job.events import (
    End,
    Event,
    NodeJoined,
    NodeLost,
    NodeReported,
    Record,
    Refuse,
    Send,
    StopRequested,
    Tick,
)
from stoker.job.machine import JobConfig, JobMachine
from stoker.wire.job import Directive, Join, NodeReport, WorkerExit, WorkerReport, WorkerState

FOLDER = Path(__file__).parent / "transcripts"


class Player:
    """Turns the lines of a transcript into events."""

    def __init__(self) -> None:
        self.machine = JobMachine(JobConfig())
        self.now = 0.0
        self.seq: dict[str, int] = {}
        self.reports: dict[str, dict[str, WorkerReport]] = {}
        self.leaving: dict[str, str] = {}

    def play(self, line: str) -> list[str]:
        verb, *rest = line.split()
        words = dict(word.split("=", 1) for word in rest if "=" in word)
        names = [word for word in rest if "=" not in word]
        if verb == "config":
            values = {k: (float(v) if k.endswith("_s") else int(v)) for k, v in words.items()}
            self.machine = JobMachine(JobConfig(**values))  # type: ignore[arg-type]
            return []
        self.now += float(words.pop("after", 0))
        return [
            line
            for effect in self.machine.step(self.event(verb, names, words), self.now)
            for line in show(effect)
        ]

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
                address="10.0.0.1",
                slots=int(words.get("slots", "1")),
                rank_hint=int(words.get("rank", "-1")),
                protocol=int(words.get("protocol", "1")),
            )
            return NodeJoined(join)
        if verb == "lost":
            return NodeLost(node, "its stream broke")
        if verb == "leave":
            self.leaving[node] = "preempted"
        elif verb == "worker":
            self.worker(node, names[1], words)
        return NodeReported(self.report(node, late=verb == "late"))

    def worker(self, node: str, name: str, words: dict[str, str]) -> None:
        ended = None
        if "exit" in words:
            ended = WorkerExit(code=int(words["exit"]), signal=None, message="Traceback: no")
        if "signal" in words:
            ended = WorkerExit(code=None, signal=int(words["signal"]))
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
        self.reports[node][name] = WorkerReport(worker=name, slot=0, pid=1, state=state, exit=ended)

    def report(self, node: str, *, late: bool) -> NodeReport:
        self.seq[node] = self.seq.get(node, 0) + (0 if late else 1)
        return NodeReport(
            node=node,
            seq=self.seq[node] - (1 if late else 0),
            workers=tuple(self.reports.get(node, {}).values()),
            spare_port=4000,
            leaving=self.leaving.get(node, ""),
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
        parts.append(f"world [{members}] from rank {directive.world.source} at {directive.world.commits}")
    parts.append("run [" + ", ".join(f"{s.worker}:{s.rank}/{s.world_size}" for s in directive.run) + "]")
    if directive.outcome is not None:
        parts.append("over")
    return ", ".join(parts)


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


def test_there_are_transcripts() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 8
