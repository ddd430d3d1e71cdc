"""The master is killed, stopped, left alone or started by hand: the training goes on."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import pytest

from stoker.cli.job_events import read_events
from stoker.data.audit import Committed
from stoker.errors import EnvironmentProblem
from tests.e2e.faults import Job, is_by_beats, job_over, runs_on
from tests.e2e.hosts import freeze, kill, needs_hosts, thaw

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(400)]
STOPPED_S = 6.5
"""Longer than the beat timeout, shorter than the agents' patience with a silent master."""
HUNG_UP_S = 17.0
"""Longer than that: every agent has hung up on it, and calls in vain."""


@pytest.mark.parametrize("count", [1, 3])
def test_the_master_is_killed_and_nobody_is_restarted(tmp_path: Path, count: int) -> None:
    """Two workers on one host, or one on each of three."""
    nodes = "1" if count == 1 else f"2:{count}"
    with job_over(tmp_path, count, nodes, slots=2 if count == 1 else 1) as job:
        job.start(*job.hosts)
        size = max(2, count)
        generation = job.wait_for_world(size)
        nothing_happens_while_it_is_away(job)
        a_worker_that_dies_meanwhile_is_replaced(job)
        assert job.worlds() == [(generation, size), (generation + 1, size - 1), (generation + 2, size)]
        if count > 1:
            assert nothing_happens_while_it_is_stopped(job, STOPPED_S) == []
            events = nothing_happens_while_it_is_stopped(job, HUNG_UP_S)
            assert events.count("node-cut") == events.count("node-back") == count
        job.finish()
        job.assert_exact(steps_lost=1)


def kinds_since(job: Job, mark: int) -> list[str]:
    """Events since then, but for whom the machine, busy with other things, has made slow for a while."""
    kinds = [event.kind for event in job.events(after=mark)]
    return [kind for kind in kinds if kind not in ("straggler", "no-straggler")]


def commits_between(job: Job, begin: float, end: float) -> int:
    return sum(isinstance(e, Committed) and begin < e.wall_s < end for e in job.entries())


def nothing_happens_while_it_is_away(job: Job) -> None:
    before, generation, master = job.pids(), job.generation(), job.master()
    mark, killed_at = job.events()[-1].seq, time.time()
    kill(master)
    back = job.wait_for_event("master-restored", after=mark)
    assert commits_between(job, killed_at, back.wall_s) > 0, "the training goes on without a master"
    nodes = len(job.hosts.hosts)
    job.wait(lambda: len(job.events("node-back", after=mark)) == nodes, "all nodes to come back")
    job.wait_for_steps(30)
    assert job.pids() == before
    assert job.generation() == generation
    assert set(kinds_since(job, mark)) == {"master-restored", "node-back"}
    assert job.master().pid != master.pid


def a_worker_that_dies_meanwhile_is_replaced(job: Job) -> None:
    *_, last = job.hosts
    before, generation, victim = job.pids(), job.generation(), last.workers()[-1]
    mark = job.events()[-1].seq
    master = job.master()
    freeze(master)  # that it is killed before it can hear of the worker's death
    kill(victim)
    job.wait(lambda: not runs_on(victim), "death of the worker")
    kill(master)
    job.wait_for_world(len(before), after=generation)
    kinds = [e.kind for e in job.events(after=mark)]
    assert kinds.index("master-restored") < kinds.index("worker-replace")
    assert before - {victim.pid} <= job.pids()
    assert victim.pid not in job.pids()


def nothing_happens_while_it_is_stopped(job: Job, stopped_s: float) -> list[str]:
    before, generation, master = job.pids(), job.generation(), job.master()
    mark = job.events()[-1].seq
    newest = job.commits()
    freeze(master)
    time.sleep(stopped_s)
    assert job.commits() > newest
    thaw(master)
    job.wait_for_steps(60)
    assert job.pids() == before
    assert job.generation() == generation
    kinds = kinds_since(job, mark)
    assert set(kinds) <= {"node-cut", "node-back"}
    return kinds


def test_the_run_beside_the_master_is_killed_and_the_other_hosts_go_on(tmp_path: Path) -> None:
    """The agent and its workers go with it; the master, a process of its own, stays until the job ends."""
    with job_over(tmp_path, 3, "2:3") as job:
        first, second, third = job.hosts
        job.start(*job.hosts)
        job.wait_for_world(3)
        master, others = job.master(), job.pids(second, third)
        kill(*first.agents())
        job.wait(lambda: not first.workers(), "end of the workers of the run that was killed")
        job.wait_for_world(2)
        assert job.pids() == others
        assert runs_on(master)
        job.wait(lambda: [p.pid for p in first.processes()] == [master.pid], "the end of all but the master")
        job.runs[first].finish()
        job.start(first)
        job.wait_for_world(3)
        assert others < job.pids()
        assert job.master() == master, "a new run on its host finds it"
        job.finish()
        job.assert_exact(steps_lost=2)


def test_a_master_that_was_started_by_hand_is_away_for_seconds_and_an_agent_is_stopped(
    tmp_path: Path,
) -> None:
    """Nobody holds the master's port meanwhile: the agents ask again and again, each in its own time."""
    with job_over(tmp_path, 3, "2:3") as job:
        first = job.hosts[0]
        journal = first.folder / "stoker-logs" / "master" / "events.db"
        journal.parent.mkdir(parents=True)
        where = ("--listen", job.hosts.endpoint, "--journal", str(journal))
        command = ("master", *where, "--nnodes", "2:3", "--timeout", "60s")
        by_hand = job.also(first, *command)
        job.wait(job.is_served, "master")
        job.start(*job.hosts)
        generation, before = job.wait_for_world(3), job.pids()
        mark, newest = job.events()[-1].seq, job.commits()
        kill(job.master())
        assert by_hand.finish().code == -signal.SIGKILL
        time.sleep(3.0)
        assert job.commits() > newest
        another_jobs_master_changes_nothing(job, command)
        by_hand = job.also(first, *command)
        job.wait(lambda: len(job.events("node-back", after=mark)) == 3, "all nodes to come back")
        job.wait_for_steps(60)
        assert set(kinds_since(job, mark)) == {"master-restored", "node-back"}
        assert job.pids() == before
        assert job.worlds() == [(generation, 3)]
        an_agent_is_stopped_for_too_long_and_comes_back_as_a_new_node(job)
        job.finish()
        assert by_hand.finish().code == 0
        job.assert_exact(steps_lost=1)


def another_jobs_master_changes_nothing(job: Job, command: tuple[str, ...]) -> None:
    """It does not take up this job's journal; with one of its own it is a stranger to the nodes."""
    first = job.hosts[0]
    wrong = job.also(first, *command, "--rdzv-id", "another").finish()
    assert wrong.code == 2
    assert "the journal is that of job 'none', which has not ended: give --rdzv-id none" in wrong.err
    stranger = job.also(first, *command, "--rdzv-id", "another", "--journal", "another.db")
    job.wait(lambda: refusals(first.folder / "another.db") >= 3, "refusals by the stranger")
    job.wait_for_steps(20)
    stranger.interrupt(signal.SIGKILL)
    stranger.finish()


def refusals(journal: Path) -> int:
    with contextlib.suppress(EnvironmentProblem):  # it has just been made
        return sum(event.kind == "node-refused" for event in read_events(journal))
    return 0


def an_agent_is_stopped_for_too_long_and_comes_back_as_a_new_node(job: Job) -> None:
    """What it ran meanwhile is in no world any more: it ends that itself."""
    *others, stopped = job.hosts
    keeps, lost, generation = job.pids(*others), job.pids(stopped), job.generation()
    freeze(*stopped.agents())
    event = job.wait_for_event("node-lost")
    assert "no sign of life for" in event.why
    assert is_by_beats(event.why), event
    generation = job.wait_for_world(2, after=generation)
    thaw(*stopped.agents())
    job.wait_for_world(3, after=generation)
    refused = job.wait_for_event("node-refused")
    assert refused.why == "this node was given up: a node back from the dead is a new node"
    newest = job.events("node-joined")[-1]
    assert newest.why.startswith(f"{stopped.name} offers")
    assert refused.details["node"] == event.details["node"] != newest.details["node"]
    assert job.pids(*others) == keeps
    assert len(job.pids(stopped)) == 1
    assert not lost & job.pids(stopped)
