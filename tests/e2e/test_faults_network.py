"""Slow workers, short silences and broken networks between hosts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.faults import Job, job_over
from tests.e2e.hosts import freeze, needs_hosts, thaw

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(400)]
TIMEOUT_S = 16
LIMIT_S = TIMEOUT_S + 5.0 + 10.0
"""The user's timeout, the beat timeout and something for a busy machine: less than twice the timeout."""


def test_what_passes_changes_nothing_and_a_straggler_is_excluded(tmp_path: Path) -> None:
    """While one worker is slow for as long as it takes to call it a straggler, others stumble and are left alone."""
    with job_over(tmp_path, 3, "2:3", "--exclude-stragglers", "--hang-after", "3s") as job:
        first, second, third = job.hosts
        job.start(*job.hosts)
        generation, before = job.wait_for_world(3), job.pids()

        a_long_computation_is_no_hang(job)
        job.order(third, "slow", 0.1)
        for stumble in (
            a_worker_is_stopped_for_a_moment,
            a_link_is_cut_for_a_moment,
            a_link_is_cut_for_seconds,
        ):
            stumble(job)
            job.wait_for_steps(5)
            assert job.worlds() == [(generation, 3)], stumble
        assert job.pids() == before
        assert not job.events("node-cut", "node-lost", "worker-stopped")

        straggler = job.wait_for_event("straggler")
        assert straggler.why.startswith("rank ")
        excluded = job.wait_for_event("node-cordoned")
        assert straggler.details["node"] == excluded.details["node"]
        job.wait_for_world(2)
        assert job.pids() == job.pids(first, second)
        assert len(before - job.pids()) == 1
        assert job.worlds() == [(generation, 3), (generation + 1, 2)]
        job.finish()
        job.assert_exact()


def a_long_computation_is_no_hang(job: Job) -> None:
    job.wait_for_steps(30)  # first steps may compile: for them the limit is the user's timeout
    begun = job.order(job.hosts[0], "long", 60)
    event = job.wait_for_event("slow")
    assert "busy in evaluate_alone" in event.why
    assert not begun.exists()
    job.order(job.hosts[0], "enough")
    job.wait_for_steps(40)
    assert not job.events("hang", "worker-replace")


def a_worker_is_stopped_for_a_moment(job: Job) -> None:
    worker = job.worker(job.hosts[2])
    freeze(worker)
    time.sleep(1.0)
    thaw(worker)


def a_link_is_cut_for_a_moment(job: Job) -> None:
    job.hosts.cut(job.hosts[1])
    time.sleep(0.7)
    job.hosts.heal()


def a_link_is_cut_for_seconds(job: Job) -> None:
    """Less than the beat timeout, which is 5 s: what was lost is sent again after 1.4 s, 3 s and 6.2 s."""
    job.hosts.cut(job.hosts[1])
    time.sleep(1.6)
    job.hosts.heal()


def test_a_partition_that_leaves_neither_side_enough_ends_both(tmp_path: Path) -> None:
    """The master is alone, and two are too many to lose; the two have no master. Each side waits for the timeout."""
    with job_over(tmp_path, 3, "2:3", timeout=f"{TIMEOUT_S}s") as job:
        first, *others = job.hosts
        job.start(*job.hosts)
        job.wait_for_world(3)
        cut_at = time.time()
        job.hosts.partition([first], others)
        job.wait(lambda: not job.pids(*others), "end of the workers without a master")
        assert time.time() - cut_at < LIMIT_S
        alone, *rest = job.ends(3)
        assert f"only 1 of at least 2 nodes with workers for {TIMEOUT_S} s" in alone.err
        assert all(f"not answer, for {TIMEOUT_S} s" in d.err or "no master answers" in d.err for d in rest)
        (waiting,) = [e for e in job.events("waiting") if e.wall_s > cut_at]
        (ended,) = job.events("ended")
        # A master that stood still for a moment begins to count anew.
        assert TIMEOUT_S <= ended.wall_s - waiting.wall_s < 3 * TIMEOUT_S
        job.assert_exact(steps_lost=1, ended=False)


def test_a_partition_ends_the_side_without_the_master(tmp_path: Path) -> None:
    """Two with the master go on; the third, which cannot know whether it is the one that is missed, stops itself."""
    with job_over(tmp_path, 3, "2:3", timeout=f"{TIMEOUT_S}s") as job:
        *together, alone = job.hosts
        job.start(*job.hosts)
        job.wait_for_world(3)
        survivors = job.pids(*together)
        cut_at = time.time()
        job.hosts.partition(together, [alone])
        job.wait_for_world(2)
        assert job.pids(*together) == survivors
        newest = job.commits(alone)
        job.wait(lambda: not alone.workers(), "end of the workers without a master")
        assert time.time() - cut_at < LIMIT_S, "by then others may have been started in their place"
        assert job.runs[alone].finish().code == 3
        assert not alone.processes()
        assert job.commits(alone) == newest, "it made no commit by itself"
        job.finish(*together)
        job.hosts.assert_nothing_left()
        job.assert_exact(steps_lost=1)


def test_packets_that_are_lost_one_way_cost_a_node_and_no_record(tmp_path: Path) -> None:
    """First between two nodes that the master hears both: no world of all three makes a step, so the job goes on
    without the youngest. Then from a node to the master: it is given up, and stops itself."""
    with job_over(tmp_path, 3, "1:3", timeout=f"{TIMEOUT_S}s") as job:
        first, second, third = job.hosts
        for host in job.hosts:
            job.start(host)
            job.wait_for_event("node-joined", words=f"{host.name} offers")
        generation, keeps = job.wait_for_world(3), job.pids(first)
        job.hosts.drop(second, third)
        cordoned = job.wait_for_event("node-cordoned")
        assert "worlds in a row broke before their first step though every worker lives" in cordoned.why
        generation = job.wait_for_world(2, after=generation)
        assert job.hosts_by_rank() == [first, second]
        assert job.pids() == job.pids(first, second) > keeps

        job.hosts.drop(second, first)
        assert "no sign of life" in job.wait_for_event("node-lost").why
        job.wait_for_world(1, after=generation)
        assert job.pids(first) == keeps
        assert job.runs[second].finish().code == 3
        job.finish(first, third)
        job.hosts.assert_nothing_left()
        job.assert_exact(steps_lost=2)
