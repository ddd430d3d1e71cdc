"""Pieces of sharded models in a folder, by torch.distributed.checkpoint: written and read at any world size.

`commit-000000000200.parts/0/` for the first model, beside the State's own `commit-000000000200.pt`, which is written
after it: where that is, these are whole. By torch's doing a `.metadata` file there is a pickle: read no folder that
others may write to.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stoker.errors import EnvironmentProblem, StokerError
from stoker.train.checkpoint import CheckpointFolder
from stoker.train.checkpoints.storage_port import UrlStorage
from stoker.train.dtensors import Target
from stoker.train.sharded_urls import UrlParts
from stoker.train.sharded_wire import decode, header_of

if TYPE_CHECKING:
    from stoker.train.sharded_model import Sharded

log = logging.getLogger("stoker.checkpoint")
HEADER = "header.msgpack"
_NAME = re.compile(r"^commit-(\d{12})\.parts$")


def folder_of(folder: Path, commits: int) -> Path:
    return folder / f"commit-{commits:012d}.parts"


class FolderParts:
    """A folder that all nodes share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, commits: int, number: int) -> bool:
        """Whether there are whole pieces of a model as of a commit."""
        return (folder_of(self._folder, commits) / str(number) / HEADER).is_file()

    def save(
        self, models: list[Sharded], commits: int, rank: int, device: torch.device, wrote: Callable[[], None]
    ) -> bool:
        """Have every rank write its pieces, with all others; False where they could not be written, on all but rank 0
        too. `wrote` is called with each model.

        Raises RuntimeError when a peer dies.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save as save_pieces

        for number, model in enumerate(models):
            place = folder_of(self._folder, commits) / str(number)
            image = model.image(commits)
            named = {piece.name: tensor for piece, tensor in zip(image.pieces, model.tensors(), strict=True)}
            try:
                save_pieces(named, checkpoint_id=place)
                if rank == 0:
                    (place / HEADER).write_bytes(header_of(image))
            except (OSError, CheckpointException) as error:
                log.error("the pieces at commit %d are not written to %s: %s", commits, place, error)
                return False
            wrote()
        return True

    def remove_old(self) -> None:
        """Those beside which no State's checkpoint is any more, or never was."""
        for path in [p for p in self._folder.iterdir() if _NAME.match(p.name)]:
            if not path.with_suffix(".pt").exists():
                with contextlib.suppress(OSError):
                    shutil.rmtree(path)

    def load(self, model: Sharded, commits: int, number: int) -> None:
        """Fill a model of this world from what ranks of another have written; each rank reads what it needs.

        A collective. Raises EnvironmentProblem where it cannot be read.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load as load_pieces

        place = folder_of(self._folder, commits) / str(number)
        try:
            plain, parts = decode((place / HEADER).read_bytes())
            targets: list[Target] = model.targets(plain, parts, torch.device("cpu"))
            named = {part.name: target.tensor for part, target in zip(parts, targets, strict=True)}
            load_pieces(named, checkpoint_id=place)
        except (OSError, CheckpointException, StokerError) as error:
            raise EnvironmentProblem(
                f"the pieces of the sharded model at commit {commits} cannot be read from {place}, so the run does not "
                f"know where to go on: bring them back, or name another --checkpoint-dir to begin anew. {error}"
            ) from error
        model.load(plain, targets)


def parts_beside(folder: CheckpointFolder | UrlStorage) -> FolderParts | UrlParts:
    """Where pieces are kept for checkpoints that are kept there."""
    if isinstance(folder, CheckpointFolder):
        return FolderParts(folder.folder)
    return UrlParts(folder.url, folder.keep)
