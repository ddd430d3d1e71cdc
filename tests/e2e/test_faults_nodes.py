"""Nodes beyond the most that a job may have, too few for a unit, checked, called back; and scripts without Stoker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults import Job, job_over
from tests.e2e.hosts import Host, kill, needs_hosts
from tests.e2e.run_helpers import SCRIPTS

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(400)]
STOKER = (sys.executable, "-m", "stoker.cli.main")
PLAIN_LOOP = str(SCRIPTS / "plain_loop.py")


def test_a_spare_node_steps_in_and_the_job_is_scaled_down_and_up(tmp_path: Path) -> None:
    with job_over(tmp_path, 3, "1:2") as job:
        first, second, third = job.hosts
        job.start(first)
        job.wait_for_event("node-joined")
        job.start(second)
        job.wait_for_world(2)
        job.start(third)
        spare = job.wait_for_event("node-standby")
        assert "the job already runs on 2 nodes" in spare.why
        keeps = job.pids(first)
        kill(*second.agents())
        generation = job.generation()
        job.wait(third.workers, "a worker on the spare node")
        job.wait_for_world(2, after=generation)
        assert job.pids(first) == keeps
        assert job.hosts_by_rank() == [first, third], "the oldest first"
        job.runs.pop(second).finish()

        for nodes in (1, 2, 1):
            generation, mark = job.generation(), job.events()[-1].seq
            scale = first.run(
                *STOKER, "job", "scale", job.hosts.endpoint, str(nodes), "--wait", "60", timeout_s=90
            )
            assert scale.code == 0, scale.text
            job.wait_for_world(nodes, after=generation)
            assert [e.details["node"] for e in job.events("node-standby", "node-active", after=mark)] == [
                spare.details["node"]
            ]
            job.wait(
                lambda nodes=nodes: len(third.workers()) == nodes - 1, "just so many workers on the spare"
            )
            assert job.pids(first) == keeps

        generation, lost = job.generation(), job.steps_lost()
        job.runs[first].interrupt(signal.SIGTERM)
        job.wait(lambda: not first.workers(), "end of the only worker that has the state")
        job.wait_for_world(1, after=generation)
        assert job.hosts_by_rank() == [third], "who stood by has taken over"
        assert job.assert_left_at_an_agreed_commit(generation) > 20, "it went on until its heir was ready"
        assert job.steps_lost() == lost
        job.finish()
        job.assert_exact(steps_lost=1)


def test_nodes_are_checked_and_taken_in_whole_units_until_the_script_fails(tmp_path: Path) -> None:
    with job_over(tmp_path, 4, "2:4", "--node-unit", "2", "--node-check", timeout="120s") as job:
        first, second, third, broken = job.hosts
        job.start(first)
        job.wait_for_event("node-joined")
        job.start(second)
        job.wait_for_world(2)
        job.start(third)
        job.wait(lambda: len(job.events("node-checked")) == 3, "three nodes that are checked")
        verdicts = {e.details["verdict"] for e in job.events("node-checked")}
        assert verdicts <= {"good", "straggler"}, (
            "slow it may be: the others train meanwhile, on the same processors"
        )
        job.wait(third.workers, "a worker that waits for the other half of its unit")
        a_node_whose_check_fails_is_kept_out(job, broken)
        job.wait_for_steps(60)
        assert [size for _, size in job.worlds()] == [2]
        keeps, generation = job.pids(first), job.generation()
        waits = third.workers()[0]
        kill(*second.agents())
        job.wait_for_world(2, after=generation)
        assert job.pids() == keeps | {waits.pid}
        job.runs.pop(second).finish()

        job.order(third, "exit", 7)
        for done in job.ends(7):
            assert "exited with code 7" in done.err
        assert "an error of the script itself would come again" in job.events("ended")[0].why
        job.assert_exact(steps_lost=2, ended=False)


def a_node_whose_check_fails_is_kept_out(job: Job, broken: Host) -> None:
    """PyTorch cannot be imported there, nor does anything ever run there."""
    torch = broken.folder / "packages" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')\n")
    paths = [str(torch.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    job.start(broken, environment={"PYTHONPATH": os.pathsep.join(paths)})
    event = job.wait_for_event("node-cordoned")
    assert event.why.startswith("the node check says: the device cannot be used: libcudart.so")
    verdicts = [e.details["verdict"] for e in job.events("node-checked")]
    assert len(verdicts) == 4
    assert (verdicts.count("faulty"), verdicts[-1]) == (1, "faulty")
    (joined,) = [e for e in job.events("node-joined") if e.why.startswith(f"{broken.name} offers")]
    assert event.details["node"] == joined.details["node"]
    assert event.details["node"] not in {e.details["node"] for e in job.events("worker-started")}


def test_an_unmodified_script_goes_on_when_an_agent_is_killed_and_a_host_joins(tmp_path: Path) -> None:
    """As under torchrun all its workers are started anew, with the ranks of those that are there."""
    said = tmp_path / "said"
    said.mkdir()
    with job_over(tmp_path, 3, "1:2", "--max-restarts", "5", script=(PLAIN_LOOP, str(said))) as job:
        first, second, third = job.hosts
        job.start(first, second)
        before = job.wait(lambda: plain_workers(job, said, 2), "a world of two")
        kill(*second.agents())
        alone = job.wait(lambda: plain_workers(job, said, 1), "a world of one")
        assert not before.keys() & alone.keys(), "all of them are new"
        job.runs.pop(second).finish()
        job.start(third)
        after = job.wait(lambda: plain_workers(job, said, 2), "a world of two again")
        assert not alone.keys() & after.keys()
        (said / "over").touch()
        job.ends(0)


def plain_workers(job: Job, said: Path, size: int) -> dict[int, dict[str, Any]]:
    """What the running workers say, by pid, if they are a whole world of this size."""
    words = {}
    for pid in job.pids():
        with contextlib.suppress(FileNotFoundError):
            words[pid] = json.loads((said / f"{pid}.json").read_text())
    ranks = sorted(w["rank"] for w in words.values())
    is_whole = ranks == list(range(size)) and all(w["ranks"] == ranks for w in words.values())
    return words if is_whole else {}
