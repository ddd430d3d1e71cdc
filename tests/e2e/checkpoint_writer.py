"""Writes a checkpoint, and waits to be killed after so many writes: `… URL COMMITS MEGABYTES WRITES`."""

import itertools
import sys
import time

import torch

from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.storage import CheckpointStorage


def main() -> None:
    url, commits, megabytes, last = sys.argv[1], *map(int, sys.argv[2:])
    counted = itertools.count(1)

    def wrote(size_bytes: int) -> None:
        print("wrote", flush=True)
        while next(counted) >= last:
            time.sleep(600)

    tensors = {f"w{i}": torch.full((250_000,), float(commits)) for i in range(megabytes)}
    state = {"modules": {"model": tensors}, "values": {"commits": commits}}
    print("writing", flush=True)
    CheckpointStorage(url).write(image_of(commits, state), wrote)
    print("done", flush=True)


if __name__ == "__main__":
    main()
