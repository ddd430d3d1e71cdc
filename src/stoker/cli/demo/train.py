"""The training script of the demo: what a user of Stoker writes, and nothing else.

Runs under `stoker demo`, or by hand:

    stoker run --nproc-per-node 3 --bucket fashion=stoker-demo/origin -m stoker.cli.demo.train
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import stoker


def decode(body: bytes) -> tuple[torch.Tensor, int]:
    """A record is its label and the pixels of a square picture."""
    side = math.isqrt(len(body) - 1)
    pixels = torch.frombuffer(bytearray(body), dtype=torch.uint8, offset=1)
    return pixels.view(1, side, side), body[0]


def build_model() -> nn.Module:
    """A small CNN for square pictures in one channel and ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def evaluate(model: nn.Module, loader: stoker.Loader) -> float:
    """Accuracy on the test set, each worker judging its share."""
    counts = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for pictures, labels in loader:
            right = model(pictures.float() / 255).argmax(1) == labels
            counts += torch.tensor([right.sum(), len(labels)])
    model.train()
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    """Train, then say how good the model is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--num-workers", type=int, default=1)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    ctx = stoker.init()
    train_data = stoker.Dataset("stoker://fashion/train/", decode=decode)
    test_data = stoker.Dataset("stoker://fashion/test/", decode=decode)
    loader = stoker.Loader(
        train_data,
        global_batch_size=flags.global_batch_size,
        shuffle=True,
        seed=0,
        num_workers=flags.num_workers,
        name="train",
    )
    test_loader = stoker.Loader(test_data, global_batch_size=256, name="test")
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0)

    @stoker.elastic
    def train(state: stoker.State) -> None:
        while state.epoch < flags.epochs:
            for pictures, labels in loader:
                loss = F.cross_entropy(state.ddp(pictures.float() / 255), labels)
                state.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                state.optimizer.step()
                state.commit()
                if ctx.rank == 0 and state.commits % 5 == 0:
                    print(f"step {state.commits} loss {loss.item():.4f}", flush=True)
            state.epoch += 1
        accuracy = evaluate(state.model, test_loader)
        if ctx.rank == 0:
            print(f"accuracy {accuracy:.4f}", flush=True)

    train(state)


if __name__ == "__main__":
    main()
