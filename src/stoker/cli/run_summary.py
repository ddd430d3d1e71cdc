"""Where the time of a job went, by its event log: what the machine decided when, and what its workers say of theirs.

`stoker run` tells it at the end, `stoker job summary` at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from stoker.base.units import format_duration
from stoker.data.loader_report import Epoch, verdict_of
from stoker.data.waiting import CAUSES
from stoker.wire.control import JobEvent

_SEEN_SHARE = 0.02
_FIGURES = ("rank", "steps", "loops_s", "waited_s", "busy_s", "available_s", "num_workers", "cores")


class Ranks(msgspec.Struct, frozen=True):
    """What the workers say that came to the end of their script. Ranks wait for each other in every step, so what the
    job lost is at least what the one lost that waited for data most: `waiting` and `verdict` are about that one."""

    workers: int
    slowest: int
    """The rank that waited most."""
    waited_s: float
    """For data, by that one."""
    waited_mean_s: float
    """On average."""
    checkpoint_s: float
    """Writing checkpoints, by the one that did most of it."""
    records: int
    """Of all together."""
    size_bytes: int
    waiting: dict[str, float]
    """`waited_s` by cause."""
    verdict: str


class Summary(msgspec.Struct, frozen=True):
    """Of a job so far. The first three parts make the whole."""

    total_s: float
    starting_s: float
    """Until the first world stood."""
    changing_s: float
    """From the naming of a later generation until its world stood: failures, joins, leaves."""
    training_s: float
    """In worlds."""
    steps_s: float
    """Of training: without what one rank waited for data, and checkpoints."""
    changes: int
    """Of the world, after the first one."""
    commits_lost: int
    """Steps that were committed, and done again."""
    has_worlds: bool
    """Scripts that ask for no world have none: then nothing is known of their steps."""
    has_ended: bool
    ranks: Ranks | None = None
    """None: no worker has come to its end, or none has a loader."""

    def __str__(self) -> str:
        parts = [f"starting {format_duration(self.starting_s)}"]
        if self.changes:
            count = "1 change" if self.changes == 1 else f"{self.changes} changes"
            parts.append(f"{count} of the world {format_duration(self.changing_s)}")
        lines = []
        if (ranks := self.ranks) is not None:
            if ranks.checkpoint_s:
                parts.append(f"checkpoints {format_duration(ranks.checkpoint_s)}")
            parts.append(f"waiting for data {format_duration(ranks.waited_s)}{_causes(ranks)}")
            who = (
                f"rank {ranks.slowest} of {ranks.workers}, {format_duration(ranks.waited_mean_s)} on average"
            )
            lines.append(f"  data ({who}): {ranks.verdict}")
        if not self.has_worlds:
            total = format_duration(self.total_s)
            return "\n".join([f"{total} in all: no world stood, so nothing is known of steps", *lines])
        share = self.steps_s / self.total_s if self.total_s > 0 else 0.0
        parts.append(f"steps {format_duration(self.steps_s)} ({share:.0%})")
        lost = f"; {self.commits_lost} commits were lost and done again" if self.commits_lost else ""
        return "\n".join([f"{format_duration(self.total_s)} in all: {', '.join(parts)}{lost}", *lines])


def summary_of(events: Iterable[JobEvent]) -> Summary:
    """Of a job's events, oldest first."""
    spent = {"starting": 0.0, "changing": 0.0, "training": 0.0}
    doing, began, since, now = "starting", None, 0.0, 0.0
    changes = lost = 0
    has_worlds = has_ended = False
    told: dict[str, Mapping[str, Any]] = {}
    for event in events:
        if began is None:
            began = since = now = event.wall_s
        if has_ended:
            break
        now = max(now, event.wall_s)  # clocks of several masters
        before = doing
        match event.kind:
            case "generation" if has_worlds:
                changes += before == "training"
                doing = "changing"
            case "world":
                lost += int(event.details.get("commits_lost", 0))
                doing, has_worlds = "training", True
            case "time-spent":
                told[str(event.details.get("worker"))] = event.details.get("figures", {})
            case "ended":
                has_ended = True
        if doing != before or has_ended:
            spent[before] += now - since
            since = now
    spent[doing] += now - since
    ranks = _ranks(told.values())
    less_s = 0.0 if ranks is None else ranks.waited_s + ranks.checkpoint_s
    return Summary(
        total_s=now - (now if began is None else began),
        starting_s=spent["starting"],
        changing_s=spent["changing"],
        training_s=spent["training"],
        steps_s=max(0.0, spent["training"] - less_s),
        changes=changes,
        commits_lost=lost,
        has_worlds=has_worlds,
        has_ended=has_ended,
        ranks=ranks,
    )


def _ranks(told: Iterable[Mapping[str, Any]]) -> Ranks | None:
    known = [figures for figures in told if isinstance(figures, Mapping)]
    if not known:
        return None

    def each(name: str) -> list[float]:
        return [float(figures.get(name, 0.0)) for figures in known]

    waits = each("waited_s")
    place = waits.index(max(waits))
    one = {name: each(name)[place] for name in (*_FIGURES, *CAUSES)}
    waiting = {cause: one[cause] for cause in CAUSES}
    epoch = Epoch(
        number=0,
        steps=int(one["steps"]),
        wall_s=one["loops_s"],
        waited_s=one["waited_s"],
        busy_s=one["busy_s"],
        available_s=one["available_s"],
        waiting=waiting,
    )
    return Ranks(
        workers=len(known),
        slowest=int(one["rank"]),
        waited_s=one["waited_s"],
        waited_mean_s=sum(waits) / len(waits),
        checkpoint_s=max(each("checkpoint_s")),
        records=int(sum(each("records"))),
        size_bytes=int(sum(each("size_bytes"))),
        waiting=waiting,
        verdict=verdict_of([epoch], int(one["num_workers"]), int(one["cores"])),
    )


def _causes(ranks: Ranks) -> str:
    seen = [
        f"{CAUSES[cause]} {format_duration(seconds)}"
        for cause, seconds in sorted(ranks.waiting.items(), key=lambda item: -item[1])
        if seconds > _SEEN_SHARE * ranks.waited_s
    ]
    return f" ({', '.join(seen)})" if seen else ""
