"""`loader.stats`: how long the loop waited for data, and what for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.base.units import format_bytes
from stoker.data.loader_account import Account
from stoker.data.loader_report import Report
from stoker.data.waiting import CAUSES, Times, causes

WAITS_KEPT = 10_000
Figures = Callable[[], Mapping[str, float]]


@dataclass
class LoaderStats:
    """Since the loader was made, or since `reset`. `print(loader.stats)` tells it; `as_dict()` for a program.

    A wait is divided by what was being done meanwhile for the batch that the loop waited for, wherever it was made:

    - `starting_s`: an index was built or opened, processes were starting
    - `not_begun_s`: it was not begun yet: processes were at batches that are not wanted any more, or had no turn
    - `origin_s`, `cache_s`: the cache was read, for what it had not at hand, and for what it had
    - `reading_s`: records were taken out of what was read, or a database was asked
    - `decoding_s`: samples were made of them; `samples_s` for datasets that do not tell any of these apart
    - `collating_s`: samples were put together into the batch
    - `hand_over_s`: on its way to this process; `pinning_s`: it was copied to pinned memory
    """

    loader: str = ""
    num_workers: int = 0
    steps: int = 0
    records: int = 0
    """Of this rank's shares."""
    size_bytes: int = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0
    elapsed_s: float = 0.0
    """In loops over the loader, from the first request to the last batch."""
    busy_s: float = 0.0
    """Seconds that were spent on batches, over all workers."""
    available_s: float = 0.0
    """Seconds that workers were there meanwhile."""
    waiting: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """`waited_s` by cause."""
    waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=WAITS_KEPT))
    """Of each step; the last 10,000."""
    figures: dict[str, Figures] = field(default_factory=dict)
    """What others know of this loader's data, such as the cache's prefetching: name → asked when it is told."""
    account: Account = field(init=False)
    """The same by epoch."""

    def __post_init__(self) -> None:
        self.account = Account(self.loader)

    def summary(self) -> Report:
        """Where the time went, epoch by epoch, and what would help: to be printed; `as_dict()` for a program."""
        return self.account.report()

    @property
    def last_wait_s(self) -> float:
        """The wait for the step that was handed out last."""
        return self.waits_s[-1] if self.waits_s else 0.0

    @property
    def wait_share(self) -> float:
        """Of the time in loops."""
        return self.waited_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def busy_share(self) -> float:
        """Of the workers' time that went into batches: near 1 more of them would help."""
        return self.busy_s / self.available_s if self.available_s > 0 else 0.0

    def note(self, began_s: float, ended_s: float, times: Times, records: int, size_bytes: int) -> None:
        """The loop has waited from `began_s` to `ended_s` for a batch."""
        wait = ended_s - began_s
        self.steps += 1
        self.records += records
        self.size_bytes += size_bytes
        self.waited_s += wait
        self.longest_wait_s = max(self.longest_wait_s, wait)
        self.waits_s.append(wait)
        self.busy_s += times.collated_s - times.began_s
        for cause, seconds in causes(began_s, ended_s, times):
            self.waiting[cause] += seconds
        self.account.note(began_s, ended_s, times, records, size_bytes)

    def ran(self, seconds: float, num_workers: int) -> None:
        """A loop went on for so long."""
        self.elapsed_s += seconds
        self.available_s += seconds * max(1, num_workers)
        self.num_workers = num_workers
        self.account.ran(seconds, num_workers)

    def reset(self) -> None:
        """Begin anew."""
        fresh = LoaderStats(self.loader, self.num_workers, figures=self.figures)
        account = self.account
        account.clear()
        self.__dict__.update(fresh.__dict__)
        self.account = account

    def as_dict(self) -> dict[str, Any]:
        """Every figure, by name."""
        return {
            "loader": self.loader,
            "num_workers": self.num_workers,
            "steps": self.steps,
            "records": self.records,
            "size_bytes": self.size_bytes,
            "elapsed_s": self.elapsed_s,
            "waited_s": self.waited_s,
            "wait_share": self.wait_share,
            "last_wait_s": self.last_wait_s,
            "longest_wait_s": self.longest_wait_s,
            "busy_share": self.busy_share,
            "waiting": dict(self.waiting),
            **{name: dict(asked()) for name, asked in self.figures.items()},
        }

    def __str__(self) -> str:
        steps = max(1, self.steps)
        causes = [
            f"{words} {self.waiting[cause]:.2f} s"
            for cause, words in CAUSES.items()
            if self.waiting[cause] >= 0.005
        ]
        lines = [
            f"loader {self.loader}: {self.steps} steps, {self.records} records, {format_bytes(self.size_bytes)} in "
            f"{self.elapsed_s:.2f} s",
            f"  waited   {self.waited_s:.2f} s ({self.wait_share:.0%}): {1000 * self.waited_s / steps:.2f} ms a step, "
            f"at most {1000 * self.longest_wait_s:.0f} ms",
            f"  for      {', '.join(causes) or 'nothing'}",
            f"  workers  {self.num_workers or 'none, read in the loop'}, busy {self.busy_share:.0%}",
        ]
        for name, asked in self.figures.items():
            lines.append(f"  {name:<8} " + ", ".join(f"{key} {value:g}" for key, value in asked().items()))
        return "\n".join(lines)
