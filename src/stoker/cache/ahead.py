"""How far to fetch ahead of those who read a file that is not here. Pure.

Files are read from a place on, or here and there. A run is a place that is read on from: a block that follows the last
is a sign of it, also if those in between were found without asking. Who reads on gets blocks fetched ahead, at first a
few and with each further sign twice as many, as the Linux kernel does for its page cache (Wu et al., "On the design of
a new Linux readahead framework", 2008); a block of no run begins one, of which nothing is fetched yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

F = TypeVar("F", bound=Hashable)
FILES_MAX = 1024
RUNS_MAX = 8
FOLLOWS_WITHIN = 8
"""A run goes on within so many strides of what was looked at."""
ACTIVE_S = 60.0
"""So long after the last sign a run has its share of what may be fetched ahead."""
BARRED_ASKS = 64
"""So many questions about a file have nothing fetched ahead, once something could not be kept."""


class Limits(NamedTuple):
    """For one file: how many blocks are fetched at a time, and how far from what was asked for last, which all that is
    read on shares. `stride`: of so many blocks one is wanted; the others are other servers'. `starts`: how many fetches
    may be begun at once."""

    streams: int
    distance_blocks: int
    stride: int = 1
    starts: int = 1_000_000


class Ahead(NamedTuple):
    """Blocks to fetch now, and why."""

    blocks: tuple[int, ...]
    why: str


class _Run:
    __slots__ = ("asked_at", "at", "last", "until", "window")

    def __init__(self, block: int) -> None:
        self.last = block
        self.at = block + 1
        self.until = block + 1
        self.window = 0
        self.asked_at = 0.0


class _File:
    __slots__ = ("barred", "running", "runs")

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self.running = 0
        self.barred = 0


class ReadAhead(Generic[F]):
    """What is read on of many files. `wants(block)`, which each step is given: whether a block is to be fetched."""

    def __init__(self) -> None:
        self._files: OrderedDict[F, _File] = OrderedDict()
        self._active: OrderedDict[_Run, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def asked(
        self, name: F, block: int, count: int, limits: Limits, wants: Callable[[int], bool], now: float
    ) -> Ahead:
        """A reader asked for a block that is not here yet. `count`: of the file's blocks."""
        file = self._files.setdefault(name, _File())
        self._files.move_to_end(name)
        self._forget_oldest()
        if file.barred:
            file.barred -= 1
            return Ahead((), "what was fetched of it could not be kept")
        follows = FOLLOWS_WITHIN * limits.stride
        run = next((run for run in file.runs if run.last <= block < run.at + follows), None)
        if run is None:
            file.runs.insert(0, _Run(block))
            del file.runs[RUNS_MAX:]
            return Ahead((), "the first block of a run")
        if block == run.last:
            return Ahead((), "asked for once more")
        file.runs.remove(run)
        file.runs.insert(0, run)
        run.last = block
        run.at = max(run.at, block + 1)
        distance_blocks = limits.distance_blocks // self._share(run, now)
        run.window = min(max(limits.streams * limits.stride, 2 * run.window), distance_blocks)
        run.until = max(run.until, min(count, block + 1 + run.window))
        return self._more(file, limits, wants)

    def came(self, name: F, limits: Limits, wants: Callable[[int], bool]) -> Ahead:
        """A block that was fetched ahead is here, or nearly."""
        file = self._files.get(name)
        if file is None:
            return Ahead((), "it is not read any more")
        self.left(name)
        return self._more(file, limits, wants)

    def left(self, name: F) -> None:
        """A block that was fetched ahead comes no more."""
        file = self._files.get(name)
        if file is not None:
            file.running = max(0, file.running - 1)

    def stop(self, name: F) -> None:
        """What is fetched of a file cannot be kept: nothing more is for a while."""
        file = self._files.get(name)
        if file is not None:
            file.runs.clear()
            file.barred = BARRED_ASKS

    def _share(self, run: _Run, now: float) -> int:
        """How many runs there are for what may be fetched ahead."""
        run.asked_at = now
        self._active[run] = None
        self._active.move_to_end(run)
        while next(iter(self._active)).asked_at < now - ACTIVE_S:
            self._active.popitem(last=False)
        return len(self._active)

    def _more(self, file: _File, limits: Limits, wants: Callable[[int], bool]) -> Ahead:
        blocks: list[int] = []
        for run in file.runs:
            while run.at < run.until and file.running < limits.streams and len(blocks) < limits.starts:
                if wants(run.at):
                    blocks.append(run.at)
                    file.running += 1
                run.at += 1
        return Ahead(tuple(blocks), "it is read on")

    def _forget_oldest(self) -> None:
        while len(self._files) > FILES_MAX:
            idle = next((name for name, file in self._files.items() if not file.running), None)
            self._files.pop(next(iter(self._files)) if idle is None else idle)
