"""An elastic training script with a model that is divided over the workers by FSDP2."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--step-s", type=float, default=0.02)
parser.add_argument(
    "--first-step-s", type=float, default=0.0, help="of the first world, which waits for others"
)
parser.add_argument("--uses", action="store_true", help="warm-up, micro-batches, restore, sync")
parser.add_argument("--fail-at", default="", help="RANK:COMMIT:WHERE in the first generation")
options = parser.parse_args()
torch.set_num_threads(1)


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, record):
        generator = torch.Generator().manual_seed(record)
        x = torch.randn(7, generator=generator)
        return x, (x.sum() > 0).long()


def build():
    """Sizes that no world divides evenly."""
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 13), torch.nn.LayerNorm(13), torch.nn.ReLU(), torch.nn.Linear(13, 2)
    )
    model.register_buffer("mark", torch.zeros(3))
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fail(ctx, commits, where):
    if options.fail_at == f"{ctx.rank}:{commits}:{where}" and ctx.generation == 1:
        os.kill(os.getpid(), 9)


def main():
    ctx = stoker.init()
    torch.manual_seed(99 + ctx.rank)
    loader = stoker.Loader(Points(), global_batch_size=20, shuffle=True, seed=3)
    state = stoker.State(net=stoker.Sharded(build), epoch=0)
    worlds = []

    def rehearse(state):
        """What it makes is thrown away, with the steps that it does."""
        if options.uses:
            F.cross_entropy(state.net.model(torch.ones(2, 7)), torch.zeros(2, dtype=torch.long)).backward()
            state.net.optimizer.step()

    def mistake(state):
        """A step that is taken back, with its slots."""
        before, mark = [p.full_tensor() for p in state.net.model.parameters()], state.net.model.mark.tolist()
        state.net.model(torch.randn(3, 7)).sum().backward()
        state.net.optimizer.step()
        state.net.model.mark += 7
        state.restore()
        after = [p.full_tensor() for p in state.net.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert state.net.model.mark.tolist() == mark
        assert all(p.grad is None for p in state.net.model.parameters())

    @stoker.elastic(warm_up=rehearse)
    def train(state):
        model, optimizer = state.net.model, state.net.optimizer
        worlds.append((ctx.generation, ctx.rank, ctx.world_size, state.commits))
        if options.uses:
            mistake(state)
        while state.epoch < options.epochs:
            for x, y in loader:
                optimizer.zero_grad()
                pieces = state.micro_batches((x, y), 2) if options.uses else [((x, y), 1.0)]
                for number, ((some_x, some_y), weight) in enumerate(pieces):
                    loss = F.cross_entropy(model(some_x), some_y) * weight * state.net.weight
                    if number == len(x) // 4 or not options.uses:
                        fail(ctx, state.commits, "backward")
                    loss.backward()
                optimizer.step()
                if options.uses and ctx.world_size == 3 and state.commits == 5:
                    model.mark.fill_(ctx.rank)
                    state.sync(source=1)
                    assert model.mark.tolist() == [1, 1, 1]
                fail(ctx, state.commits, "commit")
                time.sleep((ctx.generation == 1 and options.first_step_s) or options.step_s)
                state.commit()
            state.epoch += 1
        weights = {name: p.full_tensor().tolist() for name, p in model.named_parameters()}
        slots = [p["exp_avg"].full_tensor().sum().item() for p in optimizer.state.values()]
        said = {
            "pid": os.getpid(),
            "rank": ctx.rank,
            "world_size": ctx.world_size,
            "commits": state.commits,
            "worlds": worlds,
            "weights": weights,
            "slots": slots,
        }
        Path(f"{os.getpid()}.json").write_text(json.dumps(said))

    train(state)


if __name__ == "__main__":
    main()
