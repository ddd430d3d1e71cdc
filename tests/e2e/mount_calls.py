"""What the kernel says to calls that programs make of a mount that nobody may write to."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
SIZE_BYTES = 4097


def _outcome(call: Callable[[], Any]) -> Any:
    """What it returns, or the name of its errno."""
    try:
        said = call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return said.hex() if isinstance(said, bytes) else said


def _opened(path: str, flags: int) -> str:
    os.close(os.open(path, flags, 0o644))
    return "opened"


def openings(root: str) -> dict[str, Any]:
    """By what is opened, how. Of `f` a file, `d` a folder, `none` nothing, and names that cannot be."""
    tables: dict[str, tuple[str, int]] = {
        "file to read": ("f", os.O_RDONLY),
        "file to write": ("f", os.O_WRONLY),
        "file for both": ("f", os.O_RDWR),
        "file to append": ("f", os.O_WRONLY | os.O_APPEND),
        "file, truncated": ("f", os.O_RDONLY | os.O_TRUNC),
        "file, made if not there": ("f", os.O_RDONLY | os.O_CREAT),
        "file, made anew": ("f", os.O_RDONLY | os.O_CREAT | os.O_EXCL),
        "file as a folder": ("f", os.O_RDONLY | os.O_DIRECTORY),
        "file, no link": ("f", os.O_RDONLY | os.O_NOFOLLOW),
        "file, as a path": ("f", os.O_PATH),
        "file, direct": ("f", os.O_RDONLY | os.O_DIRECT),
        "file, at once": ("f", os.O_RDONLY | os.O_NONBLOCK),
        "file, no times": ("f", os.O_RDONLY | os.O_NOATIME),
        "folder to read": ("d", os.O_RDONLY),
        "folder to write": ("d", os.O_WRONLY),
        "folder as a folder": ("d", os.O_RDONLY | os.O_DIRECTORY),
        "folder, a nameless file": ("d", os.O_RDWR | os.O_TMPFILE),
        "nothing to read": ("none", os.O_RDONLY),
        "nothing, made": ("none", os.O_WRONLY | os.O_CREAT),
        "nothing in a folder that is not there": ("none/f", os.O_RDONLY),
        "in a file": ("f/x", os.O_RDONLY),
        "in a file, a folder": ("f/", os.O_RDONLY),
        "by dots": ("d/../d/./../f", os.O_RDONLY),
        "a name of 256 bytes": ("x" * 256, os.O_RDONLY),
        "a path of 4096 bytes": ("d/" * 2048 + "f", os.O_RDONLY),
        "a name that is no text": ("\udcff", os.O_RDONLY),
    }
    return {
        what: _outcome(partial(_opened, f"{root}/{path}", flags)) for what, (path, flags) in tables.items()
    }


def writes(root: str) -> dict[str, Any]:
    """Each way to change something."""
    file, folder, other = f"{root}/f", f"{root}/d", f"{root}/new"
    calls: dict[str, Callable[[], Any]] = {
        "unlink": lambda: os.unlink(file),
        "rmdir": lambda: os.rmdir(folder),
        "mkdir": lambda: os.mkdir(other),
        "mkdir of one there": lambda: os.mkdir(folder),
        "rename": lambda: os.rename(file, other),
        "rename over": lambda: os.rename(file, f"{root}/g"),
        "rename of a folder": lambda: os.rename(folder, other),
        "link": lambda: os.link(file, other),
        "symlink": lambda: os.symlink("f", other),
        "mknod": lambda: os.mknod(other),
        "mkfifo": lambda: os.mkfifo(other),
        "truncate": lambda: os.truncate(file, 0),
        "chmod": lambda: os.chmod(file, 0o777),
        "chown": lambda: os.chown(file, 1, 1),
        "utime": lambda: os.utime(file),
        "utime of a folder": lambda: os.utime(folder, (1, 1)),
        "setxattr": lambda: os.setxattr(file, "user.x", b"y"),
        "setxattr of its own": lambda: os.setxattr(file, "user.stoker.version", b"y"),
        "removexattr": lambda: os.removexattr(file, "user.stoker.version"),
        "mkstemp": lambda: tempfile.mkstemp(dir=root),
        "a socket": lambda: socket.socket(socket.AF_UNIX).bind(other),
        "access to write": lambda: os.access(file, os.W_OK),
        "access to write in a folder": lambda: os.access(folder, os.W_OK),
        "write to what was opened to read": lambda: os.write(os.open(file, os.O_RDONLY), b"x"),
        "ftruncate of it": lambda: os.ftruncate(os.open(file, os.O_RDONLY), 0),
        "fallocate of it": lambda: os.posix_fallocate(os.open(file, os.O_RDONLY), 0, 10),
        "fchmod of it": lambda: os.fchmod(os.open(file, os.O_RDONLY), 0o777),
        "shared mapping to write": lambda: mmap.mmap(
            os.open(file, os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_WRITE
        ),
    }
    return {what: _outcome(call) for what, call in calls.items()}


def reads(root: str) -> dict[str, Any]:
    """Of an open file of 4097 bytes, and of an open folder."""
    fd, folder = os.open(f"{root}/f", os.O_RDONLY), os.open(f"{root}/d", os.O_RDONLY | os.O_DIRECTORY)
    direct = os.open(f"{root}/f", os.O_RDONLY | os.O_DIRECT)
    page = mmap.mmap(-1, 8192)
    calls: dict[str, Callable[[], Any]] = {
        "before the beginning": lambda: os.pread(fd, 1, -1),
        "across the end": lambda: len(os.pread(fd, 100, SIZE_BYTES - 3)),
        "at the end": lambda: os.pread(fd, 100, SIZE_BYTES),
        "far beyond": lambda: os.pread(fd, 100, 1 << 50),
        "nothing": lambda: os.pread(fd, 0, 0),
        "into many": lambda: os.preadv(fd, [bytearray(1), bytearray(4000), bytearray(4000)], 10),
        "direct": lambda: os.preadv(direct, [page], 0),
        "direct, beyond": lambda: os.preadv(direct, [page], 8192),
        "copied by the kernel": lambda: os.copy_file_range(fd, os.memfd_create("x"), 100, 0),
        "of a folder": lambda: os.pread(folder, 1, 0),
        "data": lambda: os.lseek(fd, 10, os.SEEK_DATA),
        "hole": lambda: os.lseek(fd, 10, os.SEEK_HOLE),
        "data beyond": lambda: os.lseek(fd, SIZE_BYTES, os.SEEK_DATA),
        "end": lambda: os.lseek(fd, 0, os.SEEK_END),
        "far": lambda: os.lseek(fd, 1 << 40, os.SEEK_SET),
        "backward": lambda: os.lseek(fd, -1, os.SEEK_SET),
        "fsync": lambda: os.fsync(fd),
        "fdatasync": lambda: os.fdatasync(fd),
        "fsync of a folder": lambda: os.fsync(folder),
        "syncfs": lambda: _libc.syncfs(fd),
        "advice": lambda: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED),
        "readahead": lambda: _libc.readahead(fd, ctypes.c_longlong(0), ctypes.c_size_t(4097)),
        "readlink": lambda: os.readlink(f"{root}/f"),
        "access": lambda: os.access(f"{root}/f", os.R_OK),
        "access of nothing": lambda: os.access(f"{root}/none", os.F_OK),
        "access to run": lambda: os.access(f"{root}/f", os.X_OK),
        "access of a folder": lambda: os.access(f"{root}/d", os.R_OK | os.X_OK),
        "attribute that is not there": lambda: os.getxattr(f"{root}/f", "user.none"),
        "attribute of another kind": lambda: os.getxattr(f"{root}/f", "security.selinux"),
        "attributes of a folder": lambda: os.listxattr(f"{root}/d"),
        "stat of nothing": lambda: os.stat(f"{root}/none"),
        "stat in a file": lambda: os.stat(f"{root}/f/x"),
        "stat of a long name": lambda: os.stat(f"{root}/{'x' * 256}"),
        "list of a file": lambda: os.listdir(f"{root}/f"),
        "work in a folder": lambda: os.chdir(f"{root}/d"),
        "work in a file": lambda: os.chdir(f"{root}/f"),
        "shared lock": lambda: fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB),
        "lock of its own": lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
        "lock of a record": lambda: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 10),
        "lock to write": lambda: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10),
    }
    return {what: _outcome(call) for what, call in calls.items()}


def moved(root: str, out: str) -> dict[str, bool]:
    """Whether a file's bytes are the same, moved out of it in each way that the kernel has."""
    found: dict[str, bool] = {}

    def told(name: str, move: Callable[[int, int], int]) -> None:
        source, to = os.open(f"{root}/big", os.O_RDONLY), os.open(f"{out}/{name}", os.O_RDWR | os.O_CREAT)
        while move(to, source):
            pass
        found[name] = Path(f"{out}/{name}").read_bytes() == Path(f"{root}/big").read_bytes()
        os.close(source)
        os.close(to)

    def spliced(to: int, source: int) -> int:
        inner, outer = os.pipe()
        try:
            taken = os.splice(source, outer, 65536)
            left = taken
            while left:
                left -= os.splice(inner, to, left)
            return taken
        finally:
            os.close(inner)
            os.close(outer)

    told("sendfile", lambda to, source: os.sendfile(to, source, None, 1 << 20))  # type: ignore[arg-type]
    told("pread", lambda to, source: os.write(to, os.pread(source, 333_333, os.lseek(to, 0, os.SEEK_CUR))))
    told("splice", spliced)
    return found


def private_mapping(path: str) -> list[bool]:
    """Whether what is written to a private mapping is there, and only there."""
    fd = os.open(path, os.O_RDONLY)
    before = os.pread(fd, 100, 0)
    with mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as data:
        data[:3] = b"new"
        return [data[:100] == b"new" + before[3:], os.pread(fd, 100, 0) == before]


def listed_in_pieces(folder: str) -> dict[str, list[str]]:
    """The names of a folder, read with buffers of several sizes, again from its beginning, and from its middle on."""
    return {
        **{
            f"{size_bytes}": _getdents(folder, size_bytes)
            for size_bytes in (320, 333, 1000, 4096, 32768, 1 << 20)
        },
        **_sought(folder),
    }


def _getdents(folder: str, size_bytes: int) -> list[str]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    buffer, names = ctypes.create_string_buffer(size_bytes), []
    while taken := _libc.syscall(217, fd, buffer, size_bytes):  # getdents64
        if taken < 0:
            raise OSError(ctypes.get_errno(), "getdents64")
        at = 0
        while at < taken:
            length = int.from_bytes(buffer.raw[at + 16 : at + 18], "little")
            names.append(buffer.raw[at + 19 : at + length].split(b"\0")[0].decode())
            at += length
    os.close(fd)
    return names


def _sought(folder: str) -> dict[str, list[str]]:
    """By opendir(3) and its friends."""
    _libc.opendir.restype = ctypes.c_void_p
    _libc.readdir.restype = ctypes.c_void_p
    _libc.telldir.restype = ctypes.c_long
    stream = ctypes.c_void_p(_libc.opendir(os.fsencode(folder)))

    def name() -> str | None:
        entry = _libc.readdir(stream)
        return ctypes.string_at(entry + 19).decode() if entry else None

    first = list(iter(name, None))
    _libc.rewinddir(stream)
    again = list(iter(name, None))
    _libc.rewinddir(stream)
    for _ in range(len(first) // 2):
        name()
    middle = _libc.telldir(stream)
    rest = list(iter(name, None))
    _libc.seekdir(stream, ctypes.c_long(middle))
    rest_again = list(iter(name, None))
    _libc.closedir(stream)
    return {
        "first": first,
        "again": again,
        "halves": first[: len(first) // 2] + rest,
        "rest": rest,
        "rest again": rest_again,
    }


def watched(folder: str, name: str) -> int:
    """How many events inotify tells of while a file is read."""
    fd = _libc.inotify_init1(os.O_NONBLOCK)
    assert _libc.inotify_add_watch(fd, os.fsencode(folder), 0xFFF) > 0
    Path(folder, name).read_bytes()
    data, events = os.read(fd, 65536), 0
    while data:
        events += 1
        data = data[16 + int.from_bytes(data[12:16], "little") :]
    os.close(fd)
    return events
