"""Was every record of every epoch read exactly once? A pure function of what the workers wrote down. PURE.

Each worker notes every batch that it hands to the training loop (`Read`) and every commit (`Committed`). A step
may have been done twice, when all who had committed it died; then only the newest generation that committed it
counts, because its state is the one that lives on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
    cursor: int = 0
    """Records of the epoch that the world had read after this batch."""
    total: int = 0
    """Records of a whole epoch."""


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


def audit(entries: Iterable[Entry], records: Mapping[str, int], epochs: int) -> Report:
    """Compare what was read with what should have been: every record of `epochs` epochs.

    `records`: dataset → number of records; only reads of these datasets count.
    """
    return _compare(list(entries), {(d, e): n for d, n in records.items() for e in range(epochs)})


def audit_known(entries: list[Entry]) -> Report:
    """`audit` where only the entries are known: whole epochs, but the last one only as far as the run came. Reads that
    belong to no commit (evaluation) are left out."""
    committed = {(e.step, e.generation) for e in entries if isinstance(e, Committed)}
    reads = [e for e in entries if isinstance(e, Read) and (e.step, e.generation) in committed]
    expected: dict[tuple[str, int], int] = {}
    for read in reads:
        expected[read.dataset, read.epoch] = max(expected.get((read.dataset, read.epoch), 0), read.cursor)
    for dataset, epoch in list(expected):
        if (dataset, epoch + 1) in expected:
            expected[dataset, epoch] = max(r.total for r in reads if r.dataset == dataset)
    return _compare(entries, expected)


def _compare(entries: list[Entry], expected: Mapping[tuple[str, int], int]) -> Report:
    """`expected`: (dataset, epoch) → how many different records should have been read."""
    datasets = {dataset for dataset, _ in expected}
    reads: dict[tuple[int, int], list[Read]] = {}
    winner: dict[int, int] = {}
    attempts: dict[int, set[int]] = {}
    for entry in entries:
        if isinstance(entry, Read) and entry.dataset in datasets:
            reads.setdefault((entry.step, entry.generation), []).append(entry)
        elif isinstance(entry, Committed):
            winner[entry.step] = max(winner.get(entry.step, 0), entry.generation)
            attempts.setdefault(entry.step, set()).add(entry.generation)
    report = Report(
        steps=len(winner),
        steps_lost=sum(len(tried) - 1 for tried in attempts.values()),
        generations=len({entry.generation for entry in entries}),
    )
    counts: dict[tuple[str, int], Counter[int]] = {}
    for step, generation in winner.items():
        here = reads.get((step, generation), [])
        if here and len({read.rank for read in here}) < here[0].world_size:
            report.unseen_steps += 1
        for read in here:
            counts.setdefault((read.dataset, read.epoch), Counter()).update(read.records)
    for (dataset, epoch), total in expected.items():
        seen = counts.get((dataset, epoch), Counter())
        missed, repeated = max(0, total - len(seen)), sum(seen.values()) - len(seen)
        before = report.by_epoch.get(epoch, (0, 0))
        report.by_epoch[epoch] = (before[0] + missed, before[1] + repeated)
        report.missed += missed
        report.repeated += repeated
    return report
