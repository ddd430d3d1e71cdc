"""Horovod's core elastic scenarios, with its scripts, each by its name; and what goes wrong there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.horovod_job import HorovodRun

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
NEVER = ("--blacklist-cooldown-range", "100s", "100s")
NO_COMMITS = ("--commit-every", "100000")


@pytest.fixture
def jobs() -> Iterator[list[HorovodRun]]:
    made: list[HorovodRun] = []
    yield made
    for job in made:
        job.stop()
        with contextlib.suppress(ValueError):  # it was heard to the end already
            print("\n".join(job.process.communicate()))


def test_hosts_added_and_removed(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    (tmp_path / "hosts").write_text("h1:1\n")
    job = HorovodRun(tmp_path, "--nnodes", "1:4")
    jobs.append(job)
    job.wait_for_world(1)
    first = job.worlds()[0]["pid"]
    job.write_hosts("h1:1", "h2:2")
    job.wait_for_world(3)
    job.write_hosts("h2:2")
    job.wait_for_world(2)
    job.finish_well()
    assert job.sizes() == [1, 3, 2]
    assert job.rank_0()[1]["pid"] == first, "the oldest worker has rank 0"
    assert job.rank_0()[2]["sizes"] == [2], "its reset callbacks have run, once"


def test_single_rank_failure_by_exception(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    job = HorovodRun(
        tmp_path, "--nnodes", "1:2", "--relaunch-errors", hosts="h1,h2", script=("--fail", "raise:1")
    )
    jobs.append(job)
    job.until(lambda: job.sizes()[-2:] == [1, 2], "the world without the rank, and with another in its place")
    done = job.finish_well()
    assert "this script fails as told" in done.err
    assert job.rank_0()[1]["batches"] == 10, "the others went on from the commit before"


def test_single_rank_failure_by_kill(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    job = HorovodRun(tmp_path, "--nnodes", "1:2", hosts="h1,h2", script=("--fail", "kill:0"))
    jobs.append(job)
    job.until(lambda: job.sizes()[-2:] == [1, 2], "the world without the rank, and with another in its place")
    survivor = job.rank_0()[1]["pid"]
    assert [world["pid"] for world in job.rank_0()][2] == survivor, "newcomers have the highest ranks"
    job.finish_well()
    assert job.rank_0()[1]["batches"] == 10


def test_fault_tolerance_without_scaling(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    job = HorovodRun(tmp_path, "--nnodes", "2", hosts="h1,h2", script=("--fail", "kill:1"))
    jobs.append(job)
    job.until(lambda: len(job.sizes()) > 1, "another world")
    job.finish_well()
    assert set(job.sizes()) == {2}


def test_all_ranks_fail(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    job = HorovodRun(tmp_path, "--relaunch-errors", hosts="h1,h2", script=("--fail", "raise-always:0,1"))
    jobs.append(job)
    done = job.finish(150)
    assert done.code == 1, done.text
    assert "2 ranks ended with the same error" in done.err
    assert "this script fails as told" in done.err
    assert not job.processes()


def test_all_hosts_are_blacklisted(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    job = HorovodRun(tmp_path, "--nnodes", "1:2", "--timeout", "30s", *NEVER, hosts="h1,h2")
    jobs.append(job)
    job.wait_for_world(2)
    agents = [job.agent(host) for host in ("h1", "h2")]
    for agent in agents:
        agent.kill()
    done = job.finish(150)
    assert done.code == 3, done.text
    assert "all hosts are blacklisted: h1 (its agent could not go on" in done.err
    assert not job.processes()


def test_minimum_hosts_time_out(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    job = HorovodRun(tmp_path, "--nnodes", "2", "--timeout", "30s", *NEVER, hosts="h1,h2")
    jobs.append(job)
    job.wait_for_world(2)
    job.agent("h2").kill()
    done = job.finish(150)
    assert done.code == 3, done.text
    assert not job.processes()


def test_reset_limit(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    (tmp_path / "hosts").write_text("h1:1\n")
    job = HorovodRun(tmp_path, "--nnodes", "1:4", "--reset-limit", "1")
    jobs.append(job)
    job.wait_for_world(1)
    job.write_hosts("h1:1", "h2:1")
    job.wait_for_world(2)
    job.write_hosts("h1:1", "h2:1", "h3:1")
    done = job.finish(150)
    assert done.code == 1, done.text
    assert "the world has changed more than 1 times (--reset-limit)" in done.err


def test_a_blacklisted_host_returns_after_backoff(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    flags = ("--nnodes", "1:2", "--blacklist-cooldown-range", "2s", "4s")
    job = HorovodRun(tmp_path, *flags, hosts="h1,h2")
    jobs.append(job)
    job.wait_for_world(2)
    job.agent("h2").kill()
    job.until(lambda: job.decided("host-blacklisted"), "the blacklist")
    job.until(lambda: job.sizes() == [2, 1, 2], "the host again")
    job.finish_well()


# -- what goes wrong in Horovod ---------------------------------------------------------------------------


def test_attributes_and_model_stay_together_when_hosts_are_added_between_commits(
    tmp_path: Path, jobs: list[HorovodRun]
) -> None:
    """There the attributes go back to the last commit and the model does not."""
    (tmp_path / "hosts").write_text("h1:1\n")
    job = HorovodRun(tmp_path, "--nnodes", "1:4", script=NO_COMMITS)
    jobs.append(job)
    job.wait_for_world(1)
    job.write_hosts("h1:1", "h2:1")
    job.until(lambda: len(job.worlds()) >= 3, "both in the new world")
    both = job.worlds()[1:3]
    assert {world["size"] for world in both} == {2}
    assert both[0]["batches"] == both[1]["batches"], "the script itself compares them with the weight"
    job.finish_well()


def test_the_sampler_is_divided_anew_where_nothing_is_synchronized(
    tmp_path: Path, jobs: list[HorovodRun]
) -> None:
    """There, where hosts were only removed, the rest of the epoch stays divided over the ranks that were."""
    (tmp_path / "hosts").write_text("h1:1\nh2:1\n")
    job = HorovodRun(tmp_path, "--nnodes", "1:4", script=NO_COMMITS)
    jobs.append(job)
    job.wait_for_world(2)
    job.write_hosts("h1:1")
    job.until(lambda: job.sizes()[-1:] == [1], "one host")
    alone = job.rank_0()[-1]
    assert alone["left"] == 120 - alone["seen"], "the script itself sees to every record of the epoch"
    job.finish_well()


def test_hosts_that_leave_below_the_minimum_do_not_hang_the_job(
    tmp_path: Path, jobs: list[HorovodRun]
) -> None:
    (tmp_path / "hosts").write_text("h1:1\nh2:1\n")
    job = HorovodRun(tmp_path, "--nnodes", "2:4", "--timeout", "30s")
    jobs.append(job)
    job.wait_for_world(2)
    job.write_hosts("h1:1")
    done = job.finish(150)
    assert done.code == 3, done.text
    assert not job.processes()


def test_hosts_that_come_back_above_the_minimum_go_on(tmp_path: Path, jobs: list[HorovodRun]) -> None:
    (tmp_path / "hosts").write_text("h1:1\nh2:1\n")
    job = HorovodRun(tmp_path, "--nnodes", "2:4")
    jobs.append(job)
    job.wait_for_world(2)
    job.write_hosts("h1:1")
    job.until(lambda: len(job.processes()) and job.decided("host-leaves"), "the host to be told")
    job.write_hosts("h1:1", "h3:1")
    job.until(lambda: len(job.sizes()) > 1, "another world")
    job.finish_well()
    assert set(job.sizes()) == {2}
