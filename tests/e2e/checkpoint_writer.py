"""Writes checkpoints until it is killed: `python -m tests.e2e.checkpoint_writer URL COMMITS MEGABYTES`."""

import sys

import torch

from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.storage import CheckpointStorage


def main() -> None:
    url, commits, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tensors = {f"w{i}": torch.full((250_000,), float(commits)) for i in range(megabytes)}
    state = {"modules": {"model": tensors}, "values": {"commits": commits}}
    print("writing", flush=True)
    CheckpointStorage(url).write(image_of(commits, state), lambda size_bytes: print("wrote", flush=True))
    print("done", flush=True)


if __name__ == "__main__":
    main()
