"""An elastic training script that goes on until it is told, between two epochs, which one is the last.

Orders are files in the folder --orders: `last-epoch` holds the number of epochs; `hang.HOST` has the worker on that
host stand still in its step for ever. The worker takes it away as it begins to obey.
"""

import argparse
import hashlib
import json
import os
import socket
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--orders", required=True, help="folder of orders")
parser.add_argument("--out", required=True, help="folder for what each worker says at its end")
parser.add_argument("--records", type=int, default=1000)
parser.add_argument("--batch", type=int, default=20)
parser.add_argument("--step-s", type=float, default=0.03)
parser.add_argument(
    "--virtual-ranks", type=int, default=0, help="exact mode, with so many micro-batches a step"
)
options = parser.parse_args()
torch.set_num_threads(1)
LAST_EPOCH = Path(options.orders, "last-epoch")
HANG = Path(options.orders, f"hang.{socket.gethostname()}")


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return options.records

    def __getitem__(self, record):
        generator = torch.Generator().manual_seed(record)
        x = torch.randn(8, generator=generator)
        return x, (x.sum() > 0).long()


def is_last(epoch):
    """Whether `epoch` epochs are enough. The file names one that is still far ahead when it appears, so that every
    worker finds it there in time, and all come to the same answer."""
    try:
        return epoch >= int(LAST_EPOCH.read_text())
    except FileNotFoundError:
        return False


def hang_if_told():
    if HANG.exists():
        HANG.unlink()
        while True:
            time.sleep(3600)


def new_model():
    if not options.virtual_ranks:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    torch.manual_seed(5)
    first, last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 2)
    return torch.nn.Sequential(first, torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2), last)


def digest(model):
    """Of every bit of it."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def main():
    ctx = stoker.init()
    torch.manual_seed(1234)
    loader = stoker.Loader(
        Points(),
        global_batch_size=options.batch,
        shuffle=True,
        seed=3,
        virtual_ranks=options.virtual_ranks or None,
    )
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0)

    @stoker.elastic
    def train(state):
        while not is_last(state.epoch):
            for x, y in loader:
                hang_if_told()
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
        "world_size": ctx.world_size,
        "epochs": state.epoch,
        "commits": state.commits,
        "weights": digest(model),
    }
    Path(options.out, f"{os.getpid()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
