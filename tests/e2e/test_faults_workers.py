"""What can happen to single workers, one after the other in one job over two hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.faults import Job, is_by_beats, job_over, kill_at_once, runs_on
from tests.e2e.hosts import freeze, kill, needs_hosts

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(400)]


def test_a_worker_is_lost_in_every_way_and_the_others_keep_their_processes(tmp_path: Path) -> None:
    flags = ("--relaunch-errors", "--max-restarts", "20", "--hang-after", "3s")
    with job_over(tmp_path, 2, "2", *flags, slots=2) as job:
        first, second = job.hosts
        job.start(first, second)
        job.wait_for_world(4)

        for fault in (is_killed, raises, is_stopped, hangs):
            before, generation = job.pids(), job.generation()
            victim = job.worker(second, 1)
            fault(job)
            job.wait_for_world(4, after=generation)
            assert not runs_on(victim), fault
            assert before - {victim.pid} <= job.pids(), "the others keep their processes"
            assert len(job.pids()) == 4

        before, generation = job.pids(), job.generation()
        lost = job.pids(second)
        kill_at_once(*second.workers())
        job.wait_for_world(4, after=generation)
        assert before - lost <= job.pids()
        assert not lost & job.pids()
        replaced = [e.details["reason"] for e in job.events("worker-replace")]
        assert replaced == ["evicted", "user-error", "stopped", "hung", "evicted", "evicted"]
        job.finish()
        job.assert_exact(steps_lost=5)


def is_killed(job: Job) -> None:
    kill(job.worker(job.hosts[1], 1))
    event = job.wait_for_event("worker-replace")
    assert "killed by SIGKILL" in event.why


def raises(job: Job) -> None:
    job.order(job.hosts[1], "raise", slot=1)
    event = job.wait_for_event("worker-replace", words="exited with code 1")
    assert event.details["reason"] == "user-error"


def is_stopped(job: Job) -> None:
    """The beat timeout decides, not the user's, which is a minute."""
    freeze(job.worker(job.hosts[1], 1))
    event = job.wait_for_event("worker-stopped")
    assert "was stopped (state T) for" in event.why
    assert is_by_beats(event.why), event


def hangs(job: Job) -> None:
    job.wait_for_steps(30)  # first steps may compile: for them the limit is the user's timeout
    job.order(job.hosts[1], "hang", slot=1)
    event = job.wait_for_event("hang")
    assert "stands in hang_for_ever" in event.why
    assert "hang_for_ever" in event.details["stacks"]
    assert "obedient.py" in event.details["stacks"]
    _, _, world = event.details["stacks"].partition("\n\nall ranks:\n")
    shown = re.findall(r"^ranks? ([0-9, -]+):((?:\n  File .*)+)", world, re.MULTILINE)
    calls = {rank: text for ranks, text in shown for rank in ranks_in(ranks)}
    assert sorted(calls) == [0, 1, 2, 3], world
    assert all("obedient.py" in text for text in calls.values())
    (hung,) = [rank for rank, text in calls.items() if "hang_for_ever" in text]
    assert event.why.startswith(f"rank {hung} ")


def ranks_in(words: str) -> list[int]:
    """Of `0-2, 5`: 0, 1, 2 and 5."""
    runs = [part.partition("-") for part in words.split(", ")]
    return [rank for first, _, last in runs for rank in range(int(first), int(last or first) + 1)]
