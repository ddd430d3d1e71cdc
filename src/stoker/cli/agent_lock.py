"""At most one agent of a job on a host, even if the remote shell of an older one broke and it has not noticed yet.

A cut network looks different from its two ends: the driver's ssh gives up after seconds, the other side may take
minutes. So the newer agent, which the driver has just asked for, ends the older one before it begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from stoker.errors import EnvironmentProblem

log = logging.getLogger("stoker.agent")
LOOK_S = 0.05
KILLED_S = 5.0
"""How long a process may take to be gone after SIGKILL."""


@contextlib.contextmanager
def only_agent(folder: Path, host: str, token: str, *, grace_s: float) -> Iterator[None]:
    """Hold the lock of this job's agent on this host; an older one gets SIGTERM, and SIGKILL after `grace_s`.

    The lock belongs to the process, so that no crash leaves it behind. Raises EnvironmentProblem.
    """
    name = hashlib.sha256(f"{token} {host}".encode()).hexdigest()[:32]
    path = folder / f"agent-{name}.lock"
    descriptor = _open(path)
    try:
        _take(descriptor, grace_s)
        while not _is_at(descriptor, path):  # the older one has removed it on its way out
            os.close(descriptor)
            descriptor = _open(path)
            _take(descriptor, grace_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make {path}: {error.strerror}") from None


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _take(descriptor: int, grace_s: float) -> None:
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILLED_S)):
        if _try(descriptor):
            return
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            older = int(os.pread(descriptor, 20, 0))
            log.warning("an older agent of this job still runs here (process %d): %s", older, number.name)
            os.kill(older, number)
        begun = time.monotonic()
        while time.monotonic() - begun < wait_s:
            if _try(descriptor):
                return
            time.sleep(LOOK_S)
    raise EnvironmentProblem("an older agent of this job still runs on this host and cannot be ended")


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
