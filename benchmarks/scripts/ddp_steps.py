"""One small training loop for two runtimes: plain DistributedDataParallel (torchrun) or @stoker.elastic.

Every rank appends `STEP WALL_SECONDS WORLD` to OUT/PID.txt after each step; WORLD is the generation, or the time at
which rank 0 started (ms). `--mode plain` restarts from the newest checkpoint, if there are any, else from step 0.
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
parser.add_argument("--full-size", type=int, default=0, help="world size at which a step sleeps --step-s: the sleep is "
                    "in proportion to a rank's share of the batch (0: it is the same at every size)")  # fmt: skip
parser.add_argument(
    "--checkpoint-every", type=int, default=0, help="steps between two checkpoints in plain mode"
)
parser.add_argument("--ballast-mb", type=int, default=0, help="megabytes of the state that no step changes")
parser.add_argument(
    "--snapshot-every", type=int, default=0, help="steps between two snapshots in memory, if any"
)
parser.add_argument("--checkpoint-url", help="where rank 0 writes as often, in place of memory")
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
    share = len(x) * options.full_size / options.batch if options.full_size else 1.0
    if options.step_s:
        time.sleep(options.step_s * share)


def plain(log):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build()
    saved = Path(options.out) / "checkpoint.pt"
    done = 0
    if saved.exists():
        kept = torch.load(saved)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        done = kept["step"]
    began = torch.tensor([int(time.time() * 1000)])
    dist.broadcast(began, 0)
    ddp = DistributedDataParallel(model)
    order = torch.utils.data.DistributedSampler(Numbers(), size, rank, seed=0)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=options.batch // size, sampler=order)
    for step, (x, y) in enumerate(loader, done + 1):
        step_of(ddp, optimizer, x, y)
        log.write(f"{step} {time.time()} {began.item()}\n")
        if options.checkpoint_every and rank == 0 and step % options.checkpoint_every == 0:
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(kept, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)
        if step == options.steps:
            break
    dist.destroy_process_group()


def elastic(log):
    ctx = stoker.init()
    loader = stoker.Loader(Numbers(), global_batch_size=options.batch, shuffle=True, seed=0)
    model, optimizer = build()
    ballast = torch.nn.Linear(options.ballast_mb * 250_000, 1, bias=False).requires_grad_(False)
    checkpointer = None
    if options.snapshot_every:
        checkpointer = stoker.Checkpointer(
            options.checkpoint_url,
            every_s=None,
            every_commits=options.snapshot_every,
            in_memory=options.checkpoint_url is None,
        )
    state = stoker.State(model=model, optimizer=optimizer, ballast=ballast, checkpointer=checkpointer)

    @stoker.elastic
    def train(state):
        for x, y in loader:
            step_of(state.ddp, state.optimizer, x, y)
            try:
                state.commit()
            finally:  # it may leave the world right after the commit
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
