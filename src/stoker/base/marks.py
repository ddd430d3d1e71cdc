"""Whether a file is still what it was."""

from __future__ import annotations

import os
from pathlib import Path


def file_mark(path: Path) -> tuple[int, ...]:
    """Another one when there is another file, or it has changed; empty if there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_dev
