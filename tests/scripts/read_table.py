"""Training on the rows of Parquet files, group by group; rank 1 of the first world dies at one step."""

import os
import sys

import torch
import torch.nn.functional as F

import stoker

FAIL_AT = 7


def decode(row):
    return torch.tensor(row["x"], dtype=torch.float32), row["label"]


def main():
    torch.set_num_threads(1)
    ctx = stoker.init()
    data = stoker.Dataset(sys.argv[1], decode=decode)
    workers = int(os.environ.get("NW", "0"))
    loader = stoker.Loader(
        data, global_batch_size=16, shuffle="groups", shuffle_window=4, num_workers=workers
    )
    model = torch.nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    state = stoker.State(model=model, optimizer=opt, epoch=0)

    @stoker.elastic
    def train(state):
        while state.epoch < 2:
            for x, y in loader:
                if ctx.generation == 1 and ctx.rank == 1 and state.commits == FAIL_AT:
                    os.kill(os.getpid(), 9)
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
