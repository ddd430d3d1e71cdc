"""Scripts written as Horovod's well-known examples are, shortened, under `stoker run --horovod`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.run_helpers import run

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
BEGIN = """
import os, sys
import torch
import torch.nn.functional as F
import torch.utils.data.distributed
import horovod
import horovod.torch as hvd

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
points = torch.randn(64, 4)
dataset = torch.utils.data.TensorDataset(points, (points.sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), hvd.SyncBatchNorm(8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
compression = hvd.Compression.fp16 if "--fp16" in sys.argv else hvd.Compression.none

def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()
"""
MNIST = (
    BEGIN
    + """
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression,
                                     op=hvd.Average, gradient_predivide_factor=1.0)
for epoch in range(1, 4):
    model.train()
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    model.eval()
    right = sum((model(x).argmax(1) == y).float().sum().item() for x, y in loader) / len(sampler)
    right = metric_average(right, "avg_accuracy")
sums = hvd.allgather(torch.stack([p.detach().sum() for p in model.parameters()])[None])
assert torch.equal(sums[0], sums[1]), sums
assert right > 0.7, right
print("trained well", flush=True)
"""
)
IMAGENET = (
    BEGIN
    + """
BATCH, PASSES, EPOCHS = 4, 2, 3
class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.), torch.tensor(0.)
    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

begin = 0
for epoch in range(EPOCHS, 0, -1):
    if hvd.rank() == 0 and os.path.exists(f"checkpoint-{epoch}.pt"):
        begin = epoch
        break
begin = hvd.broadcast(torch.tensor(begin), root_rank=0, name="resume_from_epoch").item()
sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH * PASSES, sampler=sampler)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     backward_passes_per_step=PASSES, gradient_predivide_factor=2.0)
if begin and hvd.rank() == 0:
    kept = torch.load(f"checkpoint-{begin}.pt")
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
assert len(optimizer.state_dict()["state"]) == (6 if begin else 0)
for epoch in range(begin, EPOCHS):
    model.train()
    sampler.set_epoch(epoch)
    metric = Metric("train_loss")
    for x, y in loader:
        optimizer.zero_grad()
        for at in range(0, len(x), BATCH):
            loss = F.cross_entropy(model(x[at:at + BATCH]), y[at:at + BATCH])
            metric.update(loss)
            loss.div_(PASSES)
            loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"checkpoint-{epoch + 1}.pt")
    if epoch == 0:
        sys.exit(0)
print("went on from", begin, flush=True)
"""
)
ELASTIC = (
    BEGIN
    + """
loader = torch.utils.data.DataLoader(dataset, batch_size=8)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 4):
        state.model.train()
        left = len(loader) - state.batch
        for state.batch, (x, y) in enumerate(loader):
            if state.batch >= left:
                break
            if (state.epoch, state.batch, hvd.rank()) == (2, 3, 1) and not os.path.exists("failed"):
                open("failed", "w").close()
                os.kill(os.getpid(), 9)
            state.optimizer.zero_grad()
            F.cross_entropy(state.model(x), y).backward()
            state.optimizer.step()
            state.commit()
        state.batch = 0
    state.losses.append(state.epoch)

def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * hvd.size()

state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0, losses=[])
state.register_reset_callbacks([on_state_reset])
train(state)
model.eval()
with torch.no_grad():
    right = metric_average((model(points).argmax(1) == dataset.tensors[1]).float().mean().item(), "avg_accuracy")
assert right > 0.7 and state.losses == [3], (right, state.losses)
print("trained well with", hvd.size(), flush=True)
"""
)


def test_pytorch_mnist(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MNIST)
    done = run(tmp_path, "run", "--horovod", "--no-cache", "--nproc-per-node", "2", "train.py", "--fp16")
    assert done.code == 0, done.text
    assert done.out.count("trained well") == 2


def test_pytorch_imagenet_resnet50(tmp_path: Path) -> None:
    """It ends after the first epoch, and goes on from its checkpoint, which rank 0 alone reads."""
    (tmp_path / "train.py").write_text(IMAGENET)
    arguments = ("run", "--horovod", "--no-cache", "--nproc-per-node", "2", "train.py")
    assert run(tmp_path, *arguments).code == 0
    done = run(tmp_path, *arguments)
    assert done.code == 0, done.text
    assert done.out.count("went on from 1") == 2


def test_pytorch_mnist_elastic(tmp_path: Path) -> None:
    """A rank dies; what comes after the function may use collectives. The next one may be there too late."""
    (tmp_path / "train.py").write_text(ELASTIC)
    done = run(tmp_path, "run", "--horovod", "--no-cache", "--nproc-per-node", "2", "train.py")
    assert done.code == 0, done.text
    assert "trained well with" in done.out
    assert (tmp_path / "failed").exists()
