"""One small training loop for two runtimes: plain DistributedDataParallel (torchrun) or @stoker.elastic.

Every rank appends `STEP WALL_SECONDS WORLD` to OUT/PID.txt after each step; WORLD is the generation, or how often the
workers were restarted. `--mode plain` restarts from step 0.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import stoker

RECORDS = 1_000_000
parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["plain", "elastic"])
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=10_000)
parser.add_argument("--step-s", type=float, default=0.0, help="sleep in each step")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--batch", type=int, default=96, help="global batch size")
options = parser.parse_args()
torch.set_num_threads(1)


class Numbers(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(4096, 32)

    def __len__(self):
        return RECORDS

    def __getitem__(self, record):
        return self.x[record % 4096], record % 10

    def __getitems__(self, records):
        return [self[r] for r in records]


def build():
    width = options.width
    model = torch.nn.Sequential(
        torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    )  # fmt: skip
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step_of(ddp, optimizer, x, y):
    loss = F.cross_entropy(ddp(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if options.step_s:
        time.sleep(options.step_s)


def plain(log):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build()
    ddp = DistributedDataParallel(model)
    order = torch.utils.data.DistributedSampler(Numbers(), size, rank, seed=0)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=options.batch // size, sampler=order)
    for step, (x, y) in enumerate(loader, 1):
        step_of(ddp, optimizer, x, y)
        log.write(f"{step} {time.time()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
        if step == options.steps:
            break
    dist.destroy_process_group()


def elastic(log):
    ctx = stoker.init()
    loader = stoker.Loader(Numbers(), global_batch_size=options.batch, shuffle=True, seed=0)
    model, optimizer = build()
    state = stoker.State(model=model, optimizer=optimizer)

    @stoker.elastic
    def train(state):
        for x, y in loader:
            step_of(state.ddp, state.optimizer, x, y)
            state.commit()
            log.write(f"{state.commits} {time.time()} {ctx.generation}\n")
            if state.commits >= options.steps:
                break

    train(state)


def main():
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.getpid()}.txt").open("w", buffering=1) as log:
        (plain if options.mode == "plain" else elastic)(log)


if __name__ == "__main__":
    main()
