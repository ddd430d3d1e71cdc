"""A Horovod script that is not elastic, under `stoker run --horovod`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.run_helpers import run

pytestmark = pytest.mark.real
SCRIPT = """
import os
import pathlib
import torch
import horovod.torch as hvd

hvd.init()
places = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
assert places == (hvd.rank(), 2, hvd.rank(), 2, 0, 1), places
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for step in range(4):
    if step == 2 and hvd.rank() == 1 and not pathlib.Path("failed").exists():
        pathlib.Path("failed").touch()
        os.kill(os.getpid(), 9)
    optimizer.zero_grad()
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
sums = hvd.allgather(torch.stack([p.detach().sum() for p in model.parameters()]).reshape(1, 2))
assert torch.equal(sums[0], sums[1]), sums
print("all hold the same", flush=True)
hvd.shutdown()
"""


def test_a_killed_rank_restarts_all(tmp_path: Path) -> None:
    """As under horovodrun with a restart of the job, for there is no state to go on with."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(
        tmp_path, "run", "--horovod", "--no-cache", "--nproc-per-node", "2", "--max-restarts", "1", "train.py"
    )
    assert done.code == 0, done.text
    assert done.out.count("all hold the same") == 2
    assert (tmp_path / "failed").exists()
