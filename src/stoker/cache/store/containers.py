"""The files that hold cached bytes: segments of small objects, and one sparse file for each version of a large one.

DIR/lock           held by the one server that uses the folder
DIR/files/NNN/…    containers; `Files.path` of the native part has their names

It decides nothing, and does not know what is inside. A number is never used again. Nothing is written over: bytes that
were handed to a reader stay what they are until the last descriptor is closed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import stat
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from stoker._native import Files
from stoker.cache.segments import PAGE_BYTES
from stoker.errors import CorruptBlock, EnvironmentProblem

OPEN_TO_WRITE_MAX = 64
OPEN_TO_SEND_MAX = 4096
_LOST = frozenset((errno.ENOENT, errno.EIO, errno.ELOOP, errno.EISDIR, errno.EUCLEAN))
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
IN_USE = "is in use by another cache server"


class ContainerFiles:
    """A folder of containers; opening it takes the lock.

    Raises EnvironmentProblem if the folder cannot be used or another server uses it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.below = folder / "files"
        try:
            self.below.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EnvironmentProblem(f"cannot use the cache folder {folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_fd)
            raise EnvironmentProblem(
                f"the cache folder {folder} {IN_USE} or mount; give each its own: --dir "
                "of `stoker cache serve`, --cache-dir of `stoker mount`"
            ) from error
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.sending = Files(str(self.below), max(16, min(OPEN_TO_SEND_MAX, soft // 4)))
        """Descriptors to send from, which the front uses as well."""
        self._writing: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    def create(self, number: int) -> None:
        """Make the file of a container whose number was never used. Raises EnvironmentProblem."""
        path = self.sending.path(number)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            try:
                fd = os.open(path, flags, 0o600)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise self.cannot_write(error) from error
        with self._lock:
            self._writing[number] = fd
            self._close_oldest()

    def is_there(self, number: int) -> bool:
        """Whether a container has its file."""
        return os.path.exists(self.sending.path(number))

    def write(self, number: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write at a place where nothing was, in a file that was made. May be called from any thread.

        A file that is gone is never made again: what was held of it would read as zeros. Raises EnvironmentProblem.
        """
        fd = self.to_write(number)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(fd, view, offset)
                offset += written
                view = view[written:]
        except OSError as error:
            raise self.cannot_write(error) from error
        finally:
            os.close(fd)

    def to_write(self, number: int) -> int:
        """A descriptor of the caller's own: the one that is kept may be closed, and its number be another file's, while
        the caller writes. May be called from any thread. Raises EnvironmentProblem."""
        try:
            with self._lock:
                return os.dup(self._kept(number))
        except OSError as error:
            raise self.cannot_write(error) from error

    def cannot_write(self, error: OSError) -> EnvironmentProblem:
        """For people."""
        return EnvironmentProblem(f"cannot write to the cache folder {self.folder}: {error.strerror}")

    def read(self, number: int, offset: int, size_bytes: int) -> bytes:
        """Raises CorruptBlock if they are not all there, or the disk has lost them; EnvironmentProblem if they cannot
        be read now."""
        try:
            fd = os.open(self.sending.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                data = os.pread(fd, size_bytes, offset)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in _LOST:
                raise CorruptBlock(f"container {number} cannot be read: {error.strerror}") from error
            raise EnvironmentProblem(
                f"cannot read from the cache folder {self.folder}: {error.strerror}"
            ) from error
        if len(data) != size_bytes:
            raise CorruptBlock(f"container {number} is shorter than it was")
        return data

    def finish(self, number: int) -> None:
        """It is written to no more."""
        with self._lock:
            fd = self._writing.pop(number, None)
        if fd is not None:
            os.close(fd)

    def punch(self, number: int, offset: int, size_bytes: int) -> bool:
        """Give the whole pages of these bytes back to the disk; False where that is not possible.

        Nor is it in a file of which a descriptor was handed out, be it by a server before this one: readers map them,
        and must not see zeros. The native part marks such files with the sticky bit (`Passing::HANDED_OUT`).
        """
        first = -(-offset // PAGE_BYTES) * PAGE_BYTES
        length = (offset + size_bytes) // PAGE_BYTES * PAGE_BYTES - first
        if length <= 0:
            return True
        try:
            fd = os.open(self.sending.path(number), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            if os.fstat(fd).st_mode & stat.S_ISVTX:
                return False
            return _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, first, length)
        finally:
            os.close(fd)

    def unlink(self, number: int, size_bytes: int) -> None:
        """Give it up; what is being sent from it goes on. Never raises."""
        self.finish(number)
        with suppress(OSError):
            os.unlink(self.sending.path(number))
        self.sending.forget(number, size_bytes)

    def close(self) -> None:
        """Let go of the folder."""
        for number in list(self._writing):
            self.finish(number)
        os.close(self._lock_fd)

    def _kept(self, number: int) -> int:
        fd = self._writing.get(number)
        if fd is None:
            fd = os.open(self.sending.path(number), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._writing[number] = fd
            self._close_oldest()
        self._writing.move_to_end(number)
        return fd

    def _close_oldest(self) -> None:
        while len(self._writing) > OPEN_TO_WRITE_MAX:
            os.close(self._writing.popitem(last=False)[1])


def _fallocate(fd: int, mode: int, offset: int, length: int) -> bool:
    """The system call that Python's `os` has not."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length))) == 0
