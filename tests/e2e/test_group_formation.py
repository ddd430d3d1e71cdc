"""Groups that cannot form: a failed attempt must not spoil the next ones, nor cost a healthy worker its life."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import psutil
import pytest
import torch

from stoker.train.group import ProcessGroup
from stoker.wire.job import Member, WorldView
from tests.e2e.hosts import Host, Hosts, needs_hosts
from tests.e2e.run_helpers import TOY, wait_for

pytestmark = pytest.mark.real


def world(generation: int, rank: int, store: str) -> WorldView:
    member = Member(f"w{rank}", f"n{rank}", rank, 0, 1, rank, copy_state=False)
    return WorldView(generation, 2, (member,), 0, 0, store)


def try_until_open(
    rank: int, endpoints: Queue[str], both_are_here: Barrier, opened: Queue[tuple[int, int]]
) -> None:
    """Rank 1 does not even reach the store of the first generation; rank 0 fails later in the same attempt."""
    group = ProcessGroup(torch.device("cpu"), timeout_s=5.0, address="127.0.0.1")
    if rank == 0:
        endpoints.put(group.endpoint)
        store = first = group.endpoint
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            first = f"127.0.0.1:{free.getsockname()[1]}"
        store = endpoints.get()
    for generation in range(1, 6):
        # Both are told of a generation at once, as by a master: a refused connection is tried again after a random
        # delay, and ranks that are a generation apart would not meet.
        both_are_here.wait(60)
        try:
            group.open(world(generation, rank, first if generation == 1 else store), rank)
        except RuntimeError:
            group.close()
            if rank == 0:
                store = group.endpoint
            continue
        opened.put((rank, generation))
        time.sleep(60)  # the other one may need its store yet
        return


def test_an_attempt_that_fails_differently_on_two_ranks_does_not_spoil_the_next() -> None:
    context = multiprocessing.get_context("spawn")
    endpoints: Queue[str] = context.Queue()
    opened: Queue[tuple[int, int]] = context.Queue()
    both_are_here = context.Barrier(2)
    processes = [
        context.Process(target=try_until_open, args=(rank, endpoints, both_are_here, opened))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        (_, one), (_, other) = opened.get(timeout=90), opened.get(timeout=90)
        assert one == other
    finally:
        for process in processes:
            process.kill()
            process.join()


def start(host: Host, endpoint: str, log: Path) -> subprocess.Popen[str]:
    with log.open("w") as out:
        return host.popen(
            sys.executable, "-m", "stoker.cli.main", "run", "--nnodes", "2:3", "--rdzv-endpoint", endpoint,
            "--no-cache", "--timeout", "20s", TOY, "--epochs", "1000", "--step-s", "0.05",
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip


@needs_hosts
def test_a_newcomer_that_cannot_hear_one_of_the_others_costs_nobodys_life(tmp_path: Path) -> None:
    logs = [tmp_path / f"h{n}.txt" for n in (1, 2, 3)]
    with Hosts(tmp_path, 3) as hosts:
        commands = [start(hosts[n], hosts.endpoint, logs[n]) for n in (0, 1)]
        try:
            wait_for(lambda: "runs: 2 workers" in logs[0].read_text(), 90, "world of two")
            before = {p.pid for host in (hosts[0], hosts[1]) for p in host.workers()}
            hosts.partition([hosts[1]], [hosts[2]])
            commands.append(start(hosts[2], hosts.endpoint, logs[2]))
            wait_for(
                lambda: "trying without the youngest" in logs[0].read_text(), 120, "suspicion of the youngest"
            )
            wait_for(lambda: logs[0].read_text().count("runs: 2 workers") > 1, 60, "world without it")
            assert all(psutil.pid_exists(pid) for pid in before), logs[0].read_text()
            assert "SIGKILL" not in logs[0].read_text()
        finally:
            hosts.heal()
            for command in commands:
                command.terminate()
            for command in commands:
                command.wait(90)
