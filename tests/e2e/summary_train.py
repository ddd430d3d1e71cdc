"""An elastic training script that reads a folder: `summary_train.py URL`."""

from __future__ import annotations

import sys

import numpy as np
import torch

import stoker


def decode(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8)[:64].astype(np.float32))


def main(url: str) -> None:
    stoker.init()
    data = stoker.Dataset(url, decode=decode)
    loader = stoker.Loader(data, global_batch_size=32, shuffle=True, num_workers=1, name="train")
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0)

    @stoker.elastic
    def train(state: stoker.State) -> None:
        while state.epoch < 2:
            for batch in loader:
                optimizer.zero_grad()
                state.ddp(batch).square().mean().backward()
                optimizer.step()
                state.commit()
            state.epoch += 1

    train(state)


if __name__ == "__main__":
    main(*sys.argv[1:])
