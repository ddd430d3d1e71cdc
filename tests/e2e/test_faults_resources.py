"""Want of memory, and disks that are full."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.platform.memory import MemoryLimits
from tests.e2e.faults import Job, job_over
from tests.e2e.hosts import fill_disk, free_disk, kill, needs_hosts

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(400)]
MIB = 2**20


def why_no_limits() -> str:
    limits = MemoryLimits()
    probe = limits.prepare("probe", 64 * MIB)
    if probe is None:
        return limits.problem
    probe.close()
    limits.close()
    return ""


def test_a_worker_that_needs_more_memory_gets_it(tmp_path: Path) -> None:
    """PyTorch alone takes about 220 MiB; with 200 more the first limit is too small, and the next one is not."""
    if why := why_no_limits():
        pytest.skip(f"no control group can be made here: {why}")
    flags = ("--worker-memory", "350MiB", "--worker-memory-max", "2GiB")
    with job_over(tmp_path, 1, "1", *flags, slots=2) as job:
        (host,) = job.hosts
        job.start(host)
        generation, victim = job.wait_for_world(2), job.worker(host, 1)
        keeps = job.worker(host, 0)
        job.order(host, "eat", 200 * MIB, slot=1)
        event = job.wait_for_event("worker-replace")
        assert event.details["reason"] == "oom"
        assert "killed by the kernel for want of memory" in event.why
        assert "with 551 MB instead of 367 MB" in event.why
        job.wait_for_world(2, after=generation)
        assert victim.pid not in job.pids()
        eaten = job.order(host, "eat", 200 * MIB, slot=1)
        job.wait(lambda: not eaten.exists(), "the same want again")
        job.wait_for_steps(20)
        assert keeps.pid in job.pids()
        assert len(job.events("worker-replace")) == 1, "now it is enough"
        job.finish()
        job.assert_exact(steps_lost=1)


def test_a_full_disk_stops_neither_master_nor_workers(tmp_path: Path) -> None:
    """Of one node: with the journal, the output of its worker, what it audits, and the checkpoints."""
    with job_over(tmp_path, 2, "1:2", "--checkpoint-every", "5") as job:
        first, second = job.hosts
        disk = first.disk("disk", "16m")
        saved = disk / "checkpoints"
        job.start(first, flags=("--log-dir", str(disk), "--checkpoint-dir", str(saved)))
        job.wait_for_event("node-joined")
        job.start(second)
        job.wait_for_world(2)
        job.wait(lambda: sorted(saved.glob("step-*")), "checkpoints")
        generation, keeps = job.generation(), job.pids(first)

        fill_disk(disk)
        job.wait_for_steps(20, second)
        newest = sorted(saved.glob("step-*"))[-1]
        kill(*second.workers())
        job.wait(second.workers, "another worker")
        job.wait_for_world(2, after=generation)
        assert job.pids(first) == keeps
        assert sorted(saved.glob("step-*"))[-1] == newest

        free_disk(disk)
        job.wait(lambda: sorted(saved.glob("step-*"))[-1] > newest, "newer checkpoints")
        event = job.wait_for_event("worker-replace")
        # Who lost touch with the worker that was killed may have begun a generation before its end was known.
        assert event.details["generation"] in (generation, generation + 1), (
            "what was to be written down meanwhile is written now"
        )
        the_node_of_a_worker_that_needs_a_full_disk_runs_no_more_workers(job)
        done, _ = job.finish()
        for words in (
            "the job goes on, but a master that dies now would be missed",
            "the journal is written again",
            "the audit ends here, the run goes on",
        ):
            assert words in done.err
        assert "No space left on device" in job.events("checkpoint-failed")[0].why
        assert job.events("checkpoint-written-again")
        job.assert_same_weights()


def the_node_of_a_worker_that_needs_a_full_disk_runs_no_more_workers(job: Job) -> None:
    first, second = job.hosts
    keeps = job.pids(first)
    small = second.disk("small", "400k")
    job.order(second, "write", small / "file")
    event = job.wait_for_event("worker-cordon")
    assert event.details["reason"] == "disk-full"
    assert "for want of disk space: OSError: [Errno 28] No space left on device" in event.why
    cordoned = job.wait_for_event("node-cordoned")
    assert cordoned.details["node"] == event.details["node"]
    job.wait_for_event("world", words="1 workers go on", after=cordoned.seq)
    job.wait(lambda: job.pids() == keeps, "end of the worker, and no other in its place")
