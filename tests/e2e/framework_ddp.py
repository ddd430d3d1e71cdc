"""PyTorch's DDP and nothing of Stoker's but the loader: `framework_ddp.py STEPS [resume]`, under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import stoker
from tests.e2e.framework_helpers import BATCH, Rows, note


def main() -> None:
    steps, resume = int(sys.argv[1]), "resume" in sys.argv
    torch.set_num_threads(1)
    # Made before the world is known: it is asked for when a loop begins.
    loader = stoker.Loader(Rows(), global_batch_size=BATCH, shuffle=True, num_workers=2)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if resume:
        saved = torch.load("checkpoint.pt")
        model.module.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
    done = 0
    while done < steps:
        for batch in loader:
            note("train", dist.get_rank(), batch["number"])
            F.cross_entropy(model(batch["x"]), batch["labels"]).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "loader": loader.state_dict()}, "checkpoint.pt")
    dist.barrier()
    Path(f"ended-{dist.get_rank()}-of-{dist.get_world_size()}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
