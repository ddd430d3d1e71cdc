"""Pieces of sharded models where a run's checkpoints are: written by all ranks of a world, read at any world size.

`URL/sharded-0/step-000000000200/` for the first model, beside the State's own `URL/step-000000000200/`, which is
written after it. torch.distributed.checkpoint can read them as well; what is read here is no pickle.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from stoker.errors import EnvironmentProblem, StokerError
from stoker.train.checkpoints.dcp_read import Slice
from stoker.train.checkpoints.places import place_within
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.train.checkpoints.storage_port import RunStorage
from stoker.train.dtensors import Box
from stoker.train.packing import Described
from stoker.train.sharded_wire import Part, broadcast_bytes, gather_bytes

if TYPE_CHECKING:
    from stoker.train.sharded_model import Sharded

log = logging.getLogger("stoker.checkpoint")
CPU = torch.device("cpu")


class StoredParts:
    """In a folder that all nodes share, S3, or another file system of fsspec's."""

    def __init__(self, url: str, keep: int) -> None:
        self._url = url
        self._keep = keep
        self._storages: dict[int, CheckpointStorage] = {}

    def has(self, commits: int, number: int) -> bool:
        """Whether there are whole pieces of a model as of a commit."""
        try:
            self._storage(number).reader(commits)
        except EnvironmentProblem as error:
            log.warning("no pieces as of commit %d: %s", commits, error)
            return False
        return True

    def save(
        self, models: list[Sharded], commits: int, rank: int, device: torch.device, wrote: Callable[[], None]
    ) -> bool:
        """Have every rank write its pieces, with all others; False where they could not be written.

        `wrote` is called with each piece of a file. Raises RuntimeError when a peer dies.
        """
        attempt = broadcast_bytes(uuid.uuid4().hex[:12].encode() if rank == 0 else None, 0, device).decode()
        are_written = True
        for number, model in enumerate(models):  # all of them, for each is a collective
            are_written &= self._save(model, number, commits, rank, attempt, device, wrote)
        return are_written

    def _save(
        self,
        model: Sharded,
        number: int,
        commits: int,
        rank: int,
        attempt: str,
        device: torch.device,
        wrote: Callable[[], None],
    ) -> bool:
        storage, image, problem = self._storage(number), model.image(commits), ""
        try:
            storage.write_pieces(commits, rank, image.pieces, attempt, lambda size_bytes: wrote())
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            if not isinstance(error, StokerError):
                log.exception("writing pieces failed")
            problem = str(error) or type(error).__name__
        said = gather_bytes(problem.encode(), device)
        world_size = len(said)
        problem = next((one.decode(errors="replace") for one in said if one), "")
        if not problem and rank == 0:
            try:
                names = [piece.name for piece in image.pieces]
                storage.finish(
                    commits,
                    world_size,
                    image.plain,
                    names,
                    attempt,
                    lambda size_bytes: wrote(),
                    forgets=False,
                )
            except StokerError as error:  # pieces that make no whole as well: all ranks go on from here alike
                problem = str(error)
        if problem:
            if rank == 0:  # all are through with it by now
                storage.give_up(commits, attempt)
            log.error("the pieces at commit %d are not written: %s", commits, problem)
        return not problem

    def load(self, model: Sharded, commits: int, number: int) -> None:
        """Fill a model of this world with what it needs. Raises EnvironmentProblem where that cannot be read."""
        storage = self._storage(number)
        try:
            reader = storage.reader(commits)
            plain, names = reader.read_plain()
            parts = [_whole(name, reader.dtypes[name], reader.shapes[name]) for name in names]
            targets = model.targets(plain, parts, CPU)
            boxes = {part.name: target.box for part, target in zip(parts, targets, strict=True)}
            held = reader.read_slices(
                {name: Slice(box.offsets, box.shape) for name, box in boxes.items() if 0 not in box.shape}
            )
        except (OSError, StokerError) as error:
            raise EnvironmentProblem(
                f"the pieces of the sharded model at commit {commits} cannot be read from {storage.shown}, so the "
                "run does not know where to go on: bring them back, or name another --checkpoint-dir to begin anew. "
                f"{error}"
            ) from error
        for part, target in zip(parts, targets, strict=True):
            if part.name in held:
                target.fill(held[part.name], target.box)
        model.load(plain, targets)

    def remove_older(self, storage: RunStorage, models: int) -> None:
        """Those that are older than the oldest of the State's own checkpoints."""
        try:
            oldest = storage.oldest()
        except EnvironmentProblem as error:
            log.warning("older pieces are not removed: %s", error)
            return
        for number in range(models if oldest is not None else 0):
            self._storage(number).remove_older(oldest or 0)

    def _storage(self, number: int) -> CheckpointStorage:
        if number not in self._storages:
            url = place_within(self._url, f"sharded-{number}")
            self._storages[number] = CheckpointStorage(url, self._keep)
        return self._storages[number]


def _whole(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Part:
    return Part(name, Described(dtype, shape, "cpu"), Box((0,) * len(shape), shape))
