"""A script for torchrun that knows nothing of Stoker."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(value)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
print("sum", int(value.item()), *(f"{name}={os.environ[name]}" for name in names), flush=True)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if "--fail-first" in sys.argv and attempt == 0 and dist.get_rank() == 1:
    raise RuntimeError("the first attempt fails")
try:
    dist.barrier()
except RuntimeError:
    time.sleep(1)  # who has lost a peer ends after it, however busy the machine is
    raise
dist.destroy_process_group()
