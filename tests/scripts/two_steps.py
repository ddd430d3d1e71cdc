"""Two models that learn from each other: each step has a backward pass after an optimizer has stepped already."""

import argparse
import json
import os
from pathlib import Path

import torch

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--fail-at", default="", help="RANK:COMMIT in the first generation, between both steps")
options = parser.parse_args()
torch.set_num_threads(1)


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, record):
        return torch.randn(2, generator=torch.Generator().manual_seed(record))


def main():
    ctx = stoker.init()
    torch.manual_seed(3)
    loader = stoker.Loader(Points(), global_batch_size=10, shuffle=True, seed=3)
    judge, maker = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)
    state = stoker.State(
        judge=judge,
        maker=maker,
        judge_optimizer=torch.optim.Adam(judge.parameters(), lr=0.01),
        maker_optimizer=torch.optim.LBFGS(maker.parameters(), lr=0.01, max_iter=2),
        undo_steps=True,
    )
    worlds = []

    @stoker.elastic
    def train(state):
        worlds.append((ctx.world_size, state.commits))
        for x in loader:
            loss = (state.wrap(judge)(x) - state.wrap(judge)(maker(x).detach())).mean()
            state.judge_optimizer.zero_grad()
            loss.backward()
            state.judge_optimizer.step()

            def closure(x=x):
                state.maker_optimizer.zero_grad()
                loss = judge(state.wrap(maker)(x)).square().mean()
                if options.fail_at == f"{ctx.rank}:{state.commits}" and ctx.generation == 1:
                    os.kill(os.getpid(), 9)
                loss.backward()
                return loss

            judge.requires_grad_(requires_grad=False)
            state.maker_optimizer.step(closure)
            judge.requires_grad_()
            state.commit()

    train(state)
    said = {
        "rank": ctx.rank,
        "commits": state.commits,
        "worlds": worlds,
        "weights": {
            name: p.flatten().tolist()
            for name, p in [*judge.named_parameters("j"), *maker.named_parameters("m")]
        },
    }
    Path(f"{os.getpid()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
