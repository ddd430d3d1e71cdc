"""Folders in shared memory that belong to one process, and are removed when it has ended, in whatever way.

Each holds a record of its owner: process id and start time, and in which namespace of processes that id counts, for
containers may share `/dev/shm` and no ids. Folders of owners that are known to be dead are swept; all others stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from stoker.errors import EnvironmentProblem
from stoker.platform.proc import stat_fields

log = logging.getLogger("stoker")
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "stoker-"
_OWNER = "owner"
_START_TIME = 19
"""Which of `stat_fields` it is, in ticks since the machine was started."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._]+")
NAME_CHARACTERS = 40


def shared_base() -> Path:
    """Where such folders are made: in memory, or in the folder for temporary files where there is no such."""
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def make_owned_folder(base: Path, name: str) -> Path:
    """A new folder that only this user may enter, and that goes with this process. Sweeps those of dead ones before.

    Raises EnvironmentProblem.
    """
    sweep_folders(base)
    safe = _UNSAFE.sub("-", name)[:NAME_CHARACTERS]
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{safe}-", dir=base))
        (folder / _OWNER).write_text(_record(os.getpid()))
    except OSError as error:
        raise EnvironmentProblem(f"cannot make a folder for snapshots in {base}: {error}") from None
    return folder


def remove_folder(folder: Path) -> None:
    """Its record goes last: who is stopped in the middle leaves a folder that is swept."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name != _OWNER:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def sweep_folders(base: Path) -> list[Path]:
    """Remove this user's folders whose owners are dead; those that were removed."""
    swept = []
    try:
        found = [path for path in base.iterdir() if path.name.startswith(PREFIX)]
    except OSError:
        return []
    for folder in found:
        if _is_own_folder(folder) and _is_orphan(folder):
            log.info("removing %s: the process that it belonged to has ended", folder)
            remove_folder(folder)
            swept.append(folder)
    return swept


def _is_own_folder(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return info.st_uid == os.getuid() and path.is_dir() and not path.is_symlink()


def _is_orphan(folder: Path) -> bool:
    """Only where that is certain: not without a record, nor of a process that would not be seen from here."""
    try:
        pid, _, rest = (folder / _OWNER).read_text().partition(" ")
        return bool(rest) and _record(int(pid)) != f"{pid} {rest}" and rest.endswith(_namespace())
    except (OSError, ValueError):
        return False


def _record(pid: int) -> str:
    """`PID START NAMESPACE`; START is - for a process that is gone."""
    fields = stat_fields(pid)
    started = fields[_START_TIME] if len(fields) > _START_TIME else "-"
    return f"{pid} {started} {_namespace()}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "?"
