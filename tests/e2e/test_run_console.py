"""A console that does not read (Ctrl-S, a pager, a stalled collector of logs) must not stop the agent behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.run_helpers import own_environment

pytestmark = pytest.mark.real

LOUD = """
import time

import torch

import stoker

torch.set_num_threads(1)
context = stoker.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = stoker.State(model=model, optimizer=optimizer)


@stoker.elastic
def train(state):
    while state.commits < 300:
        state.ddp(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.commit()
        print(state.commits, "x" * 8000)
        time.sleep(0.05)


train(state)
print("generation", context.generation)
"""


HERE = ("--nproc-per-node", "2", "--timeout", "10s")
OVER_HOSTS = (
    "--timeout",
    "30s",  # half of it is what a host's agent has to join
    "--hosts",
    "h1,h2",
    "--nnodes",
    "2",
    "--rdzv-endpoint",
    "127.0.0.1:0",
    "--remote-shell",
    "env WHERE={host}",
)


@pytest.mark.parametrize("where", [HERE, OVER_HOSTS], ids=["here", "over hosts"])
def test_a_run_whose_console_takes_nothing_trains_on_to_its_end(
    tmp_path: Path, where: tuple[str, ...]
) -> None:
    """Standard output and error are one pipe, which nobody reads until the command has ended."""
    (tmp_path / "loud.py").write_text(LOUD)
    reading, writing = os.pipe()
    command = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli.main", "run", "--no-cache", *where, "loud.py"],
        cwd=tmp_path, env=own_environment(tmp_path), stdout=writing, stderr=writing,
    )  # fmt: skip
    os.close(writing)
    try:
        code = command.wait(200)
    finally:
        command.kill()
        command.wait()
    with os.fdopen(reading, "rb") as file:
        shown = file.read()
    assert code == 0, shown[-2000:]
    assert shown.count(b"x" * 8000) < 300, "the console has taken but what the pipe holds"
    kept = [path.read_text().splitlines() for path in tmp_path.glob("stoker-logs/**/worker-*/stdout.log")]
    assert [len(lines) for lines in kept] == [301, 301], "the files have all of it"
    assert [lines[-1] for lines in kept] == ["generation 1", "generation 1"], "nobody was taken for dead"
