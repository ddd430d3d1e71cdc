"""Who else has files open that were handed out whole: the kernel knows.

A lease for writing is only given to who is alone with a file. So a file that was given up is known to take room until
nobody has it open or mapped any more, and one that is read without us is known to be read. Where the file system has no
leases, nobody is thought to read. Lives on one event loop, and nothing here waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from contextlib import suppress

from stoker.cache.store.containers import ContainerFiles

ASKED_EVERY_S = 1.0
KEPT_MAX = 1024
"""So many files that were given up are looked after; of more, the room is counted as free at once."""


class Readers:
    """Of files of large objects."""

    def __init__(self, files: ContainerFiles) -> None:
        self._files = files
        self._asked_at: dict[int, tuple[float, bool]] = {}
        """Those that were handed out whole: when the kernel was asked, and what it said."""
        self._left: dict[int, int] = {}
        """Of files that were given up and are open elsewhere: our descriptor, and their bytes."""
        self.kept_bytes = 0

    @property
    def are_any(self) -> bool:
        """Whether any file was handed out whole that is still here."""
        return bool(self._asked_at)

    def add(self, container: int) -> None:
        """It was handed out whole."""
        self._asked_at[container] = -ASKED_EVERY_S, True

    def has(self, container: int, now: float) -> bool:
        """Whether somebody else has it open, as of lately."""
        known = self._asked_at.get(container)
        if known is None:
            return False
        if now - known[0] >= ASKED_EVERY_S:
            known = self._asked_at[container] = now, self._is_open_elsewhere(container)
        return known[1]

    def leave(self, container: int, size_bytes: int) -> None:
        """It is about to be given up, and takes so much."""
        if self._asked_at.pop(container, None) is None or len(self._left) >= KEPT_MAX:
            return
        with suppress(OSError):
            self._left[self._open(container)] = size_bytes
            self.kept_bytes += size_bytes

    def mend(self) -> None:
        """Those that nobody has open any more take no room."""
        for fd in [fd for fd in self._left if not _is_shared(fd)]:
            self.kept_bytes -= self._left.pop(fd)
            os.close(fd)

    def close(self) -> None:
        """Look after none any more."""
        for fd in self._left:
            os.close(fd)
        self._left.clear()
        self.kept_bytes = 0

    def _is_open_elsewhere(self, container: int) -> bool:
        try:
            fd = self._open(container)
        except OSError:
            return False
        try:
            return _is_shared(fd)
        finally:
            os.close(fd)

    def _open(self, container: int) -> int:
        """A descriptor beside which this server keeps no other. Raises OSError."""
        self._files.finish(container)
        self._files.sending.forget(container, 0)
        return os.open(self._files.sending.path(container), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _is_shared(fd: int) -> bool:
    """Whether a file is open by another descriptor as well."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # by default a broken lease would end the process
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
