"""Where a run's checkpoints last, as the runtime uses it: to start from, and to write to in the training thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from stoker.errors import EnvironmentProblem
from stoker.train.checkpoints.hashing import hash_of
from stoker.train.checkpoints.image import OWN, image_of
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.train.packing import pack
from stoker.wire.saving import STORAGE_FILE, StorageWanted

log = logging.getLogger("stoker.checkpoint")


class Loaded(NamedTuple):
    """A state to go on from."""

    commits: int
    state: dict[str, Any]
    """As it was exported."""
    fingerprint: str = ""
    """The same wherever the same is loaded, bit for bit, but for random generators; empty: not known."""


class RunStorage:
    """Checkpoints of whole states at a URL. A saver writes them behind the training; `save` does so in its thread."""

    def __init__(self, url: str, keep: int) -> None:
        """Raises ConfigError."""
        self.keep = keep
        self._storage = CheckpointStorage(url, keep)
        self.folder = self._storage.folder
        """Where it is one of this machine's."""
        self.url = url if self.folder is None else str(self.folder)
        """The same for other processes, whatever folder they are in."""
        self.shown = self._storage.shown
        """For messages: without secrets."""
        self.problem = ""
        """Why the newest checkpoint is not written; empty: it is."""

    def newest_commits(self) -> int | None:
        """Of the newest one that is whole, as far as can be seen without its tensors; None: there is none.

        Raises EnvironmentProblem where there are checkpoints and none is whole.
        """
        found = self._storage.newest()
        return found[0] if found is not None else None

    def newest(self, beyond: int = -1) -> Loaded | None:
        """The newest one that can be read, if there is any of more commits than that; else nothing is read.

        Raises EnvironmentProblem where there are checkpoints and none can be read.
        """
        found = self._storage.newest()
        if found is None or found[0] <= beyond:
            return None
        image = self._storage.read_newest()
        return _loaded(image.commits, image.state()) if image is not None else None

    def has(self, commits: int) -> bool:
        """Whether its newest checkpoint is of that commit, as far as can be seen."""
        try:
            return self.newest_commits() == commits
        except EnvironmentProblem:
            return False

    def oldest(self) -> int | None:
        """The commits of the oldest checkpoint that is kept. Raises EnvironmentProblem."""
        return next((held.commits for held in self._storage.held() if not held.is_torn), None)

    def save(self, commits: int, state: dict[str, Any], wrote: Callable[[], None] = lambda: None) -> bool:
        """Write one; a full or failing storage costs the checkpoint, not the run.

        `wrote` is called whenever a piece of it was taken.
        """
        try:
            self._storage.write(image_of(commits, state), lambda size_bytes: wrote())
        except EnvironmentProblem as error:
            self.problem = f"checkpoint at commit {commits} is not written to {self.shown}: {error}"
            log.error("%s", self.problem)
            return False
        self.problem = ""
        return True


def _loaded(commits: int, state: dict[str, Any]) -> Loaded:
    tensors: list[torch.Tensor] = []
    plain = pack({part: held for part, held in state.items() if part != OWN}, tensors)
    described = [[str(tensor.dtype), list(tensor.shape), hash_of(tensor)] for tensor in tensors]
    raw = msgspec.msgpack.encode([plain, described])
    return Loaded(commits, state, xxhash.xxh3_128(raw).hexdigest())


def ask_saver(folder: Path, wanted: StorageWanted) -> None:
    """Tell the saver of this node where the snapshots in the folder are to be written to. Raises EnvironmentProblem."""
    part = folder / f".{STORAGE_FILE}.{os.getpid()}"
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(wanted))
        part.rename(folder / STORAGE_FILE)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {folder / STORAGE_FILE}: {error}") from None
