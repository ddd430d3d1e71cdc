"""A small elastic job that goes on until a file says which epoch is the last."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import stoker

RECORDS, BATCH = 200, 20


class Points(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, record: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(record))
        return x, (x.sum() > 0).long()


def last_epoch() -> int:
    """Written some epochs ahead, so that all ranks come to know it in time."""
    path = Path("last-epoch")
    return int(path.read_text()) if path.exists() else 1_000_000


def wait_for_neighbours() -> None:
    """The others that were started with this one: who of them takes longer would come to a world of its own."""
    here = Path(f"here-{os.getppid()}")
    here.mkdir(exist_ok=True)
    (here / os.environ["LOCAL_RANK"]).touch()
    while len(list(here.iterdir())) < int(os.environ["LOCAL_WORLD_SIZE"]):
        time.sleep(0.01)


def main() -> None:
    ctx = stoker.init()
    torch.set_num_threads(1)
    loader = stoker.Loader(Points(), global_batch_size=BATCH, shuffle=True, seed=3)
    model = torch.nn.Linear(8, 2)
    state = stoker.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)

    @stoker.elastic
    def train(state: stoker.State) -> None:
        while state.epoch <= last_epoch():
            for x, y in loader:
                if "--fail" in sys.argv and ctx.rank == 1 and state.commits == 3:
                    raise ValueError("this script is wrong")
                loss = F.cross_entropy(state.ddp(x), y)
                state.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                state.optimizer.step()
                time.sleep(0.03)
                state.commit()
            state.epoch += 1

    wait_for_neighbours()
    train(state)
    weights = [p.detach().double().sum().item() for p in model.parameters()]
    said = {"rank": ctx.rank, "commits": state.commits, "world_size": ctx.world_size, "weights": weights}
    Path(f"{os.getpid()}.json").write_text(json.dumps(said))
    print("trained", state.commits, "steps")


if __name__ == "__main__":
    main()
