"""Who hosts the next master when the command that hosted this one is gone, and who must not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.job import WithEtcd
from tests.chaos.plan import Ground
from tests.chaos.quorum import Quorum
from tests.e2e import hosts_census as census
from tests.e2e.faults import job_over
from tests.e2e.hosts import kill, needs_hosts

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(400)]


def test_an_orphan_of_a_master_is_succeeded_on_its_host(tmp_path: Path) -> None:
    """`stoker run` on the master's host is killed; another one comes. Then the master that was left dies, too."""
    with job_over(tmp_path, 3, "2:3") as job:
        first, *others = job.hosts
        job.start(*job.hosts)
        job.wait_for_world(3)
        workers, orphan = job.pids(*others), job.master()

        job.runs[first].interrupt(signal.SIGKILL)
        job.runs.pop(first).finish()
        generation = job.wait_for_world(2)
        job.start(first)
        generation = job.wait_for_world(3, after=generation)
        assert job.master() == orphan

        kill(orphan)
        job.wait_for_event("master-restored")
        job.wait_for_steps(10)
        assert job.generation() == generation, "nobody was regrouped"
        assert job.pids(*others) == workers
        assert job.master().ppid() == job.runs[first].process.pid
        job.finish()
        job.assert_exact(steps_lost=1)


def test_with_etcd_nobody_begins_the_job_anew(tmp_path: Path) -> None:
    """A candidate whose `stoker run` is killed goes, too; those that are left do not take up a job that has ended."""
    url = "etcd://10.77.1.1:2379,10.77.1.2:2379,10.77.1.3:2379"
    with job_over(tmp_path, 3, "2:3", "--journal", url, endpoint="10.77.1.1:29400") as job:
        etcd = Quorum(list(job.hosts))
        etcd.start()
        etcd.wait_healthy(job.hosts[0])
        job.start(*job.hosts)
        generation = job.wait_for_world(3)
        at = etcd.master_host(job.hosts[0], "none")
        other = next(host for host in job.hosts if host is not at)
        (candidate,) = [p for p in other.processes() if census.is_command(p, "master")]

        job.runs[other].interrupt(signal.SIGKILL)
        job.runs.pop(other).finish()
        job.wait(lambda: not census.alive([candidate]), "end of the candidate")
        generation = job.wait_for_world(2, after=generation)
        job.start(other)
        job.wait_for_world(3, after=generation)

        job.end_soon()
        done = [run.finish() for run in job.runs.values()]
        assert [d.code for d in done] == [0, 0, 0], "\n".join(d.text for d in done)
        assert not job.masters()
        kinds = [event.kind for event in WithEtcd(job.hosts[0], Ground(), url, "none").read(0)]
        assert set(kinds[kinds.index("ended") + 1 :]) <= {"node-lost"}
        etcd.stop()
        job.hosts.assert_nothing_left(30)
        job.assert_exact(steps_lost=1)
