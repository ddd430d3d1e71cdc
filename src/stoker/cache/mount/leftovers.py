"""Clears away what mounts have left that nobody holds: of one that was killed a token, what its next daemon was to know
and its cache's socket; of each its log, once it is old."""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from stoker.cache.mount.kept_files import is_at, remove_but
from stoker.cache.mount.places import FILE_SYSTEM, LOG_NAME, is_locked, mounted, place_name
from stoker.settings import mounts_dir, other_mounts_dirs

LOG_KEPT_S = 3 * 86400.0
_NAME = re.compile("[0-9a-f]{16}")


def clear_left() -> None:
    """Of all mounts of this user that were: not of one that is there, or that is being made. What cannot be cleared
    away stays, for the next one to try."""
    for above in (mounts_dir(), *other_mounts_dirs()):
        with suppress(OSError):
            for path in [path for path in above.iterdir() if _NAME.fullmatch(path.name)]:
                with suppress(OSError):
                    _clear(path)


def _clear(path: Path) -> None:
    """Raises OSError, also where somebody holds it or is about to take it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Who takes it waits for the end of this, and then looks whether the folder is still there.
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(folder, path):
            return  # it was cleared away meanwhile, and what is there now is another one's
        if is_locked(path) or path.name in {
            place_name(there.folder) for there in mounted() if there.file_system == FILE_SYSTEM
        }:
            return  # `stoker mount` and `stoker umount` take away what is mounted and was left, as they know it by this
        log = path / LOG_NAME
        is_log_kept = log.exists() and time.time() - log.stat().st_mtime < LOG_KEPT_S
        remove_but(path, *([LOG_NAME] if is_log_kept else []))
        if not is_log_kept:
            path.rmdir()
    finally:
        os.close(folder)
