"""What is kept of a mount, as files that others may clear away at the same moment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def remove_but(path: Path, *names: str) -> None:
    """All that is in a folder, if it is there, but what has one of these names."""
    try:
        found = list(path.iterdir())
    except FileNotFoundError:  # the system clears away what is in /run when the user has logged out
        found = []
    for one in found:
        if one.name in names:
            continue
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one, ignore_errors=True)
        else:
            one.unlink(missing_ok=True)


def is_at(fd: int, path: Path) -> bool:
    """Whether what is open is what others find there."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
