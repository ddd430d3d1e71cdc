"""A script for torchrun that knows nothing of Stoker, and goes on until a file named `over` is in its folder."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
while True:
    ranks = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, torch.ones(1) * dist.get_rank())
    said = {
        "ranks": [int(rank.item()) for rank in ranks],
        "rank": int(os.environ["RANK"]),
    }
    part = folder / f".{os.getpid()}"
    part.write_text(json.dumps(said))
    part.rename(folder / f"{os.getpid()}.json")
    is_over = torch.ones(1) * (folder / "over").exists()
    dist.broadcast(is_over, src=0)
    if is_over.item():
        break
    time.sleep(0.05)
dist.destroy_process_group()
