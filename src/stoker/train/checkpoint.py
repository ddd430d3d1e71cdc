"""Checkpoints of a State in a folder: one file each, published whole, the last two kept."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

log = logging.getLogger("stoker.checkpoint")
KEEP = 2
UNREADABLE = (OSError, RuntimeError, KeyError, EOFError, ValueError, UnpicklingError, zipfile.BadZipFile)
_NAME = re.compile(r"^commit-(\d{12})\.pt$")


class CheckpointFolder:
    """`commit-000000000200.pt` and so on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, commits: int, state: dict[str, Any]) -> bool:
        """Write one, atomically; a full or failing disk costs the checkpoint, not the run."""
        path = self.folder / f"commit-{commits:012d}.pt"
        part = self.folder / f".{path.name}.{os.getpid()}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save({"commits": commits, "state": state}, file)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
            for old in self.paths()[:-KEEP]:
                old.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            log.error("checkpoint at commit %d is not written: %s", commits, error)
            with contextlib.suppress(OSError):
                part.unlink()
            return False
        return True

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """The newest one that can be read: its commits and its state. Broken ones are skipped with a message."""
        for path in reversed(self.paths()):
            try:
                saved = torch.load(path, map_location="cpu", weights_only=True)
                return int(saved["commits"]), saved["state"]
            except UNREADABLE as error:
                log.warning("skipping the checkpoint %s, which cannot be read: %s", path, error)
        return None

    def paths(self) -> list[Path]:
        """Oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if _NAME.match(p.name))
