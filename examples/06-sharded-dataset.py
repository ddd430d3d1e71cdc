"""Workers of uneven speed share a dataset: `stoker run --nproc-per-node 3 examples/06-sharded-dataset.py`.

Any of them may be killed, and be replaced: what it had not used is read by others. Alone it reads everything:
`python examples/06-sharded-dataset.py`.
"""

import contextlib
import os
import time
from pathlib import Path

import torch

import stoker

RECORDS = 3000


def make_records(folder):
    """One number in each line. Whichever worker is first does it."""
    folder.mkdir(exist_ok=True)
    own = Path(f"{folder}-{os.getpid()}")
    own.write_text("".join(f"{number}\n" for number in range(RECORDS)))
    with contextlib.suppress(FileExistsError):
        os.link(own, folder / "numbers.txt")
    own.unlink()


def main():
    ctx = stoker.init()
    torch.set_num_threads(1)
    folder = Path("06-numbers").resolve()
    make_records(folder)
    data = stoker.ShardedDataset(
        stoker.Dataset(f"file://{folder}/", format="lines", decode=float),
        shard_size=20,
        shuffle=True,
        shuffle_records=True,
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    read = 0
    for x in data.loader(batch_size=8, num_workers=1):
        x = x.float().unsqueeze(1)
        loss = (model(x) - 2 * x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        read += len(x)
        time.sleep(0.02 * (1 + 2 * ctx.local_rank))  # not all machines are alike
    print(
        f"worker {ctx.local_rank} has read {read} of {RECORDS} records, and {data.status().done} shards are done"
    )


if __name__ == "__main__":
    main()
