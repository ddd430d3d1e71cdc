"""One job over several hosts that come, leave and die."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.e2e.faults import job_over
from tests.e2e.hosts import Host, kill, needs_hosts

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(400)]
ESTABLISHED = "01"


def test_a_job_over_four_hosts(tmp_path: Path) -> None:
    with job_over(tmp_path, 4, "4") as job:
        job.start(*job.hosts)
        job.wait_for_world(4)
        assert [streams(host, job.hosts.endpoint) for host in job.hosts] == [1, 1, 1, 1], (
            "none of the workers'"
        )
        job.finish()
        assert [size for _, size in job.worlds()] == [4]
        assert [(said["rank"], said["world_size"]) for said in job.said()] == [(rank, 4) for rank in range(4)]
        job.assert_exact()
        argv = (
            sys.executable,
            "-m",
            "stoker.cli.main",
            "job",
            "events",
            "--json",
            "--log-dir",
            "stoker-logs",
        )
        told = [json.loads(line) for line in job.hosts[0].run(*argv).out.splitlines()]
        assert [(event["seq"], event["kind"]) for event in told] == [(e.seq, e.kind) for e in job.events()]


def streams(host: Host, endpoint: str) -> int:
    """Connections of all that runs on a host to this endpoint."""
    address, _, port = endpoint.rpartition(":")
    far = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{int(port):04X}"
    lines = host.call(Path("/proc/thread-self/net/tcp").read_text).splitlines()[1:]
    return sum((fields[2], fields[3]) == (far, ESTABLISHED) for fields in map(str.split, lines))


def test_hosts_come_and_go_in_good_order_and_without(tmp_path: Path) -> None:
    """One joins late, all connections of one break, the one with the master and rank 0 is told to leave, and the agent
    of one is killed. At last the only one that holds the state is told to leave while its heir is only starting."""
    with job_over(tmp_path, 3, "1:3") as job:
        first, second, third = job.hosts
        job.start(first)
        job.wait_for_event("node-joined")
        job.start(second)
        job.wait_for_world(2)
        keeps = job.pids()
        job.start(third)
        generation = job.wait_for_world(3)
        assert keeps < job.pids()
        assert job.hosts_by_rank() == [first, second, third], "the oldest first"
        assert job.steps_lost() == 0, "a newcomer costs no step"

        before = job.pids()
        job.hosts.reset(second)
        generation = job.wait_for_world(3, after=generation)
        job.wait(lambda: job.events("node-back"), "the node's stream")
        # Now and then Gloo itself ends a process: an exception of its own thread that nobody can catch.
        aborted = [event for event in job.events("worker-replace") if "SIGABRT" in event.why]
        assert len(before - job.pids()) == len(aborted) <= 1, "broken connections cost no process"
        before = job.pids()
        assert not job.events("node-lost")

        lost, master, with_first = job.steps_lost(), job.master(), generation
        job.runs[first].interrupt(signal.SIGTERM)
        generation = job.wait_for_world(2, after=generation)
        assert job.hosts_by_rank() == [second, third]
        job.wait(lambda: not first.workers(), "end of the workers of the host that leaves")
        assert job.pids() == job.pids(second, third) < before
        assert job.master() == master
        job.assert_left_at_an_agreed_commit(with_first)
        assert job.steps_lost() == lost, "to leave in good order costs no step"

        kill(*third.agents())
        job.wait(lambda: not third.processes(), "the end of the killed agent's workers")
        generation = job.wait_for_world(1, after=generation)
        assert job.runs.pop(third).finish().code == -signal.SIGKILL

        lost = job.steps_lost()
        waits = job.order(third, "wait")
        job.start(third)
        job.wait(third.workers, "a worker that is starting")
        mark = job.events()[-1].seq
        job.runs[second].interrupt(signal.SIGTERM)
        job.wait_for_event("node-leaving", after=mark)
        job.wait_for_steps(30)
        waits.unlink()
        left = job.runs.pop(second).finish()
        assert left.code == 0, left.text
        assert "left the job" in left.err
        assert not second.processes()
        job.wait_for_world(1, after=generation)
        assert job.hosts_by_rank() == [third]
        assert job.assert_left_at_an_agreed_commit(generation) > 20, "it went on until its heir was ready"
        assert job.steps_lost() == lost
        stayed, _ = job.finish()
        assert "its master stays until the job ends" in stayed.err
        job.assert_exact(steps_lost=2)
