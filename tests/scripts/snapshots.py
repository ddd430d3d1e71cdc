"""A small elastic training script that keeps snapshots in memory; what it does is set by its arguments."""

import argparse
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True, help="folder for what each worker says")
parser.add_argument("--url", default=None)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--step-s", type=float, default=0.03)
parser.add_argument("--width", type=int, default=20_000)
parser.add_argument(
    "--hold-at", type=int, nargs="*", default=(), help="wait at commit N until there is a file `go-N`"
)
options = parser.parse_args()
torch.set_num_threads(1)


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, record):
        x = torch.randn(8, generator=torch.Generator().manual_seed(record))
        return x, (x.sum() > 0).long()


def main():
    ctx = stoker.init()
    torch.manual_seed(1234)
    random.seed(ctx.rank)
    loader = stoker.Loader(Points(), global_batch_size=20, shuffle=True, seed=3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, options.width),
        torch.nn.BatchNorm1d(options.width),
        torch.nn.Linear(options.width, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpointer = stoker.Checkpointer(options.url, every_s=None, every_commits=options.every)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0, checkpointer=checkpointer)

    @stoker.elastic
    def train(state):
        entry = {"pid": os.getpid(), "rank": ctx.rank, "commits": state.commits, "size": ctx.world_size}
        with Path(options.out, "worlds.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        while state.epoch < options.epochs:
            for x, y in loader:
                while state.commits in options.hold_at and not os.path.exists(f"go-{state.commits}"):
                    time.sleep(0.01)
                loss = F.cross_entropy(state.ddp(x), y)
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                time.sleep(options.step_s)
                state.commit()
            state.epoch += 1

    train(state)
    said = {
        "rank": ctx.rank,
        "commits": state.commits,
        "weights": [p.detach().double().sum().item() for p in model.parameters()],
        "folder": os.environ["STOKER_SNAPSHOT_DIR"],
    }
    Path(options.out, f"{os.getpid()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
