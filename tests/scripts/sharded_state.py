"""An elastic script that counts in its state how often each record of a ShardedDataset was trained on."""

import argparse
import os
from pathlib import Path

import torch

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("--records", type=int, required=True)
parser.add_argument(
    "--die-at", type=int, nargs="*", default=[], help="commits, after which the worker kills itself"
)


def main():
    options = parser.parse_args()
    stoker.init()
    dataset = stoker.Dataset(options.url, format="lines", decode=int)
    data = stoker.ShardedDataset(dataset, shard_size=10, exactly_once=True, shuffle=True)
    state = stoker.State(seen=torch.zeros(options.records, dtype=torch.int64))

    @stoker.elastic
    def train(state):
        for record in data:
            state.seen = state.seen + torch.nn.functional.one_hot(torch.tensor(record), options.records)
            mark = Path(f"died-{state.commits}")
            if state.commits in options.die_at and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), 9)
            if record % 3 == 0:
                state.commit()
        state.commit()
        print("seen", state.seen.tolist())

    train(state)


if __name__ == "__main__":
    main()
