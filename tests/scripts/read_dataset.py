"""The training API as the documentation shows it, on records that are JSON lists of numbers."""

import json
import os
import sys

import torch
import torch.nn.functional as F

import stoker


def decode(record):
    values = json.loads(record)
    return torch.tensor(values[1:], dtype=torch.float32), int(values[0])


def main():
    ctx = stoker.init()
    data = stoker.Dataset(sys.argv[1], decode=decode)
    loader = stoker.Loader(
        data, global_batch_size=16, shuffle=True, seed=0, num_workers=int(os.environ.get("NW", "2"))
    )
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = stoker.State(model=model, optimizer=opt, epoch=0)

    @stoker.elastic
    def train(state):
        while state.epoch < 3:
            for x, y in loader:
                loss = F.cross_entropy(state.ddp(x), y)
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                state.commit()
            state.epoch += 1

    train(state)
    print(f"trained {state.commits} steps in a world of {ctx.world_size}")


if __name__ == "__main__":
    main()
