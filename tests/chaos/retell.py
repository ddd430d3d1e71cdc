"""From a job's event log alone: who joined, what died, which generation held whom and why it ended, what was lost.

    stoker job events --log-dir stoker-logs --json > events.jsonl
    python -m tests.chaos.retell events.jsonl          # or an events.db, or the folder of a chaos run

A log that contradicts itself is named: a worker in a world that was never started or had ended, a world of another
generation than the one that was named last, commits that are gone without a word. For the folder of a chaos run the
story is also held against what the workers wrote down and against the faults; see `retell_check`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker.cli.job_events import read_events
from stoker.wire.control import JobEvent

AFTERWARDS = frozenset({"node-lost", "node-cut", "node-back", "master-restored"})
"""What may still be told once the job has ended: its nodes hang up."""


@dataclass
class Chapter:
    """A generation: named, perhaps run, and left for the next one."""

    number: int
    why: str
    """Why it was named."""
    named_s: float
    workers: tuple[str, ...] = ()
    """By rank; empty: no world of it ever ran."""
    places: tuple[str, ...] = ()
    """Where each of them was."""
    commits: int = 0
    """Where it began."""
    lost: int = 0
    """Commits that the master knew of and that this world had to do again."""
    ran_s: float = 0.0
    ended_s: float = 0.0
    ended_why: str = ""


@dataclass
class Life:
    """A node or a worker, from its beginning to its end."""

    name: str
    place: str
    """Of a node the host, of a worker its node."""
    slot: int
    began_s: float
    ended_s: float = 0.0
    ended_why: str = ""
    going: str = ""
    """Of a node: why its workers are let go as soon as they have left the world; empty: they are not."""

    @property
    def is_over(self) -> bool:
        return self.ended_s > 0


class Death(msgspec.Struct, frozen=True):
    """Somebody was lost, and the job had to do without."""

    wall_s: float
    kind: str
    name: str
    host: str
    why: str


@dataclass
class Tale:
    """What a log tells."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    chapters: list[Chapter] = field(default_factory=list)
    nodes: dict[str, Life] = field(default_factory=dict)
    workers: dict[str, Life] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    restored_s: list[float] = field(default_factory=list)
    """When a master took up the journal of the one before."""
    outcome: str = ""
    success: bool = False

    @property
    def masters(self) -> int:
        """How many it had."""
        return 1 + len(self.restored_s)

    @property
    def ran(self) -> list[Chapter]:
        """Generations whose world came about."""
        return [chapter for chapter in self.chapters if chapter.workers]

    def host_of(self, worker: str) -> str:
        """The host that a worker ran on."""
        life = self.workers.get(worker)
        node = self.nodes.get(life.place) if life is not None else None
        return node.place if node is not None else "?"


class Teller:
    """Takes a log in, event by event."""

    def __init__(self) -> None:
        self.tale = Tale()
        self._is_rolled_back = False

    def take(self, event: JobEvent) -> None:
        """The next event."""
        if self.tale.outcome and event.kind not in AFTERWARDS:
            self._wrong(event, "comes after the end")
        match event.kind:
            case "node-joined":
                self._on_joined(event)
            case "worker-started":
                self._on_started(event)
            case "node-lost":
                self._on_lost(event)
            case "node-standby" | "node-leaving" | "node-asked" | "node-cordoned" | "node-active":
                self._on_going(event)
            case "worker-replace" | "worker-shrink" | "worker-cordon" | "worker-stop":
                self._on_worker_ended(event)
            case "generation":
                self._on_generation(event)
            case "world":
                self._on_world(event)
            case "restart-all":
                for worker in self.tale.workers.values():
                    self._end(worker, event)
                self._say(event, f"all workers start anew: {event.why}")
            case "master-restored":
                self.tale.restored_s.append(event.wall_s)
                self._say(event, f"master {self.tale.masters} takes up the journal: {event.why}")
            case "ended":
                self.tale.outcome, self.tale.success = event.why, bool(event.details.get("success"))
                self._leave_world(event)
                self._say(event, f"THE END: {event.why}")
            case _:
                self._on_other(event)

    # -- nodes and workers --------------------------------------------------------------------------------

    def _on_joined(self, event: JobEvent) -> None:
        node, host = str(event.details["node"]), event.why.split()[0]
        if node in self.tale.nodes:
            self._wrong(event, f"{node} has joined before")
        self.tale.nodes[node] = Life(node, host, 0, event.wall_s)
        self._say(event, f"{node} joins: {event.why}")

    def _on_started(self, event: JobEvent) -> None:
        worker, node = str(event.details["worker"]), str(event.details["node"])
        home = self.tale.nodes.get(node)
        if home is None or home.is_over:
            self._wrong(event, f"{worker} is to start on {node}, which is not there")
        if worker in self.tale.workers:
            self._wrong(event, f"{worker} was started before")
        self.tale.workers[worker] = Life(worker, node, int(event.why.split()[-1]), event.wall_s)
        self._say(event, f"{worker} starts on {self._place(node)}")

    def _on_lost(self, event: JobEvent) -> None:
        node = str(event.details["node"])
        life = self.tale.nodes.get(node)
        if life is None or life.is_over:
            self._wrong(event, f"{node} is lost, but was not there")
            return
        self._end(life, event)
        gone = [w for w in self.tale.workers.values() if w.place == node and not w.is_over]
        for worker in gone:
            self._end(worker, event)
        if not self.tale.outcome:
            self.tale.deaths.append(Death(event.wall_s, event.kind, node, life.place, event.why))
        with_it = f", and with it {', '.join(w.name for w in gone)}" if gone else ""
        self._say(event, f"{self._place(node)} is lost: {event.why}{with_it}")

    def _on_going(self, event: JobEvent) -> None:
        """Its workers go, or new ones may come."""
        node = self.tale.nodes.get(str(event.details["node"]))
        if node is None or node.is_over:
            self._wrong(event, "of a node that is not there")
            return
        if event.kind == "node-active":
            self._let_go(node, event, staying=self.tale.ran[-1].workers if self.tale.ran else ())
        node.going = "" if event.kind == "node-active" else event.why
        self._on_other(event)

    def _let_go(self, node: Life, event: JobEvent, staying: tuple[str, ...]) -> None:
        for worker in self.tale.workers.values():
            if node.going and worker.place == node.name and worker.name not in staying:
                self._end(worker, event)

    def _on_worker_ended(self, event: JobEvent) -> None:
        worker = str(event.details["worker"])
        life = self.tale.workers.get(worker)
        if life is None or life.is_over:
            self._wrong(event, f"{worker} ends, but did not run")
            return
        self._end(life, event)
        host = self.tale.host_of(worker)
        self.tale.deaths.append(Death(event.wall_s, event.kind, worker, host, event.why))
        follows = event.kind.removeprefix("worker-")
        self._say(
            event, f"{worker} (rank {event.details.get('rank')}, {host}) ends: {event.why} -> {follows}"
        )

    def _end(self, life: Life, event: JobEvent) -> None:
        if not life.is_over:
            life.ended_s, life.ended_why = event.wall_s, event.why

    # -- generations --------------------------------------------------------------------------------------

    def _on_generation(self, event: JobEvent) -> None:
        self._leave_world(event)
        number = int(str(event.details["generation"]))
        newest = self.tale.chapters[-1].number if self.tale.chapters else 0
        if number <= newest:
            self._wrong(event, f"generation {number} is named after {newest}")
        self.tale.chapters.append(Chapter(number, event.why, event.wall_s))
        at = int(str(event.details.get("stop_at_commit", -1)))
        self._say(
            event, f"generation {number} is named{f', from commit {at} on' if at >= 0 else ''}: {event.why}"
        )

    def _leave_world(self, event: JobEvent) -> None:
        newest = self.tale.chapters[-1] if self.tale.chapters else None
        if newest is not None and not newest.ended_s:
            newest.ended_s, newest.ended_why = event.wall_s, event.why

    def _on_world(self, event: JobEvent) -> None:
        details, tale = event.details, self.tale
        number, commits, lost = (int(str(details[k])) for k in ("generation", "commits", "commits_lost"))
        workers = tuple(map(str, details["workers"]))
        if not tale.chapters or tale.chapters[-1].number != number or tale.chapters[-1].workers:
            self._wrong(event, f"a world of generation {number}, which was not the one to come")
            tale.chapters.append(Chapter(number, "?", event.wall_s))
        before = tale.ran[-1].commits if tale.ran else 0
        if commits < before and not (lost or self._is_rolled_back):
            self._wrong(event, f"it goes on from commit {commits}, and the one before began at {before}")
        self._is_rolled_back = False
        self._check_members(event, workers)
        for node in tale.nodes.values():
            self._let_go(node, event, staying=workers)
        chapter = tale.chapters[-1]
        chapter.workers, chapter.commits, chapter.lost, chapter.ran_s = workers, commits, lost, event.wall_s
        chapter.places = tuple(tale.host_of(worker) for worker in workers)
        names = ", ".join(f"{worker} ({host})" for worker, host in zip(workers, chapter.places, strict=True))
        gone = f"; {lost} commits are lost" if lost else ""
        self._say(event, f"generation {number} runs from commit {commits}{gone}: {names}")

    def _check_members(self, event: JobEvent, workers: tuple[str, ...]) -> None:
        taken: set[tuple[str, int]] = set()
        for worker in workers:
            life = self.tale.workers.get(worker)
            if life is None or life.is_over:
                self._wrong(
                    event,
                    f"{worker} is in the world, but "
                    + ("was never started" if life is None else f"had ended: {life.ended_why}"),
                )
                continue
            if (life.place, life.slot) in taken:
                self._wrong(event, f"two workers of the world are in slot {life.slot} of {life.place}")
            taken.add((life.place, life.slot))

    # -- all else -----------------------------------------------------------------------------------------

    def _on_other(self, event: JobEvent) -> None:
        if event.kind == "rollback":
            self._is_rolled_back = True
        details = event.details
        whom = details.get("worker") or details.get("node")
        about = f" {whom}" if whom and "worker" in details else f" {self._place(str(whom))}" if whom else ""
        self._say(event, f"{event.kind}{about}: {event.why}")

    def _place(self, node: str) -> str:
        life = self.tale.nodes.get(node)
        return f"{node} ({life.place})" if life is not None else node

    def _say(self, event: JobEvent, text: str) -> None:
        self.tale.lines.append((event.wall_s, text.split("\n")[0]))

    def _wrong(self, event: JobEvent, text: str) -> None:
        self.tale.contradictions.append(f"event {event.seq} ({event.kind}): {text}")


def tell(events: Iterable[JobEvent]) -> Tale:
    """What a log tells, from its first event on."""
    teller = Teller()
    for event in events:
        teller.take(event)
    return teller.tale


def chronicle(tale: Tale) -> list[str]:
    """The story line by line, and a table of its generations."""
    first_s = tale.lines[0][0] if tale.lines else 0.0
    lines = [f"{wall_s - first_s:8.2f} s  {text}" for wall_s, text in tale.lines]
    lines += ["", "generation  lasted     from commit  lost  held by           ended because"]
    for chapter in tale.chapters:
        if not chapter.workers:
            lines.append(
                f"{chapter.number:10}  never ran                         {'':16}  {chapter.ended_why[:90]}"
            )
            continue
        lasted_s = (chapter.ended_s or tale.lines[-1][0]) - chapter.ran_s
        held = " ".join(chapter.places)
        lines.append(
            f"{chapter.number:10}  {lasted_s:7.2f} s  {chapter.commits:11}  {chapter.lost:4}  {held:16}  "
            f"{chapter.ended_why[:90]}"
        )
    lines.append("")
    lines.append(
        f"{len(tale.nodes)} nodes and {len(tale.workers)} workers in {len(tale.ran)} worlds under {tale.masters} "
        f"masters; {len(tale.deaths)} losses; {sum(c.lost for c in tale.ran)} commits lost"
    )
    return lines


def load(path: Path) -> list[JobEvent]:
    """Events from JSON lines, or from a journal's file."""
    if path.suffix == ".db":
        return list(read_events(path))
    return [msgspec.json.decode(line, type=JobEvent) for line in path.read_bytes().splitlines() if line]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.retell", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="JSON lines, an events.db, or the folder of a chaos run")
    path = parser.parse_args(argv).path
    if path.is_dir():
        from tests.chaos.retell_check import check_folder

        tale, wrong = check_folder(path)
    else:
        tale = tell(load(path))
        wrong = tale.contradictions
    print("\n".join(chronicle(tale)))
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
