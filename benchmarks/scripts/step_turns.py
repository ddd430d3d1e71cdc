"""Steps in one process, in turn: bare DistributedDataParallel, then @stoker.elastic with commit."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=300, help="of each kind")
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--virtual-ranks", type=int, default=0, help="exact mode, with so many of them")
options = parser.parse_args()
torch.set_num_threads(1)
BATCH = 64


class Records(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(2048, 1, 28, 28)

    def __len__(self):
        return 1_000_000

    def __getitem__(self, record):
        return self.x[record % 2048], record % 10


def build():
    width = options.width
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(32 * 49, width), torch.nn.ReLU(), torch.nn.Linear(width, 10),
    )  # fmt: skip
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main():
    ctx = stoker.init()
    model, optimizer = build()
    bare_model, bare_optimizer = build()
    records = Records()
    loader = stoker.Loader(
        records,
        global_batch_size=BATCH * ctx.world_size,
        shuffle=True,
        virtual_ranks=options.virtual_ranks or None,
    )
    state = stoker.State(model=model, optimizer=optimizer)
    results = {"bare": [], "elastic": []}

    @stoker.elastic
    def train(state):
        bare = DistributedDataParallel(bare_model)
        sampler = torch.utils.data.DistributedSampler(records, ctx.world_size, ctx.rank)
        bare_data = iter(torch.utils.data.DataLoader(records, batch_size=BATCH, sampler=sampler))
        data = iter(loader)

        def bare_step():
            x, y = next(bare_data)
            loss = F.cross_entropy(bare(x), y)
            bare_optimizer.zero_grad()
            loss.backward()
            bare_optimizer.step()

        def elastic_step():
            for _ in range(max(1, options.virtual_ranks // ctx.world_size)):
                x, y = next(data)
                loss = F.cross_entropy(state.ddp(x), y)
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                state.commit()

        for _ in range(10):
            bare_step()
            elastic_step()
        sides = [("bare", bare_step), ("elastic", elastic_step)]
        for turn in range(options.steps):
            for name, step in sides if turn % 2 == 0 else reversed(sides):
                torch.distributed.barrier()
                began = time.perf_counter()
                step()
                results[name].append(time.perf_counter() - began)

    train(state)
    if ctx.rank == 0:
        Path(options.out).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
