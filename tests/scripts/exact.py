"""An elastic script in exact mode: dropout, batch normalisation, augmentation, a scheduler, and faults on demand."""

import argparse
import hashlib
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--out", default=".", help="folder for what each worker says")
parser.add_argument("--records", type=int, default=203)
parser.add_argument("--batch", type=int, default=20)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--virtual-ranks", type=int, default=4)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--step-s", type=float, default=0.0)
parser.add_argument(
    "--fail-at", default="", help="RANK:COMMIT:WHERE, once; WHERE: forward, backward, step, commit"
)
parser.add_argument("--once", default="", help="a file that is there when the fault has been")
parser.add_argument("--hold", default="", help="wait before commit 14 until this file exists")
parser.add_argument("--misuse", default="", help="do something that cannot be exact")
options = parser.parse_args()


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return options.records

    def __getitem__(self, record):
        generator = torch.Generator().manual_seed(record)
        image = torch.randn(3, 8, 8, generator=generator)
        label = (image.sum() > 0).long()
        if random.random() < 0.5:
            image = image.flip(-1)
        image += 0.1 * torch.randn(3, 8, 8) + float(np.random.rand()) * 0.01
        return image, label


class Fault:
    def __init__(self, ctx, state):
        self.ctx, self.state = ctx, state

    def __call__(self, where):
        if not options.fail_at or Path(options.once).exists():
            return
        rank, at, wanted = options.fail_at.split(":")
        if (self.ctx.rank, self.state.commits, where) == (int(rank), int(at), wanted):
            Path(options.once).touch()
            os.kill(os.getpid(), 9)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.first = torch.nn.Linear(8 * 6 * 6, 32)
        self.last = torch.nn.Linear(32, 2)
        self.unused = torch.nn.Linear(3, 3)
        self.fault = lambda where: None

    def forward(self, x):
        x = F.relu(self.norm(self.convolution(x)))
        self.fault("forward")
        x = F.dropout(self.first(x.flatten(1)), 0.3, self.training)
        return self.last(x)


def digest(model):
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def main():
    ctx = stoker.init()
    torch.manual_seed(1234 + ctx.rank)
    loader = stoker.Loader(
        Points(), global_batch_size=options.batch, shuffle=True, seed=3, num_workers=options.num_workers,
        virtual_ranks=options.virtual_ranks,
    )  # fmt: skip
    torch.manual_seed(7)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    state = stoker.State(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, seen=0)
    model.fault = fault = Fault(ctx, state)
    optimizer.register_step_post_hook(lambda *_: fault("step"))
    model.first.weight.register_hook(lambda gradient: fault("backward"))
    losses = Path(options.out, f"losses-{os.getpid()}.jsonl")

    @stoker.elastic
    def train(state):
        while state.epoch < options.epochs:
            for x, y in loader:
                while options.hold and state.commits == 14 and not os.path.exists(options.hold):
                    time.sleep(0.01)
                loss = F.cross_entropy(state.ddp(x), y)
                part = stoker.data.session.session().micro_batch.number
                with losses.open("a") as said:
                    said.write(json.dumps([state.commits, part, loss.item().hex(), ctx.world_size]) + "\n")
                state.optimizer.zero_grad()
                loss.backward()
                if options.misuse == "two":
                    F.cross_entropy(state.ddp(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                (optimizer if options.misuse == "optimizer" else state.optimizer).step()
                (scheduler if options.misuse == "scheduler" else state.scheduler).step()
                state.seen += 1
                fault("commit")
                state.commit()
                time.sleep(options.step_s)
            state.epoch += 1

    train(state)
    end = {"pid": os.getpid(), "rank": ctx.rank, "world_size": ctx.world_size, "commits": state.commits}
    end |= {
        "digest": digest(model),
        "seen": state.seen,
        "lr": optimizer.param_groups[0]["lr"],
        "threads": torch.get_num_threads(),
    }
    Path(options.out, f"{os.getpid()}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
