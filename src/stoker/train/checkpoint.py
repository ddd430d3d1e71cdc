"""Checkpoints of a State in a folder: one file each, published whole, the last two kept."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, cast

import torch

from stoker.base.flushing import flush_folder
from stoker.errors import EnvironmentProblem

log = logging.getLogger("stoker.checkpoint")
KEEP = 2
PIECE_BYTES = 64 * 1024 * 1024
"""Of a file that is being written, so much reaches the disk at a time."""
UNREADABLE = (
    *(OSError, RuntimeError, LookupError, EOFError, ValueError, TypeError, AttributeError),
    *(UnpicklingError, zipfile.BadZipFile),
)
_NAME = re.compile(r"^commit-(\d{12})\.pt$")


class CheckpointFolder:
    """`commit-000000000200.pt` and so on."""

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        self.folder = folder
        self._keep = keep
        self.problem = ""
        """Why the newest checkpoint is not written; empty: it is."""

    def save(self, commits: int, state: dict[str, Any], wrote: Callable[[], None] = lambda: None) -> bool:
        """Write one, atomically; a full or failing disk costs the checkpoint, not the run.

        `wrote` is called whenever a piece of it has reached the disk.
        """
        path = self.folder / f"commit-{commits:012d}.pt"
        part = self.folder / f".{path.name}.{os.getpid()}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_parts()
            with part.open("wb") as file:
                torch.save({"commits": commits, "state": state}, cast(IO[bytes], _Pieces(file, wrote)))
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
            flush_folder(self.folder)  # before older ones go
            # Not counting those of later commits, which a run has skipped that could not read them.
            for old in [other for other in self.paths() if other.name <= path.name][: -self._keep]:
                old.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            # torch's own complaint about a file that could not be written hides why it could not.
            why = error.__context__ if isinstance(error.__context__, OSError) else error
            self.problem = f"checkpoint at commit {commits} is not written to {self.folder}: {why}"
            log.error("%s", self.problem)
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        self.problem = ""
        return True

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """The newest one that can be read: its commits and its state. Broken ones are skipped with a message.

        None: there is none. Raises EnvironmentProblem where there are some and none can be read: to start afresh would
        throw away what was trained.
        """
        tried: set[Path] = set()
        problem = ""
        while untried := [path for path in self.paths() if path not in tried]:
            path = untried[-1]
            tried.add(path)
            try:
                with torch.serialization.safe_globals([bytes]):  # which is how empty ones are written
                    saved = torch.load(path, map_location="cpu", weights_only=True)
                return int(saved["commits"]), saved["state"]
            except FileNotFoundError:
                continue  # a run that is writing them has put a newer one in its place: look again
            except UNREADABLE as error:
                log.warning("skipping the checkpoint %s, which cannot be read: %s", path, error)
                problem = problem or f"{path.name}: {error}"
        if problem:
            raise EnvironmentProblem(
                f"no checkpoint in {self.folder} can be read, so the run does not know where to go on: bring back "
                f"a whole one, or name another --checkpoint-dir to begin anew. The newest is {problem}"
            )
        return None

    def _remove_parts(self) -> None:
        """What writers have left that were killed in the middle, each as large as the state. A run has one writer."""
        for left in self.folder.glob(".commit-*.part"):
            with contextlib.suppress(OSError):
                left.unlink()

    def paths(self) -> list[Path]:
        """Oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if _NAME.match(p.name))


class _Pieces:
    """A file, as torch.save wants it, that is brought to the disk while it is written.

    One flush at the end would take minutes for a large state, in which nothing would tell slow from stuck.
    """

    def __init__(self, file: IO[bytes], wrote: Callable[[], None]) -> None:
        self._file = file
        self._wrote = wrote
        self._unflushed_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """A whole tensor comes at once."""
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            piece = view[at : at + PIECE_BYTES - self._unflushed_bytes]
            self._file.write(piece)
            at += len(piece)
            self._unflushed_bytes += len(piece)
            if self._unflushed_bytes >= PIECE_BYTES:
                self._file.flush()
                os.fdatasync(self._file.fileno())
                self._unflushed_bytes = 0
                self._wrote()
        return len(view)

    def flush(self) -> None:
        self._file.flush()
