"""A small elastic training script; what it does is set by its arguments."""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="", help="folder for what each worker says at its end")
parser.add_argument("--records", type=int, default=400)
parser.add_argument("--batch", type=int, default=20)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--step-s", type=float, default=0.02)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--batch-norm", action="store_true")
parser.add_argument(
    "--fail-at", default="", help="RANK:COMMIT:HOW in the first generation; HOW is kill, raise, exit7"
)
parser.add_argument("--metric", action="store_true", help="a second collective after the optimizer's step")
parser.add_argument("--hold", default="", help="wait before commit 5 until this file exists")
parser.add_argument("--hold-at", type=int, default=5, help="another commit than 5")
parser.add_argument(
    "--last-epoch", default="", help="file that says how many epochs there are; else it goes on"
)
options = parser.parse_args()
torch.set_num_threads(1)


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return options.records

    def __getitem__(self, record):
        generator = torch.Generator().manual_seed(record)
        x = torch.randn(8, generator=generator)
        return x, (x.sum() > 0).long()


def fail(ctx, commits):
    if not options.fail_at:
        return
    rank, at, how = options.fail_at.split(":")
    if ctx.rank != int(rank) or commits != int(at) or ctx.generation != 1:
        return
    if how == "kill":
        os.kill(os.getpid(), 9)
    elif how == "raise":
        raise ValueError("this script is wrong")
    else:
        sys.exit(7)


def is_last(epoch):
    """Whether `epoch` epochs are enough. The file names one that is still ahead when it appears."""
    if not options.last_epoch:
        return epoch >= options.epochs
    try:
        return epoch >= int(Path(options.last_epoch).read_text())
    except FileNotFoundError:
        return False


def main():
    ctx = stoker.init()
    torch.manual_seed(1234 + ctx.rank)
    random.seed(ctx.rank)
    loader = stoker.Loader(
        Points(), global_batch_size=options.batch, shuffle=True, seed=3, num_workers=options.num_workers
    )
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)]
    if options.batch_norm:
        layers.insert(1, torch.nn.BatchNorm1d(16))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0)
    worlds = []

    @stoker.elastic
    def train(state):
        worlds.append((ctx.generation, ctx.rank, ctx.world_size, state.commits))
        while not is_last(state.epoch):
            for x, y in loader:
                fail(ctx, state.commits)
                if options.hold and state.commits == options.hold_at:
                    while not os.path.exists(options.hold):
                        time.sleep(0.01)
                loss = F.cross_entropy(state.ddp(x), y)
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                if options.metric:
                    torch.distributed.all_reduce(loss.detach())
                time.sleep(options.step_s)
                state.commit()
            state.epoch += 1
        return "done"

    result = train(state)
    if options.out:
        said = {
            "pid": os.getpid(),
            "result": result,
            "rank": ctx.rank,
            "world_size": ctx.world_size,
            "generation": ctx.generation,
            "commits": state.commits,
            "worlds": worlds,
            "weights": [p.detach().double().sum().item() for p in model.parameters()],
        }
        Path(options.out, f"{os.getpid()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
