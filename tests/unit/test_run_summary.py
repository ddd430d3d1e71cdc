"""Where a job's time went, by its events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stoker.cli.run_summary import Summary, summary_of
from stoker.wire.control import JobEvent


def log(*lines: tuple[float, str, dict[str, Any]]) -> list[JobEvent]:
    return [
        JobEvent(seq=number, wall_s=1000.0 + at, kind=kind, why="", details=details)
        for number, (at, kind, details) in enumerate(lines, 1)
    ]


def spent(worker: str, rank: int, **figures: float) -> dict[str, Any]:
    return {"worker": worker, "figures": {"rank": rank, "steps": 10, "loops_s": 30, "cores": 4, **figures}}


STORY = [
    (0, "waiting", {}),
    (1, "generation", {}),
    (5, "world", {"commits_lost": 0}),
    (20, "worker-replace", {}),
    (20, "generation", {}),
    (21, "generation", {}),
    (22, "world", {"commits_lost": 3}),
    (60, "time-spent", spent("w0", 0, waited_s=4, origin_s=4, checkpoint_s=1)),
    (60, "time-spent", spent("w1", 1, waited_s=10, decoding_s=8, origin_s=2, num_workers=2, checkpoint_s=0)),
    (62, "ended", {"success": True}),
    (63, "node-lost", {}),
]


def test_the_parts_make_the_whole() -> None:
    summary = summary_of(log(*STORY))
    assert (summary.total_s, summary.starting_s, summary.changing_s, summary.training_s) == (62, 5, 2, 55)
    assert summary.starting_s + summary.changing_s + summary.training_s == summary.total_s
    assert (summary.changes, summary.commits_lost, summary.has_worlds, summary.has_ended) == (
        1,
        3,
        True,
        True,
    )
    assert summary.steps_s == 55 - 10 - 1
    assert summary.ranks is not None
    assert (summary.ranks.slowest, summary.ranks.waited_s, summary.ranks.waited_mean_s) == (1, 10, 7)
    assert {name: s for name, s in summary.ranks.waiting.items() if s} == {"decoding_s": 8, "origin_s": 2}
    text = str(summary)
    assert text.splitlines()[0] == (
        "1 min 2 s in all: starting 5.0 s, 1 change of the world 2.0 s, checkpoints 1.0 s, waiting for data 10.0 s "
        "(decoding 8.0 s, origin 2.0 s), steps 44.0 s (71%); 3 commits were lost and done again"
    )
    assert "rank 1 of 2, 7.0 s on average" in text
    assert "decoding was the limit" in text
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


def test_nothing_is_said_of_the_steps_of_a_job_without_worlds() -> None:
    told = (60, "time-spent", spent("w0", 0, waited_s=10, origin_s=10))
    summary = summary_of(log((0, "waiting", {}), (1, "generation", {}), told, (3600, "ended", {})))
    first, second = str(summary).splitlines()
    assert first == "1 h 0 min in all: no world stood, so nothing is known of steps"
    assert "data (rank 0 of 1" in second


@pytest.mark.parametrize("count", range(len(STORY) + 1))
def test_a_job_that_goes_on_can_be_told_of(count: int) -> None:
    summary = summary_of(log(*STORY[:count]))
    parts = summary.starting_s + summary.changing_s + summary.training_s
    assert parts == pytest.approx(summary.total_s)
    assert summary.has_ended == (count >= 10)
    assert " in all: " in str(summary)


def test_a_worker_that_tells_again_counts_once_and_clocks_may_go_back() -> None:
    first = (6.0, "time-spent", spent("w0", 0, waited_s=3, origin_s=3))
    again = (9.0, "time-spent", spent("w0", 0, waited_s=5, origin_s=5))
    summary = summary_of(log((0, "waiting", {}), (5, "world", {}), first, (2, "node-back", {}), again))
    assert (summary.total_s, summary.training_s) == (9, 4)
    assert summary.ranks is not None
    assert (summary.ranks.workers, summary.ranks.waited_s) == (1, 5)
    assert summary.steps_s == 0  # what was waited in a world before its worker told of it


def test_scripts_without_worlds_have_no_steps_to_tell_of() -> None:
    plain = summary_of(log((0, "waiting", {}), (1, "generation", {}), (9, "ended", {})))
    assert (plain.has_worlds, plain.changes, plain.training_s, plain.ranks) == (False, 0, 0, None)
