"""What happened in a run, worked out from the workers' ledgers: plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from stoker.data.audit import Committed, Entered, Entry


class LedgerTail:
    """Reads what was added to a folder of ledgers since the last time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(Entry)

    def read_new(self) -> list[tuple[str, Entry]]:
        """New entries, each with its worker's name; a line that is not whole yet is left for later."""
        found: list[tuple[str, Entry]] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                whole = file.read()
            whole = whole[: whole.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            for line in whole.splitlines():
                try:
                    found.append((path.stem, self._decoder.decode(line)))
                except msgspec.MsgspecError:
                    continue
        return found


class Schedule(NamedTuple):
    """How steps map to records: the global batch is the same at every world size."""

    records: int
    global_batch_size: int
    epochs: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.records // self.global_batch_size)

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def epoch_of(self, step: int) -> int:
        """Epoch, from 0, of the step with this number, from 1."""
        return (step - 1) // self.steps_per_epoch

    def records_of(self, step: int) -> int:
        """Records of one step; the last of an epoch has fewer."""
        first = (step - 1) % self.steps_per_epoch * self.global_batch_size
        return min(self.global_batch_size, self.records - first)

    def records_in_epoch(self, epoch: int, steps_done: int) -> int:
        """Records of an epoch that the first `steps_done` steps of the run have read."""
        steps = max(0, min(steps_done - epoch * self.steps_per_epoch, self.steps_per_epoch))
        return min(steps * self.global_batch_size, self.records)


@dataclass(frozen=True)
class Stay:
    """One worker in one world."""

    worker: str
    generation: int
    rank: int
    world_size: int
    copied: bool
    """It received the state from another worker."""
    start_s: float
    end_s: float
    """Wall seconds; the end is its last commit there."""


@dataclass(frozen=True)
class Kill:
    """A worker that was killed on purpose."""

    worker: str
    rank: int
    pid: int
    generation: int
    wall_s: float


@dataclass(frozen=True)
class Recovery:
    """The first step of a world after a change of worlds."""

    generation: int
    committed_s: float
    """Wall seconds of its first commit."""
    pause_s: float
    """From the last commit of the world before to that."""
    workers: tuple[str, ...]


@dataclass
class Story:
    """Grows with each ledger entry."""

    commits: dict[int, dict[int, float]] = field(default_factory=dict)
    """Generation → step → wall seconds of its first commit there."""
    stays: dict[tuple[str, int], Stay] = field(default_factory=dict)

    def add(self, worker: str, entry: Entry) -> None:
        """Take one entry of one worker's ledger."""
        if isinstance(entry, Committed):
            steps = self.commits.setdefault(entry.generation, {})
            steps[entry.step] = min(steps.get(entry.step, entry.wall_s), entry.wall_s)
            stay = self.stays.get((worker, entry.generation))
            if stay is not None and entry.wall_s > stay.end_s:
                self.stays[worker, entry.generation] = _until(stay, entry.wall_s)
        elif isinstance(entry, Entered):
            self.stays[worker, entry.generation] = Stay(
                worker=worker,
                generation=entry.generation,
                rank=entry.rank,
                world_size=entry.world_size,
                copied=entry.copied,
                start_s=entry.wall_s,
                end_s=entry.wall_s,
            )

    @property
    def generation(self) -> int:
        """The newest that a worker has entered; 0 before the first."""
        return max((generation for _, generation in self.stays), default=0)

    @property
    def steps_done(self) -> int:
        """Number of the newest committed step."""
        return max((max(steps) for steps in self.commits.values()), default=0)

    def step_times(self) -> list[tuple[int, float]]:
        """(step, wall seconds) in the order of steps; of a step that was done twice, the time that counts."""
        counted: dict[int, float] = {}
        for generation in sorted(self.commits):
            counted.update(self.commits[generation])
        return sorted(counted.items())

    def recovery(self, kill: Kill) -> Recovery | None:
        """The first step that a later world than the killed worker's committed."""
        after = [g for g, steps in self.commits.items() if g > kill.generation and steps]
        return self._recovery(min(after)) if after else None

    def join(self, kill: Kill) -> Recovery | None:
        """The first step with a worker that was not there when the kill came."""
        before = {worker for worker, generation in self.stays if generation <= kill.generation}
        with_new = {g for worker, g in self.stays if worker not in before and self.commits.get(g)}
        return self._recovery(min(with_new)) if with_new else None

    def newcomers(self, kill: Kill) -> set[str]:
        """Workers that entered a world after the kill and none before."""
        before = {worker for worker, generation in self.stays if generation <= kill.generation}
        return {worker for worker, _ in self.stays} - before

    def _recovery(self, generation: int) -> Recovery:
        first = min(self.commits[generation].values())
        earlier = [max(steps.values()) for g, steps in self.commits.items() if g < generation and steps]
        members = sorted((s.rank, s.worker) for s in self.stays.values() if s.generation == generation)
        return Recovery(
            generation=generation,
            committed_s=first,
            pause_s=first - max(earlier, default=first),
            workers=tuple(worker for _, worker in members),
        )


def _until(stay: Stay, end_s: float) -> Stay:
    return Stay(stay.worker, stay.generation, stay.rank, stay.world_size, stay.copied, stay.start_s, end_s)


def throughput(
    times: Iterable[tuple[int, float]], schedule: Schedule, start_s: float, end_s: float, bins: int
) -> list[tuple[float, float]]:
    """(seconds since `start_s`, samples per second) for `bins` equal stretches of time, at their middles."""
    width_s = (end_s - start_s) / bins
    if width_s <= 0:
        return []
    sums = [0] * bins
    for step, wall_s in times:
        place = int((wall_s - start_s) / width_s)
        if 0 <= place <= bins:
            sums[min(place, bins - 1)] += schedule.records_of(step)
    return [((place + 0.5) * width_s, total / width_s) for place, total in enumerate(sums)]


def epoch_spans(times: list[tuple[int, float]], schedule: Schedule) -> list[tuple[float, float]]:
    """Wall seconds of each epoch: from the commit before its first step (or that step) to its last commit."""
    spans: list[tuple[float, float]] = []
    for epoch in range(schedule.epochs):
        inside = [wall_s for step, wall_s in times if schedule.epoch_of(step) == epoch]
        if inside:
            spans.append((spans[-1][1] if spans else inside[0], inside[-1]))
    return spans
