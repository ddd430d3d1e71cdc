"""Nodes that come together are checked as a pair: over two hosts whose own names lead to a loopback address."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import psutil
import pytest

from stoker.wire.control import JobEvent
from tests.e2e.faults import Job, job_over
from tests.e2e.hosts import freeze, needs_hosts, thaw

pytestmark = [pytest.mark.real, needs_hosts, pytest.mark.timeout(800)]
TRIES = 5
"""What two say may be read one after the other all the same; then each is checked alone."""
LOCAL, REMOTE = 1, 2


def come_together(job: Job) -> JobEvent:
    """Both hosts join a master that hears neither before it can hear both; returns what it makes of them."""
    first, second = job.hosts
    job.start(first)
    job.wait(first.masters, "the master's process")
    freeze(*first.masters())
    job.start(second)
    agents = [psutil.Process(run.process.pid) for run in job.runs.values()]
    with contextlib.suppress(AssertionError):  # who was faster than this test has joined alone
        job.wait(lambda: unread(agents[0].pid, job, LOCAL) == 2, "both agents' calls", 60)
        freeze(*agents)
        thaw(*first.masters())
        job.wait(lambda: all(unread(agent.pid, job, REMOTE) == 1 for agent in agents), "the answers", 30)
        freeze(*first.masters())
        thaw(*agents)
        job.wait(lambda: unread(agents[0].pid, job, LOCAL) == 2, "what both say of themselves", 30)
    thaw(*agents, *first.masters())
    return job.wait_for_event("node-check")


def unread(pid: int, job: Job, side: int) -> int:
    """Connections with bytes that wait to be read, on a process's host: of the master's endpoint (LOCAL), or to it."""
    port = f":{int(job.hosts.endpoint.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(
        row[side].endswith(port) and not row[4].endswith(":00000000") and row[3] == "01" for row in rows
    )


@pytest.mark.skipif(
    not socket.gethostbyname(socket.gethostname()).startswith("127."),
    reason="the host's name leads elsewhere",
)
def test_two_nodes_that_come_together_pass_as_a_pair(tmp_path: Path) -> None:
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        with job_over(folder, 2, "2", "--node-check", timeout="120s") as job:
            checked = come_together(job)
            is_pair = checked.why.count("node-") == 2
            job.wait_for_world(2)
            verdicts = job.events("node-checked")
            job.finish()
            assert [event.details["verdict"] for event in verdicts] == ["good", "good"], verdicts
            if is_pair:
                assert all("together with" in event.why for event in verdicts), verdicts
                return
    raise AssertionError(f"{TRIES} times they were not checked as a pair")
