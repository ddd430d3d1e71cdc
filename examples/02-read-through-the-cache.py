"""Train on a folder of objects, read through the embedded cache.

    python examples/02-read-through-the-cache.py              # makes a small dataset and reads file:///…
    stoker run --nproc-per-node 2 examples/02-read-through-the-cache.py stoker://numbers/   (see --bucket)

The second run finds the objects in the cache: the origin is read once.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import stoker


def make_dataset(folder):
    rng = np.random.default_rng(0)
    for i in range(512):
        values = rng.normal(size=16).astype("float32")
        (folder / f"{i:05d}").write_bytes(values.tobytes())
    return f"file://{folder}/"


def decode(record):
    x = torch.from_numpy(np.frombuffer(record, dtype="float32").copy())
    return x, (x.sum() > 0).long()


def train_on(url):
    ctx = stoker.init()
    torch.set_num_threads(1)
    data = stoker.Dataset(url, decode=decode)
    loader = stoker.Loader(data, global_batch_size=64, shuffle=True, num_workers=2)
    model = torch.nn.Linear(16, 2)
    state = stoker.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)

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
            if ctx.rank == 0:
                print(f"epoch {state.epoch}: loss {loss.item():.3f} over {len(data)} records")

    train(state)


def main():
    if len(sys.argv) > 1:
        train_on(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        train_on(make_dataset(Path(folder)))


if __name__ == "__main__":
    main()
