"""Faults that meet each other: the holder of the state dies as it hands it over, another one meanwhile; all die."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.wire.control import JobEvent
from tests.e2e.faults import Job, job_over, kill_at_once, last_commit, runs_on
from tests.e2e.hosts import kill, needs_hosts

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(400)]


def test_faults_in_the_midst_of_a_recovery(tmp_path: Path) -> None:
    flags = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "5")
    with job_over(tmp_path, 2, "1:2", *flags, slots=2) as job:
        job.start(job.hosts[0])
        job.wait_for_event("node-joined")
        job.start(job.hosts[1])
        job.wait_for_world(4)
        the_freshest_dies_as_it_hands_over_the_state(job)
        job.wait_for_world(4)
        a_second_worker_dies_while_the_first_is_regrouped(job)
        job.wait_for_world(4)
        all_die_at_once_and_start_from_the_checkpoint(job)
        job.wait_for_world(4)
        job.finish()
        job.assert_exact(steps_lost=8)


def the_freshest_dies_as_it_hands_over_the_state(job: Job) -> None:
    """Three have made a commit that the fourth has not; of them one is killed, and the first one, who is to bring the
    one that lags to it, dies in the middle of that. The last one that has the commit takes its place."""
    first, second = job.hosts
    ordered = job.order(second, "meet", slot=0)
    job.wait(lambda: not ordered.exists(), "one that stands between a step and its commit")
    job.wait(lambda: is_ahead(job, 3), "three that are one commit ahead of the fourth")
    newest = job.commits()
    generation = job.generation()
    source, heir, laggard, victim = (job.worker(host, slot) for host in job.hosts for slot in (0, 1))
    job.order(first, "export", slot=0)
    kill(victim)
    job.wait(lambda: not runs_on(source), "death of the source")

    def newer() -> list[JobEvent]:
        return [e for e in job.events("world") if e.details["generation"] > generation]

    job.wait(lambda: len(newer()) >= 2, "a world without the source")
    assert runs_on(heir)
    assert runs_on(laggard)
    worlds = newer()[:2]
    assert [len(e.details["workers"]) for e in worlds] == [3, 2]
    assert [e.details["commits"] for e in worlds] == [newest, newest], "the freshest state was kept"


def is_ahead(job: Job, workers: int) -> bool:
    """Whether so many workers are exactly one commit ahead of a last one."""
    files = job.hosts.folder.glob("h*/*/*/audit/*.jsonl")
    commits = sorted(last_commit(path) for path in files)
    return [newest - commits[0] for newest in commits] == [0] + [1] * workers and commits[0] > 0


def a_second_worker_dies_while_the_first_is_regrouped(job: Job) -> None:
    """One that computes for long keeps the generation from being formed; in this time another one dies."""
    first = job.hosts[0]
    generation, mark = job.generation(), job.events()[-1].seq
    computes, waits, other, victim = (job.worker(host, slot) for host in job.hosts for slot in (0, 1))
    begun = job.order(first, "long", 60, slot=0)
    job.wait(lambda: not begun.exists(), "begin of the long step")
    kill(victim)
    job.wait(lambda: job.events("generation", after=mark), "the first regroup")
    kill(other)
    job.wait(lambda: len(job.events("worker-replace", after=mark)) == 2, "word of the second death")
    job.order(first, "enough", slot=0)
    job.wait_for_world(after=generation)
    assert runs_on(computes)
    assert runs_on(waits)
    kinds = [e.kind for e in job.events("worker-replace", "generation", "world", after=mark)]
    assert kinds[:4] == ["worker-replace", "generation", "worker-replace", "world"]


def all_die_at_once_and_start_from_the_checkpoint(job: Job) -> None:
    job.wait_for_steps(6)
    before, generation = job.pids(), job.generation()
    kill_at_once(*(worker for host in job.hosts for worker in host.workers()))
    newest = job.commits()
    job.wait_for_world(after=generation)
    world = job.events("world")[-1]
    assert world.details["commits"] % 5 == 0
    assert newest - 10 < world.details["commits"] <= newest, "the newest may not have been written to its end"
    assert not before & job.pids()


def test_all_workers_die_at_once_and_there_is_no_checkpoint(tmp_path: Path) -> None:
    with job_over(tmp_path, 1, "1", slots=2) as job:
        job.start(*job.hosts)
        job.wait_for_steps(12)
        generation = job.generation()
        kill_at_once(*job.hosts[0].workers())
        newest = job.commits()
        job.wait_for_world(2, after=generation)
        world = job.events("world")[-1]
        assert world.details["commits"] == 0
        assert 0 < world.details["commits_lost"] <= newest + 2, "the loss is reported"
        job.wait(lambda: job.commits() > newest, "commits beyond the old ones")
        job.finish()
        job.assert_exact(steps_lost=newest + 2)
