"""Where the time of a loader's loops went, epoch by epoch, and what would help. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.base.units import format_bytes
from stoker.data.waiting import CAUSES, added

EPOCHS_KEPT = 1000
_FIRST_SHOWN, _LAST_SHOWN = 4, 3
_FEW = 0.05
"""A loop that waits for less of its time has nothing to gain."""
_SEEN_S = 0.005


class CacheFigures(NamedTuple):
    """What a cache server says of a bucket: over all of its readers, since the server was started."""

    hits: int = 0
    misses: int = 0
    origin_bytes: int = 0
    origin_requests: int = 0
    peer_bytes: int = 0

    def since(self, before: CacheFigures) -> CacheFigures | None:
        """The difference; None where the server was started anew in between."""
        less = CacheFigures(*(now - then for now, then in zip(self, before, strict=True)))
        return less if min(less) >= 0 else None


@dataclass
class Epoch:
    """Loops over one epoch, or what several come to. All is of this rank, except `cache`."""

    number: int
    steps: int = 0
    records: int = 0
    size_bytes: int = 0
    wall_s: float = 0.0
    waited_s: float = 0.0
    busy_s: float = 0.0
    """Of all loader processes, on batches."""
    available_s: float = 0.0
    """Of all loader processes, altogether."""
    waiting: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    cache: CacheFigures | None = None

    @property
    def computed_s(self) -> float:
        """What the loop did between its batches."""
        return max(0.0, self.wall_s - self.waited_s)

    @property
    def busy_share(self) -> float:
        return self.busy_s / self.available_s if self.available_s > 0 else 0.0

    @property
    def origin_bytes_per_s(self) -> float:
        """What came from the origin, over the time since the loop was started."""
        going_s = self.wall_s - self.waiting["starting_s"]
        return self.cache.origin_bytes / going_s if self.cache is not None and going_s > 0 else 0.0

    @property
    def hit_ratio(self) -> float | None:
        """Of all that was asked for; None: not known."""
        asked = 0 if self.cache is None else self.cache.hits + self.cache.misses
        return self.cache.hits / asked if self.cache is not None and asked else None

    def settled(self) -> dict[str, float]:
        """`waiting`, by what the cache says: where nothing came from the origin nor from another server, an answer that
        was not at hand was the cache's own, which looks at what it has held since before it was started."""
        waiting, cache = dict(self.waiting), self.cache
        if cache is not None and not (cache.origin_bytes or cache.origin_requests or cache.peer_bytes):
            waiting["cache_s"] += waiting["origin_s"]
            waiting["origin_s"] = 0.0
        return waiting

    def as_dict(self) -> dict[str, Any]:
        """Every figure, by name."""
        return {
            "epoch": self.number,
            "steps": self.steps,
            "records": self.records,
            "size_bytes": self.size_bytes,
            "wall_s": self.wall_s,
            "computed_s": self.computed_s,
            "waited_s": self.waited_s,
            "waiting": self.settled(),
            "busy_share": self.busy_share,
            "origin_bytes": None if self.cache is None else self.cache.origin_bytes,
            "origin_bytes_per_s": None if self.cache is None else self.origin_bytes_per_s,
            "peer_bytes": None if self.cache is None else self.cache.peer_bytes,
            "hit_ratio": self.hit_ratio,
        }


class Report(NamedTuple):
    """Of one loader on one rank. As text it is what is printed at the end."""

    loader: str
    rank: int
    world_size: int
    num_workers: int
    cores: int
    epochs: Sequence[Epoch]

    @property
    def total(self) -> Epoch:
        """All epochs as one."""
        return total_of(self.epochs)

    @property
    def verdict(self) -> str:
        """What the limit was, and what would help."""
        return verdict_of(self.epochs, self.num_workers, self.cores)

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        return {
            "loader": self.loader,
            "rank": self.rank,
            "world_size": self.world_size,
            "num_workers": self.num_workers,
            "epochs": [epoch.as_dict() for epoch in self.epochs],
            "total": self.total.as_dict(),
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        total = self.total
        rank = "" if self.world_size == 1 else f" (rank {self.rank} of {self.world_size})"
        share = total.waited_s / total.wall_s if total.wall_s > 0 else 0.0
        head = (
            f"loader {self.loader}{rank}: {total.steps} steps, {total.records} records, "
            f"{format_bytes(total.size_bytes)} in {_seconds(total.wall_s)} s: computed {_seconds(total.computed_s)} s, "
            f"waited {_seconds(total.waited_s)} s ({share:.0%})"
        )
        return "\n".join([head, *_table(self.epochs, total), f"  {self.verdict}"])


def total_of(epochs: Sequence[Epoch]) -> Epoch:
    """All as one."""
    total = Epoch(epochs[-1].number if epochs else 0, waiting=added(epoch.settled() for epoch in epochs))
    for name in ("steps", "records", "size_bytes", "wall_s", "waited_s", "busy_s", "available_s"):
        setattr(total, name, sum(getattr(epoch, name) for epoch in epochs))
    figures = [epoch.cache for epoch in epochs if epoch.cache is not None]
    if figures:
        total.cache = CacheFigures(*map(sum, zip(*figures, strict=True)))
    return total


def verdict_of(epochs: Sequence[Epoch], num_workers: int, cores: int) -> str:
    """What the limit was, and what would help: one line."""
    total = total_of(epochs)
    if not total.steps:
        return "no step was made"
    share = total.waited_s / total.wall_s if total.wall_s > 0 else 0.0
    if share < _FEW:
        return f"the loop's own work was the limit: it waited for {share:.1%} of the time"
    waiting = total.waiting
    groups = {
        "starting": waiting["starting_s"] + waiting["not_begun_s"],
        "origin": waiting["origin_s"],
        "cache": waiting["cache_s"],
        "making": sum(waiting[name] for name in ("reading_s", "decoding_s", "samples_s", "collating_s")),
        "handing over": waiting["hand_over_s"] + waiting["pinning_s"],
    }
    limit = max(groups, key=lambda name: groups[name])
    seconds = _of_waiting(groups[limit], total)
    match limit:
        case "origin":
            return _of_origin(epochs, seconds)
        case "making":
            return _of_making(total, num_workers, cores)
        case "cache":
            return f"the cache server was the limit ({seconds}): {_more(num_workers, cores)}, or have it on this node"
        case "starting":
            return f"starting was most of it ({seconds}): processes and the dataset's index, once a run"
    mend = "samples of tensors or arrays cross without being copied; bytes do not"
    return f"the way from the loader's processes was the limit ({seconds}): {mend}"


def _of_origin(epochs: Sequence[Epoch], seconds: str) -> str:
    cold = total_of([epoch for epoch in epochs if epoch.cache is not None and epoch.cache.origin_bytes])
    if cold.cache is None:
        return f"the origin was the limit ({seconds})"
    said = f"the origin was the limit: {format_bytes(cold.origin_bytes_per_s)}/s ({seconds})"
    last, first = epochs[-1].cache, epochs[0].cache
    if len(epochs) > 1 and last is not None and first is not None:
        if first.origin_bytes and last.origin_bytes * 10 > first.origin_bytes:
            return f"{said}: later epochs read it again, so give the cache more room (STOKER_CACHE_CAPACITY)"
        return f"{said}: later epochs did not need it; `stoker cache load` before the run spares the first"
    return f"{said}: what the cache holds is not read from there again"


def _of_making(total: Epoch, num_workers: int, cores: int) -> str:
    parts = {
        "taking records out of files": total.waiting["reading_s"],
        "decoding": total.waiting["decoding_s"],
        "the dataset": total.waiting["samples_s"],
        "collating": total.waiting["collating_s"],
    }
    part = max(parts, key=lambda name: parts[name])
    seconds = _of_waiting(parts[part], total)
    busy = f", processes busy {total.busy_share:.0%}" if num_workers else ""
    return f"{part} was the limit ({seconds}{busy}): {_more(num_workers, cores)}, or make it cheaper"


def _of_waiting(seconds: float, total: Epoch) -> str:
    return f"{_seconds(seconds)} of {_seconds(total.waited_s)} s of waiting"


def _more(num_workers: int, cores: int) -> str:
    if num_workers == 0:
        return f"give num_workers={max(1, cores - 1)}, which read beside the loop"
    if num_workers < cores:
        return f"give more than num_workers={num_workers} (there are {cores} cores)"
    return f"num_workers={num_workers} already fill {cores} cores"


def _table(epochs: Sequence[Epoch], total: Epoch) -> list[str]:
    shown = [cause for cause in CAUSES if total.waiting[cause] >= max(_SEEN_S, 0.01 * total.waited_s)]
    rows = [["epoch", "wall", "computed", "waited", *(CAUSES[cause] for cause in shown)]]
    if total.cache is not None:
        rows[0] += ["from origin", "hits"]
    hidden = max(0, len(epochs) - _FIRST_SHOWN - _LAST_SHOWN)
    hidden = 0 if hidden == 1 else hidden
    for place, epoch in enumerate(epochs):
        if place == _FIRST_SHOWN and hidden:
            rows.append(_row("...", total_of(epochs[_FIRST_SHOWN : _FIRST_SHOWN + hidden]), shown, total))
        if not (hidden and _FIRST_SHOWN <= place < _FIRST_SHOWN + hidden):
            rows.append(_row(str(epoch.number), epoch, shown, total))
    if len(epochs) > 1:
        rows.append(_row("all", total, shown, total))
        if total.cache is not None:
            rows[-1][-2] = format_bytes(
                total.cache.origin_bytes
            )  # over which of the times, it would have to say
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"  {line}" for line in lines]


def _row(name: str, epoch: Epoch, shown: Sequence[str], total: Epoch) -> list[str]:
    waiting = epoch.settled()
    seconds = [epoch.wall_s, epoch.computed_s, epoch.waited_s, *(waiting[cause] for cause in shown)]
    row = [name, *map(_seconds, seconds)]
    if total.cache is None:
        return row
    if epoch.cache is None:
        return [*row, "?", "?"]
    came = format_bytes(epoch.cache.origin_bytes)
    if epoch.cache.origin_bytes:
        came += f", {format_bytes(epoch.origin_bytes_per_s)}/s"
    return [*row, came, "-" if epoch.hit_ratio is None else f"{epoch.hit_ratio:.0%}"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"
