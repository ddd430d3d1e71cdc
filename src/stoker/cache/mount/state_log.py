"""The file in which a mount's daemon writes down what the next one must know."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from stoker.cache.mount.records import Record, records, whole_bytes

log = logging.getLogger("stoker.mount")
_BYTES_MIN = 4 * 1024 * 1024
_GROWTH = 3
_QUIET_S = 60.0


class StateLog:
    """Appended to; written anew once most of it is no more so. It has to outlive the daemon, not the machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_failing = False
        self._said_at = -_QUIET_S
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size_bytes = os.fstat(self._fd).st_size
        self._size_bytes_max = max(_BYTES_MIN, self._size_bytes)

    def read(self) -> Iterator[Record]:
        """What was written before. Raises WireError. A daemon that died while it wrote left something that nothing can
        follow: it goes."""
        data = self._path.read_bytes()
        whole = whole_bytes(data)
        if whole < len(data):
            os.ftruncate(self._fd, whole)
            self._size_bytes = whole
        return records(data)

    def is_gone(self, *, is_first: bool) -> bool:
        """Whether there is nothing of what daemons before wrote, as where somebody removed it: the kernel does not tell
        again what it has told them, nor what it has agreed on. `is_first`: none of this mount was ready before."""
        size_bytes = os.fstat(self._fd).st_size
        return not is_first and not whole_bytes(os.pread(self._fd, size_bytes, 0))

    def fileno(self) -> int:
        """Of the file."""
        return self._fd

    def buffer(self, size_bytes: int) -> mmap.mmap | bytearray:
        """To read requests into: it begins with the last one that was read, also by a daemon before. Where there is no
        room it is this process's alone."""
        path = self._path.with_suffix(".request")
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(
                fd, 0, size_bytes
            )  # a page for which there is no room then would end the daemon
            return mmap.mmap(fd, size_bytes)
        except OSError as error:
            log.error("cannot keep %s: %s; make room there", path, error.strerror)
            return bytearray(size_bytes)
        finally:
            if fd >= 0:
                os.close(fd)

    def append(self, record: bytes) -> None:
        """For the next daemon. Where there is no room the mount goes on; it will not outlive this daemon unharmed."""
        try:
            written = os.write(self._fd, record)
            if written < len(record):
                # Nothing could follow a part of a record.
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._is_failing:
                log.error("cannot write %s: %s; make room there", self._path, error.strerror)
            self._is_failing = True
        self._size_bytes += len(record)
        if self._is_failing:
            self._size_bytes = self._size_bytes_max  # what is missing there is written with all of it

    @property
    def is_long(self) -> bool:
        """Whether most of it may be no more so."""
        return self._size_bytes >= self._size_bytes_max

    def rewrite(self, snapshot: Iterable[bytes]) -> None:
        """Have this in its place."""
        fresh = self._path.with_suffix(".new")
        fd = -1
        try:
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with open(fd, "ab", closefd=False) as file:
                file.writelines(snapshot)
                size_bytes = file.tell()
            os.rename(fresh, self._path)
        except OSError as error:
            now = time.monotonic()
            if now - self._said_at >= _QUIET_S:
                # It is tried again at each tick for as long as there is something to write.
                self._said_at = now
                log.error("cannot write %s: %s; make room there", fresh, error.strerror)
            if fd >= 0:
                os.close(fd)
            self._size_bytes_max = max(self._size_bytes_max, self._size_bytes) + _BYTES_MIN
            return
        os.close(self._fd)
        self._fd, self._size_bytes, self._is_failing = fd, size_bytes, False
        self._size_bytes_max = max(_BYTES_MIN, _GROWTH * size_bytes)
