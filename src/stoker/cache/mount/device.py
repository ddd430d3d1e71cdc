"""What the kernel does for a mount: the device that requests come from, the mount itself, and files that it reads in
the daemon's place. Raises EnvironmentProblem where the kernel refuses."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

from stoker.cache.mount import helper
from stoker.cache.mount.places import FILE_SYSTEM
from stoker.errors import EnvironmentProblem

DEVICE = "/dev/fuse"
_BACKING_DEVICES = "/sys/class/bdi"
_CONNECTIONS = "/sys/fs/fuse/connections"
READ_BYTES_MIN = 8192
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MNT_DETACH = 1, 2, 4, 8, 2
_UMOUNT_NOFOLLOW = 8
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same on all architectures that PyTorch has
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _FSCONFIG_CMD_CREATE = 1, 1, 6
_BACKING_OPEN = (1 << 30) | (16 << 16) | (229 << 8) | 1
_BACKING_CLOSE = (1 << 30) | (4 << 16) | (229 << 8) | 2
_BACKING_MAP = struct.Struct("=iIQ")
_ANSWER, _INTERRUPTION = struct.Struct("=IiQ"), 1
_NEEDS_ROOT = ": it needs the capability CAP_SYS_ADMIN, as root has it"
_UNMOUNT_WHY = {
    errno.EPERM: _NEEDS_ROOT,
    errno.EINVAL: ": it is not mounted there any more, or is part of a container, which may not take it away",
    errno.ENOENT: ": the folder is not there any more",
}
_libc = ctypes.CDLL(None, use_errno=True)


class MountBusy(EnvironmentProblem):
    """Somebody has something open there, or something is mounted in it."""


def open_device() -> int:
    """A descriptor that a mount's requests are read from."""
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise EnvironmentProblem(
            f"{DEVICE} is not there: load the kernel's module (modprobe fuse), or give it to this container"
        ) from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot open {DEVICE}: {error.strerror}") from error


def attach(
    folder: str, source: str, *, is_writable: bool, lets_others: bool, runs_programs: bool = True
) -> int:
    """Have a folder show what whoever has the descriptor that this returns answers; by the help of fusermount3 where
    this user may not. Raises EnvironmentProblem."""
    if os.geteuid() != 0:
        return helper.mount(
            folder, source, is_writable=is_writable, lets_others=lets_others, runs_programs=runs_programs
        )
    fd = open_device()
    try:
        mount(
            fd, folder, source,
            is_writable=is_writable, lets_others=lets_others, runs_programs=runs_programs,
        )  # fmt: skip
    except BaseException:
        os.close(fd)
        raise
    return fd


def mount(
    fd: int, folder: str, source: str, *, is_writable: bool, lets_others: bool, runs_programs: bool = True
) -> None:
    """Have a folder show what the daemon behind this descriptor answers; the kernel itself sees to owners and modes."""
    options = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions"
    options += ",allow_other" if lets_others else ""
    flags = _MS_NOSUID | _MS_NODEV | (0 if is_writable else _MS_RDONLY) | (0 if runs_programs else _MS_NOEXEC)
    said = _libc.mount(source.encode(), os.fsencode(folder), FILE_SYSTEM.encode(), flags, options.encode())
    if said != 0:
        code = ctypes.get_errno()
        why = os.strerror(code)
        if code == errno.EPERM:
            why += _NEEDS_ROOT
        raise EnvironmentProblem(f"cannot mount {source} on {folder}: {why}")


def unmount(folder: str, *, is_lazy: bool = False) -> None:
    """Have it show what was there before. `is_lazy`: at once, for who comes; those who have files open go on. Raises
    MountBusy as well."""
    if os.geteuid() != 0:
        if said := helper.unmount(folder, is_lazy=is_lazy):
            kind = MountBusy if said.endswith(os.strerror(errno.EBUSY)) else EnvironmentProblem
            raise kind(f"cannot unmount {folder}: {said}")
        return
    if _libc.umount2(os.fsencode(folder), (_MNT_DETACH if is_lazy else 0) | _UMOUNT_NOFOLLOW) != 0:
        code = ctypes.get_errno()
        kind = MountBusy if code == errno.EBUSY else EnvironmentProblem
        raise kind(f"cannot unmount {folder}: {os.strerror(code)}{_UNMOUNT_WHY.get(code, '')}")


def abort(number: str) -> None:
    """Have the kernel fail all that waits for the mount of this number (MAJOR:MINOR), and all that comes. Raises
    OSError: it is not of this user, or gone, or this user is not root and nobody has mounted the list of such mounts
    (the file system fusectl)."""
    name = f"{number.partition(':')[2]}/abort"
    try:
        said = os.open(f"{_CONNECTIONS}/{name}", os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # in a container the list may not be mounted
        connections = _own_list_of_connections()
        try:
            said = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=connections)
        finally:
            os.close(connections)
    try:
        os.write(said, b"1")
    finally:
        os.close(said)


def _own_list_of_connections() -> int:
    """The file system fusectl as a folder's descriptor, mounted nowhere (Linux 5.2). Raises OSError."""
    context = _called(_FSOPEN, b"fusectl", _FSOPEN_CLOEXEC)
    try:
        _called(_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _called(_FSMOUNT, context, _FSMOUNT_CLOEXEC, 0)
    finally:
        os.close(context)


def _called(number: int, *arguments: bytes | int | None) -> int:
    said: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if said < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return said


def set_readahead(number: str, readahead_bytes: int) -> None:
    """How much the kernel asks for ahead of who reads on, at once, from the mount of this number (MAJOR:MINOR),
    whatever else is mounted on its folder. It is 128 KiB from INIT on, whose answer can only make it less: to be called
    after it. Raises OSError: not of this user."""
    with open(f"{_BACKING_DEVICES}/{number}/read_ahead_kb", "w", encoding="ascii") as said:
        said.write(str(readahead_bytes // 1024))


def is_waited_for(device: int, unique: int) -> bool:
    """Whether a request of that number was read and has no answer. Asked by answering an interruption of it, which
    says nothing. Raises OSError."""
    try:
        os.write(device, _ANSWER.pack(_ANSWER.size, 0, unique | _INTERRUPTION))
    except FileNotFoundError:
        return False
    return True


def open_backing(device: int, fd: int) -> int:
    """Have the kernel read this file in the daemon's place: a number for an answer to OPEN. Raises OSError: not of this
    kernel, file or user."""
    backing: int = fcntl.ioctl(device, _BACKING_OPEN, bytearray(_BACKING_MAP.pack(fd, 0, 0)), True)
    return backing


def close_backing(device: int, backing_id: int) -> None:
    """It is used for no further OPEN; what is open goes on. Raises OSError."""
    fcntl.ioctl(device, _BACKING_CLOSE, struct.pack("=I", backing_id))
