"""The files in which snapshots lie: two for each worker that takes them, in a folder in shared memory.

Writer and readers keep apart by `flock`, which the kernel lets go of when a process dies, in whatever way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from stoker.base.units import format_bytes
from stoker.errors import EnvironmentProblem, WireError
from stoker.train.checkpoints.layout import (
    HEADER_BYTES,
    Header,
    Read,
    decode_header,
    encode_header,
    read_header,
)

SLOTS = 2
FREE_SHARE = 1 / 32
"""Of the file system, so much is left to others: loaders and NCCL need shared memory as well."""
GROW_BYTES = 1024 * 1024
_NAME = re.compile(r"^\d+-\d+\.snapshot$")
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def slot_paths(folder: Path, local_rank: int) -> list[Path]:
    """Of the worker of this local rank."""
    return [folder / f"{local_rank}-{slot}.snapshot" for slot in range(SLOTS)]


def all_slots(folder: Path) -> list[Path]:
    """Of all workers of the node; none where there is no such folder."""
    try:
        return sorted(path for path in folder.iterdir() if _NAME.match(path.name))
    except OSError:
        return []


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int | None]:
    """A descriptor of a slot that nobody writes meanwhile; None: it is being written, or not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        yield None
        return
    try:
        yield descriptor if _lock(descriptor, fcntl.LOCK_SH) else None
    finally:
        os.close(descriptor)


def reader(descriptor: int) -> Read:
    """Reads the file as `layout` wants it."""

    def read(offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], offset + done)
            if count == 0:
                raise WireError(f"it ends after {offset + done} bytes, within what it should hold")
            done += count

    return read


@contextlib.contextmanager
def mapped(descriptor: int) -> Iterator[memoryview]:
    """The whole file as memory, writable as torch wants it; what is written there stays out of the file.

    For who keeps the file locked. Tensors that are still there at the end of the context keep what they hold: its pages
    are copied for them. Raises OSError.
    """
    size_bytes = os.fstat(descriptor).st_size
    memory = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    whole = memoryview(memory)
    _populate(memory, _MADV_POPULATE_READ)
    try:
        yield whole
    finally:
        del whole
        try:
            memory.close()
        except BufferError:
            _copy_pages(memory)


def header_of(descriptor: int) -> Header:
    """Raises WireError for what is no whole snapshot's file."""
    return read_header(reader(descriptor), os.fstat(descriptor).st_size)


class Slot:
    """A writer's side of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory: mmap.mmap | None = None
        """The file from its beginning, as far as there was room made."""
        self._locked = -1
        self._inode = 0
        """Of what is mapped."""

    def peek(self) -> Header | None:
        """What it holds, as far as can be told without a lock; None: nothing that is worth keeping."""
        try:
            with self.path.open("rb") as file:
                return decode_header(file.read(HEADER_BYTES))
        except (OSError, WireError):
            return None

    def lock(self) -> bool:
        """Keep readers out until `unlock`; False: somebody reads it. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        if not _lock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            return False
        self._locked = descriptor
        return True

    def unlock(self) -> None:
        """Also for who has inherited the descriptor: a forked process."""
        descriptor, self._locked = self._locked, -1
        if descriptor >= 0:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget_lock(self) -> None:
        """In a process that was forked meanwhile: the lock is not its own, and must not outlive the writer."""
        descriptor, self._locked = self._locked, -1
        if descriptor >= 0:
            os.close(descriptor)

    def make_room(self, size_bytes: int) -> None:
        """Take the memory and map it: then nothing that is written can fail. What it holds stays as it is.

        Raises EnvironmentProblem where there is none.
        """
        if self.memory is not None and len(self.memory) >= size_bytes and self._is_file():
            return
        self.memory = None
        size_bytes = -(-size_bytes // GROW_BYTES) * GROW_BYTES
        descriptor = -1
        try:
            # Not the descriptor of the lock, which the mapping would hold on to in processes that are forked.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
            has = os.fstat(descriptor).st_size
            if has < size_bytes:
                _check_room(descriptor, size_bytes - has)
            size_bytes = max(size_bytes, has)
            os.posix_fallocate(descriptor, 0, size_bytes)
            self.memory = mmap.mmap(descriptor, size_bytes)
            self._inode = os.fstat(descriptor).st_ino
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
                raise EnvironmentProblem(f"{self.path} cannot be written: {error}") from error
            raise EnvironmentProblem(self._no_room(size_bytes)) from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        _populate(self.memory, _MADV_POPULATE_WRITE)

    def _is_file(self) -> bool:
        """Whether what is mapped is still the file at this path, whole: others may have removed it, or cut it off."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        return self.memory is not None and self._inode == found.st_ino and found.st_size >= len(self.memory)

    def write_header(self, header: Header) -> None:
        """While it is locked and has room."""
        assert self.memory is not None
        raw = encode_header(header)
        self.memory[: len(raw)] = raw

    def _no_room(self, size_bytes: int) -> str:
        room = os.statvfs(self.path.parent)
        free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        return (
            f"no room for a snapshot of {format_bytes(size_bytes)} in {self.path.parent}: {format_bytes(free)} of "
            f"{format_bytes(total)} are free, and two snapshots must fit beside what others need. Give the machine or "
            "container more shared memory (docker run --shm-size, an emptyDir of medium Memory), or name a folder "
            "with room in STOKER_SNAPSHOT_DIR"
        )


def _check_room(descriptor: int, more_bytes: int) -> None:
    room = os.fstatvfs(descriptor)
    free = room.f_bavail * room.f_frsize
    if free - more_bytes < room.f_blocks * room.f_frsize * FREE_SHARE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _populate(memory: mmap.mmap, advice: int) -> None:
    """Have all pages mapped at once, without the GIL: one after the other they would cost a copy twice its time."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), advice)  # Linux 5.14; else later


def _copy_pages(memory: mmap.mmap) -> None:
    """Of a private mapping: from now on nothing that is written to the file shows there."""
    for at in range(0, len(memory), mmap.PAGESIZE):
        memory[at] = memory[at]


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
