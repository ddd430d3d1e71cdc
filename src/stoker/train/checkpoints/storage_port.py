"""Where checkpoints last: what the runtime needs of a storage to start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from stoker.train.checkpoint import CheckpointFolder

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
