"""The smallest Stoker script. Alone: `python examples/01-train-alone.py`.

Elastic, with four workers of which any may be killed: `stoker run --nproc-per-node 4 examples/01-train-alone.py`.
"""

import torch
import torch.nn.functional as F

import stoker


class Moons(torch.utils.data.Dataset):
    """4,096 points on two noisy half circles."""

    def __len__(self):
        return 4096

    def __getitem__(self, record):
        noise = torch.Generator().manual_seed(record)
        label = record % 2
        angle = torch.rand(1, generator=noise) * torch.pi
        point = torch.cat([angle.cos() + label, angle.sin() * (1 - 2 * label) + 0.5 * label])
        return point + 0.1 * torch.randn(2, generator=noise), label


def main():
    ctx = stoker.init()
    torch.set_num_threads(1)
    loader = stoker.Loader(Moons(), global_batch_size=128, shuffle=True, seed=0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0)

    @stoker.elastic
    def train(state):
        while state.epoch < 5:
            for x, y in loader:
                loss = F.cross_entropy(state.ddp(x), y)
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                state.commit()
            state.epoch += 1
            if ctx.rank == 0:
                print(f"epoch {state.epoch}: loss {loss.item():.3f}, world of {ctx.world_size}")

    train(state)


if __name__ == "__main__":
    main()
