"""Was every record of every epoch read exactly once? A pure function of what the workers wrote down. PURE.

Each worker notes every batch that it hands to the training loop (`Read`) and every commit (`Committed`). A step
may have been done twice, when all who had committed it died; then only the newest generation that committed it
counts, because its state is the one that lives on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec


class Read(msgspec.Struct, frozen=True, tag="read"):
    """A batch was handed to the training loop."""

    generation: int
    step: int
    """The commit that this batch is for: commits so far + 1."""
    epoch: int
    rank: int
    world_size: int
    records: tuple[int, ...]
    wall_s: float
    dataset: str = ""


class Committed(msgspec.Struct, frozen=True, tag="commit"):
    """A step was committed by one worker."""

    generation: int
    step: int
    rank: int
    wall_s: float


class Entered(msgspec.Struct, frozen=True, tag="world"):
    """A worker entered a world."""

    generation: int
    rank: int
    world_size: int
    source: int
    commits: int
    copied: bool
    wall_s: float


Entry = Read | Committed | Entered


@dataclass
class Report:
    """What came of it."""

    steps: int = 0
    steps_lost: int = 0
    """Steps that had been committed and were done again."""
    generations: int = 0
    unseen_steps: int = 0
    """Committed steps of which some ranks' reads are not among the entries (they are on another node)."""
    missed: int = 0
    repeated: int = 0
    by_epoch: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Epoch → (missed, repeated)."""


def audit(
    entries: Iterable[Entry],
    records: Mapping[str, int],
    epochs: int,
    order: Literal["complete", "partial"] = "complete",
) -> Report:
    """Compare what was read with what should have been.

    `records`: dataset → number of records; only reads of these datasets count. With `order="partial"` a run
    that stopped early is not blamed for what it had not come to.
    """
    reads: dict[tuple[int, int], list[Read]] = {}
    winner: dict[int, int] = {}
    attempts: dict[int, set[int]] = {}
    generations: set[int] = set()
    for entry in entries:
        generations.add(entry.generation)
        if isinstance(entry, Read):
            if entry.dataset in records:
                reads.setdefault((entry.step, entry.generation), []).append(entry)
        elif isinstance(entry, Committed):
            winner[entry.step] = max(winner.get(entry.step, 0), entry.generation)
            attempts.setdefault(entry.step, set()).add(entry.generation)
    report = Report(
        steps=len(winner),
        steps_lost=sum(len(tried) - 1 for tried in attempts.values()),
        generations=len(generations),
    )
    counts: dict[tuple[str, int], Counter[int]] = {}
    for step, generation in winner.items():
        here = reads.get((step, generation), [])
        if here and len({read.rank for read in here}) < here[0].world_size:
            report.unseen_steps += 1
        for read in here:
            counts.setdefault((read.dataset, read.epoch), Counter()).update(read.records)
    for dataset, total in records.items():
        for epoch in range(epochs):
            seen = counts.get((dataset, epoch), Counter())
            missed = total - len(seen)
            if order == "partial" and epoch == max((e for d, e in counts if d == dataset), default=0):
                missed = 0
            repeated = sum(seen.values()) - len(seen)
            old = report.by_epoch.get(epoch, (0, 0))
            report.by_epoch[epoch] = (old[0] + missed, old[1] + repeated)
            report.missed += missed
            report.repeated += repeated
    return report


def audit_known(entries: list[Entry]) -> Report:
    """`audit` where only the entries are known: a dataset's size is what its first whole epoch read, and loaders
    whose batches belong to no commit (evaluation) are left out."""
    committed = {e.step for e in entries if isinstance(e, Committed)}
    reads = [e for e in entries if isinstance(e, Read) and e.step in committed]
    records: dict[str, int] = {}
    epochs = 0
    for read in reads:
        records[read.dataset] = max(records.get(read.dataset, 0), 1 + max(read.records, default=-1))
        epochs = max(epochs, read.epoch + 1)
    return audit(entries, records, epochs, "partial")
