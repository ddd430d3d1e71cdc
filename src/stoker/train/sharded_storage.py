"""Pieces of sharded models in a folder, by torch.distributed.checkpoint: written and read at any world size.

`commit-000000000200.parts/0/` for the first model, beside the State's own `step-000000000200/`, which is written
after it: where that is, these are whole. By torch's doing a `.metadata` file there is a pickle: read no folder that
others may write to.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stoker.errors import EnvironmentProblem, StokerError
from stoker.train.checkpoints.manifest import commits_of
from stoker.train.dtensors import Target
from stoker.train.sharded_wire import decode, header_of

if TYPE_CHECKING:
    from stoker.train.sharded_model import Sharded

log = logging.getLogger("stoker.checkpoint")
HEADER = "header.msgpack"
_NAME = re.compile(r"^commit-(\d{12})\.parts$")


def folder_of(folder: Path, commits: int) -> Path:
    return folder / f"commit-{commits:012d}.parts"


def has(folder: Path, commits: int, number: int) -> bool:
    """Whether there are whole pieces of a model as of a commit."""
    return (folder_of(folder, commits) / str(number) / HEADER).is_file()


def save(models: list[Sharded], folder: Path, commits: int, rank: int) -> bool:
    """Have every rank write its pieces, with all others; False where they could not be written, on all but rank 0 too.

    Raises RuntimeError when a peer dies.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_pieces

    for number, model in enumerate(models):
        place = folder_of(folder, commits) / str(number)
        image = model.image(commits)
        named = {piece.name: tensor for piece, tensor in zip(image.pieces, model.tensors(), strict=True)}
        try:
            save_pieces(named, checkpoint_id=place)
            if rank == 0:
                (place / HEADER).write_bytes(header_of(image))
        except (OSError, CheckpointException) as error:
            log.error("the pieces at commit %d are not written to %s: %s", commits, place, error)
            return False
    return True


def remove_old(folder: Path) -> None:
    """Those beside which no State's checkpoint is any more, or never was."""
    kept = {commits_of(path.name) for path in folder.iterdir()}
    for path in folder.iterdir():
        found = _NAME.match(path.name)
        if found is not None and int(found[1]) not in kept:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)


def load(model: Sharded, folder: Path, commits: int, number: int) -> None:
    """Fill a model of this world from what ranks of another have written; each rank reads what it needs.

    A collective. Raises EnvironmentProblem where it cannot be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as load_pieces

    place = folder_of(folder, commits) / str(number)
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
