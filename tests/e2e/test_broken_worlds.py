"""What scripts make of a peer's death, and what a worker says of worlds that break."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.run_helpers import Stoker, run, wait_for

pytestmark = pytest.mark.real

START = """
import os, time
import stoker, torch
import torch.distributed as dist
torch.set_num_threads(1)
ctx = stoker.init()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = stoker.State(model=model, optimizer=optimizer)
"""
WRAPPED_IN_A_LOOP_OVER_SHARDS = """
class TrainingError(Exception):
    pass

def step(state):
    try:
        state.ddp(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        raise TrainingError(f"step {state.commits} failed") from error
    optimizer.step()
    state.commit()

@stoker.elastic
def train(state):
    for shard in stoker.shards("records", records=1000, shard_size=20, max_failures=1):
        for _ in shard.records:
            if (ctx.rank, ctx.generation, state.commits) == (1, 1, 30):
                os.kill(os.getpid(), 9)
            step(state)
            time.sleep(0.01)
            if state.commits == 60:
                return

train(state)
print("commits", state.commits)
"""
BREAKS_EVERY_WORLD = """
@stoker.elastic
def train(state):
    raise dist.DistBackendError("NCCL error in: ncclInvalidUsage: Duplicate GPU detected")

train(state)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(START + text)
    return str(path)


def test_a_peers_death_is_no_fault_of_a_script_that_wraps_it_nor_of_its_shards(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--max-restarts", "1", "--no-cache",
               script(tmp_path, WRAPPED_IN_A_LOOP_OVER_SHARDS))  # fmt: skip
    assert done.code == 0, done.text
    assert "commits 60" in done.out, done.text
    assert "shard" not in done.err, "one failure would have ended the job"
    assert "broke at commit" not in done.text, "a death is told by who saw it"


def test_what_breaks_every_world_is_told(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "2", "--no-cache", "--timeout", "20s",
                 script(tmp_path, BREAKS_EVERY_WORLD))  # fmt: skip

    def told() -> int:
        logs = tmp_path.glob("stoker-logs/*/*/worker-*/stderr.log")
        return sum("broke at commit 0" in path.read_text() for path in logs)

    try:
        wait_for(lambda: told() == 2, why="the reason")
    finally:
        job.interrupt()
        done = job.finish()
    lines = [line for line in done.text.splitlines() if "broke at commit 0" in line]
    assert len(lines) == 2, f"once by each worker: {done.text}"
    assert all("as others did before" in line and "Duplicate GPU detected" in line for line in lines)
