"""An elastic script whose learning rate follows the size of the world, and whose ranks copy from one of them once."""

import json
import os
import sys
import time
from pathlib import Path

import torch

import stoker


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, record):
        return torch.full((2,), float(record))


def main():
    ctx = stoker.init()
    loader = stoker.Loader(Points(), global_batch_size=20, shuffle=True)
    model = torch.nn.Linear(2, 1)
    state = stoker.State(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.001), synced=False, noise=0.0
    )
    rules, resets = [], []

    @state.on_world_change
    def scale(ctx):
        rules.append((ctx.world_size, ctx.previous_world_size, state.commits))
        for group in state.optimizer.param_groups:
            group["lr"] *= ctx.world_size / (ctx.previous_world_size or 1)

    state.register_reset_callbacks([lambda: resets.append(ctx.world_size)])

    @stoker.elastic
    def train(state):
        while not (Path("killed").exists() and ctx.world_size == int(sys.argv[1])):
            for x in loader:
                if state.commits == 5 and not state.synced:
                    state.noise = float(ctx.rank + 1)
                    if ctx.rank != 1:
                        with torch.no_grad():
                            model.weight.add_(100.0)
                    state.sync(source=1)
                    assert state.noise == 2.0
                    state.synced = True
                if state.commits == 10 and ctx.rank == 1 and not Path("killed").exists():
                    Path("killed").touch()
                    os.kill(os.getpid(), 9)
                loss = state.ddp(x).square().mean() * 1e-9
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                state.commit()
                time.sleep(0.05)

    train(state)
    said = {
        "rules": rules,
        "resets": resets,
        "lr": state.optimizer.param_groups[0]["lr"],
        "weights": model.weight.tolist(),
        "size": ctx.world_size,
        "rank": ctx.rank,
    }
    Path(f"{os.getpid()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
