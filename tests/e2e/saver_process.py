"""A saver whose snapshots are files: `python -m tests.e2e.saver_process`; `snapshot-N.pt` is of commit N."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from stoker.train.checkpoints.image import Image, image_of
from stoker.train.checkpoints.saver import main


class FileSnapshots:
    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder

    def newest_commits(self) -> int | None:
        return max((int(p.stem.partition("-")[2]) for p in self.folder.glob("snapshot-*.pt")), default=None)

    @contextlib.contextmanager
    def newest(self) -> Iterator[Image | None]:
        commits = self.newest_commits()
        if commits is None:
            yield None
        else:
            state = torch.load(self.folder / f"snapshot-{commits}.pt", weights_only=True)
            yield image_of(commits, state)


if __name__ == "__main__":
    sys.exit(main(FileSnapshots))
