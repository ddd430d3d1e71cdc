"""Processes that a worker starts, or that it is started by: they are no workers, and they end with the job."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.run_helpers import TOY, Stoker, alive, ledger, run, wait_for

pytestmark = pytest.mark.real

TRAIN = """
import os, sys, time
import torch
import torch.multiprocessing as mp
import stoker

torch.set_num_threads(1)
context = stoker.init()  # at the top, so that a process that is spawned says hello as well


def helper(number):
    try:
        stoker.sync("mine")
    except stoker.StokerError as error:
        assert "has no part in the job of its own: use" in str(error), error
        return
    raise AssertionError("a helper has spoken for its worker")


def main():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = stoker.State(model=model, optimizer=optimizer)
    started = []

    @stoker.elastic
    def train(state):
        while state.commits < 60:
            if state.commits == 10 and context.rank == 0:
                started.append(mp.spawn(helper, nprocs=1, join=False))
            state.ddp(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.commit()
            time.sleep(0.1)

    train(state)
    assert all(process.join(30) for process in started), "the helper has ended well"
    print("done", state.commits, "generation", context.generation)


if __name__ == "__main__":
    main()
"""


def test_a_process_that_a_worker_spawns_does_not_take_its_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run(
        tmp_path, "run", "--no-cache", "--nproc-per-node", "2", "--timeout", "30s", str(script), timeout_s=150
    )
    assert done.code == 0, done.text
    for rank in (0, 1):
        assert f"[rank {rank}] done 60 generation 1" in done.out, done.text


WRAPPER = """#!/bin/sh
# a launcher of the user's own: it does not become the program, but waits for it
"{python}" -u "$@"
code=$?
echo "wrapped $code"
exit $code
"""


def wrapped(folder: Path) -> str:
    path = folder / "wrapper.sh"
    path.write_text(WRAPPER.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def trainers(job: Stoker) -> list[psutil.Process]:
    """The processes that train, each below a wrapper."""
    return [
        process for wrapper in job.workers() for process in wrapper.children() if TOY in process.cmdline()
    ]


def test_a_worker_behind_a_launcher_is_seen_to_be_stopped(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--no-cache", "--nproc-per-node", "3", "--timeout", "60s", "--audit", "--no-python",
                 wrapped(tmp_path), TOY, "--out", ".", "--epochs", "12", "--step-s", "0.05")  # fmt: skip
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 15, why="commits")
    before = max(e["step"] for e in ledger(tmp_path, "commit"))
    os.kill(trainers(job)[1].pid, signal.SIGSTOP)
    wait_for(
        lambda: max(e["step"] for e in ledger(tmp_path, "commit")) > before + 2, 60, "progress without it"
    )
    done = job.finish()
    assert done.code == 0, done.text
    assert "was stopped (state T) for" in done.err
    assert "records missed 0, repeated 0" in done.err
    assert "[rank 0] wrapped 0" in done.out


def test_the_stacks_of_a_worker_behind_a_launcher_are_its_own(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--no-cache", "--timeout", "60s", "--audit", "--no-python", wrapped(tmp_path), TOY,
                 "--out", ".", "--epochs", "99", "--step-s", "0.05")  # fmt: skip
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 3, why="commits")
    (trainer,) = trainers(job)
    shown = run(tmp_path, "job", "stacks", timeout_s=60).out
    job.interrupt()
    job.finish()
    assert re.search(rf"process {trainer.pid}\b", shown), shown
    assert "toy.py" in shown, shown


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_workers_have_started_dies_with_an_agent_that_is_killed(
    tmp_path: Path, is_wrapped: bool
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    launcher = ("--no-python", wrapped(tmp_path)) if is_wrapped else ()
    job = Stoker(
        tmp_path, "run", "--no-cache", "--nproc-per-node", "2", "--timeout", "60s", *launcher, str(script)
    )
    logs = wait_for(
        lambda: (
            [log for log in tmp_path.glob("stoker-logs/*/*/*/stdout.log") if b"child" in log.read_bytes()][1:]
            and sorted(tmp_path.glob("stoker-logs/*/*/*/stdout.log"))
        ),
        why="children",
    )
    children = [int(log.read_text().split()[1]) for log in logs]
    family = [process.pid for process in psutil.Process(job.process.pid).children(recursive=True)]
    master = job.master().pid
    assert set(children) < set(family)
    job.process.kill()
    job.process.communicate()
    wait_for(lambda: not alive([pid for pid in family if pid != master]), 60, "the end of all but the master")
    wait_for(lambda: not alive([master]), 90, "the end of the master, which waits for the agent for a while")
