"""Where checkpoints last: what the runtime needs of a storage to start from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from stoker.errors import EnvironmentProblem
from stoker.train.checkpoint import CheckpointFolder
from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.wire.saving import STORAGE_FILE, StorageWanted

log = logging.getLogger("stoker.checkpoint")

Loaded = tuple[int, dict[str, Any]]
"""Commits, and the exported state."""


class Kept(NamedTuple):
    """The newest checkpoint of a storage, by its name."""

    commits: int
    load: Callable[[], Loaded | None]
    """Read it, or an older one where it is broken; None: it has gone meanwhile. Raises EnvironmentProblem where there
    are checkpoints and none of them can be read."""


class Storage(Protocol):
    """Holds checkpoints."""

    def newest(self) -> Kept | None:
        """None: there is none. Raises EnvironmentProblem."""
        ...


class FolderStorage:
    """A folder that rank 0 writes to in its training thread."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder

    def newest(self) -> Kept | None:
        paths = self.folder.paths()
        if not paths:
            return None
        return Kept(int(paths[-1].stem.partition("-")[2]), self.folder.newest)


class UrlStorage:
    """Directories at a URL, which a saver writes behind the training; `save` does it in the training thread."""

    def __init__(self, url: str, keep: int) -> None:
        """Raises ConfigError."""
        self.url = url
        self.keep = keep
        self._storage = CheckpointStorage(url, keep)
        self.problem = ""
        """Why the newest checkpoint is not written; empty: it is."""

    def newest(self) -> Kept | None:
        """See the port."""
        found = self._storage.newest()
        return Kept(found[0], self._load) if found is not None else None

    def save(self, commits: int, state: dict[str, Any], wrote: Callable[[], None] = lambda: None) -> bool:
        """As `CheckpointFolder.save`: a full or failing storage costs the checkpoint, not the run."""
        try:
            self._storage.write(image_of(commits, state), lambda size_bytes: wrote())
        except EnvironmentProblem as error:
            self.problem = f"checkpoint at commit {commits} is not written to {self._storage.shown}: {error}"
            log.error("%s", self.problem)
            return False
        self.problem = ""
        return True

    def _load(self) -> Loaded | None:
        image = self._storage.read_newest()
        return (image.commits, image.state()) if image is not None else None


def newest_of(storages: list[Storage]) -> Kept | None:
    """The newest checkpoint of all of them. Raises EnvironmentProblem, also where one has some and none can be read."""
    found = [kept for storage in storages if (kept := storage.newest()) is not None]
    return max(found, key=lambda kept: kept.commits, default=None)


def ask_saver(folder: Path, wanted: StorageWanted) -> None:
    """Tell the saver of this node where the snapshots in the folder are to be written to. Raises EnvironmentProblem."""
    part = folder / f".{STORAGE_FILE}.{os.getpid()}"
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(wanted))
        part.rename(folder / STORAGE_FILE)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {folder / STORAGE_FILE}: {error}") from None
