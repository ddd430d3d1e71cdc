"""A small elastic training script whose loading is slow, that warms up, and whose device may be lost."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True, help="folder for what each worker says")
parser.add_argument("--records", type=int, default=400)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--decode-s", type=float, default=0.0, help="seconds for each record")
parser.add_argument("--step-s", type=float, default=0.02)
parser.add_argument("--micro", type=int, default=0, help="records of a micro-batch; 0: none are cut")
parser.add_argument("--warm-up-s", type=float, default=0.0)
parser.add_argument("--warm-up-until", default="", help="and until this file is there")
parser.add_argument(
    "--lose-device-at", type=int, default=-1, help="this commit on rank 1, in the first world"
)
parser.add_argument(
    "--one-process", type=int, default=-1, help="this rank's data cannot be read in another process"
)
options = parser.parse_args()
torch.set_num_threads(1)
OWNER, RANK = os.getpid(), int(os.environ["RANK"])


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return options.records

    def __getitem__(self, record):
        if options.one_process == RANK and os.getpid() != OWNER:
            raise ValueError("this handle belongs to another process")
        if options.decode_s:
            time.sleep(options.decode_s)
        x = torch.randn(8, generator=torch.Generator().manual_seed(record))
        return x, (x.sum() > 0).long()


def say(kind, **what):
    path = Path(options.out, f"{kind}-{os.getpid()}.json")
    path.write_text(json.dumps({"pid": os.getpid(), "wall_s": time.time(), **what}))


def rehearse(state):
    say("warm-up-begin", commits=state.commits)
    x, y = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    F.cross_entropy(state.ddp(x), y).backward()
    time.sleep(options.warm_up_s)
    while options.warm_up_until and not Path(options.warm_up_until).exists():
        time.sleep(0.01)
    say("warm-up-end", commits=state.commits)


ctx = stoker.init()
torch.manual_seed(7)
loader = stoker.Loader(Points(), global_batch_size=options.batch, shuffle=True, seed=3)
layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)]
model = torch.nn.Sequential(*layers)
state = stoker.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), epoch=0)


@stoker.elastic(warm_up=rehearse if options.warm_up_s else None)
def train(state):
    while state.epoch < options.epochs:
        for batch in loader:
            if ctx.generation == 1 and ctx.rank == 1 and state.commits == options.lose_device_at:
                raise RuntimeError("CUDA error: device-side assert triggered")
            state.optimizer.zero_grad()
            if options.micro:
                for (x, y), weight in state.micro_batches(batch, options.micro):
                    (F.cross_entropy(state.ddp(x), y) * weight).backward()
            else:
                x, y = batch
                F.cross_entropy(state.ddp(x), y).backward()
            state.optimizer.step()
            time.sleep(options.step_s)
            state.commit()
        state.epoch += 1


train(state)
say(
    "end",
    rank=ctx.rank,
    world_size=ctx.world_size,
    generation=ctx.generation,
    commits=state.commits,
    device=str(ctx.device),
    accelerator=os.environ.get("STOKER_ACCELERATOR"),
    num_workers=loader.num_workers,
    weights=[p.detach().double().sum().item() for p in model.parameters()],
)
