"""Holds the story that the event log tells against what the workers wrote down, and against the faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from stoker.data.audit import Committed, Entered, Entry
from tests.chaos.inject import Injected
from tests.chaos.plan import Kind
from tests.chaos.retell import Chapter, Death, Tale, load, tell

NEWS_S = 1.0
"""Commits of which the master had not heard when all who held them died are from no longer ago."""
CLOCK_S = 0.01
"""The hosts of the test have one clock; a line is written a moment after what it tells."""

CAN_LOSE_NODE: frozenset[Kind] = frozenset(
    {
        "kill-agent",
        "kill-run",
        "kill-host",
        "stop-agent",
        "partition",
        "split",
        "cut",
        "cut-master",
        "reset",
        "leave",
    }
)
CAN_LOSE_WORKER: frozenset[Kind] = frozenset({"kill-worker", "stop-worker", "hang", "kill-host", "split"})


class Told(msgspec.Struct, frozen=True):
    """A fault, as it is kept beside the log."""

    kind: Kind
    hosts: tuple[int, ...]
    lost: tuple[int, ...]
    wall_s: float
    until_s: float

    @classmethod
    def of(cls, injected: Injected) -> Told:
        fault = injected.fault
        return cls(fault.kind, fault.hosts, tuple(sorted(injected.lost)), injected.wall_s, injected.until_s)


def read_workers(folder: Path) -> dict[str, list[Entry]]:
    """Each worker's own ledger."""
    decode = msgspec.json.Decoder(Entry).decode
    found: dict[str, list[Entry]] = {}
    for path in sorted(folder.glob("h*/stoker-logs/*/audit/*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        found[path.stem] = [decode(line) for line in lines if line.endswith(b"}")]
    return found


def disagreements(tale: Tale, ledgers: Mapping[str, Sequence[Entry]]) -> list[str]:
    """Where the workers wrote down something else than the log tells."""
    chapters = {chapter.number: chapter for chapter in tale.ran}
    wrong: list[str] = []
    for worker, entries in ledgers.items():
        if worker not in tale.workers:
            wrong.append(f"{worker} wrote a ledger, and the log does not know it")
        wrong += _worker_against(chapters, worker, entries)
    wrong += _order_of_worlds(tale, ledgers)
    wrong += _silent_losses(tale, ledgers)
    return wrong


def _worker_against(chapters: Mapping[int, Chapter], worker: str, entries: Iterable[Entry]) -> list[str]:
    """One worker's worlds and commits: in the places that the log gave it, one step after the other."""
    wrong: list[str] = []
    inside, step = 0, 0
    for entry in entries:
        if isinstance(entry, Entered):
            inside, step = entry.generation, entry.commits
            chapter = chapters.get(inside)
            if chapter is None:
                wrong.append(f"{worker} entered generation {inside}, of which the log tells no world")
                continue
            said = (entry.rank, entry.world_size, entry.commits)
            rank = chapter.workers.index(worker) if worker in chapter.workers else -1
            told = (rank, len(chapter.workers), chapter.commits)
            if said != told:
                wrong.append(f"{worker} in generation {inside}: (rank, size, commits) {said}, told is {told}")
        elif isinstance(entry, Committed):
            if (entry.generation, entry.step) != (inside, step + 1):
                wrong.append(
                    f"{worker} committed step {entry.step} of generation {entry.generation} after step {step} of "
                    f"generation {inside}"
                )
            step = entry.step
    return wrong


def _order_of_worlds(tale: Tale, ledgers: Mapping[str, Sequence[Entry]]) -> list[str]:
    """There is one world at a time: no generation goes on once a newer one has committed. A member that was lost may
    end the one step that it is in."""
    commits: dict[int, list[Committed]] = {}
    for entries in ledgers.values():
        for entry in entries:
            if isinstance(entry, Committed):
                commits.setdefault(entry.generation, []).append(entry)
    first_s = {generation: min(c.wall_s for c in made) for generation, made in commits.items()}
    wrong = []
    for older, newer in pairwise(sorted(commits)):
        late = {c.step for c in commits[older] if c.wall_s > first_s[newer] + CLOCK_S}
        if len(late) > 1:
            wrong.append(
                f"generation {older} committed {len(late)} steps after generation {newer} had begun to"
            )
    early = [c.number for c in tale.ran if first_s.get(c.number, c.ran_s) < c.ran_s - CLOCK_S]
    return wrong + [f"generation {number} committed before the log tells of its world" for number in early]


def _silent_losses(tale: Tale, ledgers: Mapping[str, Sequence[Entry]]) -> list[str]:
    """Commits that were done again without a word. The newest ones the master may not have heard of, and a new one may
    know none of them when nobody is left who held them."""
    commits: dict[int, dict[int, float]] = {}
    for entries in ledgers.values():
        for entry in entries:
            if isinstance(entry, Committed):
                steps = commits.setdefault(entry.generation, {})
                steps[entry.step] = min(entry.wall_s, steps.get(entry.step, entry.wall_s))
    wrong = []
    for older, newer in pairwise(tale.ran):
        is_new_master = any(older.ran_s <= restored_s <= newer.ran_s for restored_s in tale.restored_s)
        if is_new_master and not set(older.workers) & set(newer.workers):
            continue
        until_s = max([older.ended_s, *commits.get(older.number, {}).values()])
        gone = [
            s
            for s, at in commits.get(older.number, {}).items()
            if s > newer.commits and at < until_s - NEWS_S
        ]
        if len(gone) > newer.lost:
            wrong.append(
                f"generation {newer.number} did {len(gone)} commits of generation {older.number} again, and the log "
                f"tells of {newer.lost}"
            )
    return wrong


def unexplained(tale: Tale, faults: Sequence[Told], told_s: float) -> list[str]:
    """Losses that the log tells of and that no fault asked for."""
    wrong = []
    for death in tale.deaths:
        if tale.outcome and death.wall_s >= tale.lines[-1][0]:
            continue
        if not any(_explains(fault, death, told_s) for fault in faults):
            wrong.append(
                f"no fault explains that {death.name} ({death.host}) was lost: {death.kind}, {death.why}"
            )
    return wrong


def _explains(fault: Told, death: Death, told_s: float) -> bool:
    if not fault.wall_s - CLOCK_S <= death.wall_s <= fault.until_s + told_s:
        return False
    if not any(death.host == f"h{number}" for number in {*fault.hosts, *fault.lost}):
        return False
    return fault.kind in (CAN_LOSE_NODE if death.kind == "node-lost" else CAN_LOSE_WORKER)


def check_folder(folder: Path, told_s: float = 90.0) -> tuple[Tale, list[str]]:
    """The story of a chaos run, and what is wrong with it."""
    tale = tell(load(folder / "events.jsonl"))
    lines = (folder / "faults.jsonl").read_bytes().splitlines()
    faults = [msgspec.json.decode(line, type=Told) for line in lines]
    wrong = [
        *tale.contradictions,
        *disagreements(tale, read_workers(folder)),
        *unexplained(tale, faults, told_s),
    ]
    return tale, wrong
