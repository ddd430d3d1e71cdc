"""Files of a folder as they are written: beside the objects where nobody sees them, then renamed. Every function here
blocks, and raises OSError."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from stoker.base.flushing import flush_folder
from stoker.cache.origin.port import STAGING
from stoker.cache.origin.writing_port import NO_ATTRIBUTES, Attributes, Owner
from stoker.errors import (
    BadKey,
    ObjectTooLarge,
    OriginError,
    OriginFull,
    OriginReadOnly,
    StokerError,
    WriteDenied,
)

_TYPE, _METADATA, _HEADERS = "user.mime_type", "user.stoker.metadata", "user.stoker.headers"
"""Extended attributes; the first is what desktops use as well."""
FOLDER = "user.stoker.folder"
"""Of a folder that is an object (`local_folders.py`): when it was made, in nanoseconds since 1970."""
_NO_ATTRIBUTES = (errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.ENOSPC, errno.E2BIG, errno.ERANGE)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_NO_GIFT = (errno.EPERM, errno.EACCES, errno.EINVAL)
"""Not allowed, or a user that the file system, or this server's namespace, does not know."""
_ATTEMPTS = 5


class NewFile:
    """A file without a name that anybody sees. Its methods follow each other, in whatever threads. `owner`: whose it is
    from its first byte on."""

    def __init__(self, root: str, owner: Owner | None = None) -> None:
        self._owner = owner
        self._root = root
        self.path = f"{root}/{STAGING}/new/{secrets.token_hex(16)}"
        self.fd = -1

    def open(self) -> None:
        """Make it. Raises WriteDenied where it cannot be its owner's."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self.fd = os.open(self.path, flags, 0o666)
        except FileNotFoundError:
            _make_staging(self._root, "new")
            self.fd = os.open(self.path, flags, 0o666)
        if self._owner is not None:
            give(self.fd, self._owner)

    def write(self, data: bytes | bytearray) -> None:
        """All of it, at the end."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]

    def drop(self) -> None:
        """Close it; if it got no name, it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with suppress(FileNotFoundError):
                os.unlink(self.path)


def dress(file: NewFile, attributes: Attributes, before: os.stat_result | None) -> None:
    """Give a file its owner and attributes, and what it takes from the one it replaces; then flush it."""
    if before is not None:
        os.fchmod(file.fd, stat.S_IMODE(before.st_mode))
        if attributes.owner is None and os.geteuid() == 0:
            os.fchown(file.fd, before.st_uid, before.st_gid)
    if attributes.owner is not None:
        give(file.fd, attributes.owner)
        if before is not None:
            os.fchmod(file.fd, stat.S_IMODE(before.st_mode))  # changing the owner may clear bits
    keep(file.fd, attributes)
    now = time.time_ns()
    os.utime(file.fd, ns=(now, now))  # finer than what the kernel would write: it is part of the version
    os.fsync(file.fd)


def keep(fd: int, attributes: Attributes) -> None:
    """Have a file or folder remember what is said of it, where it can."""
    if attributes.content_type:
        _remember(fd, _TYPE, attributes.content_type.encode())
    if attributes.metadata:
        _remember(fd, _METADATA, msgspec.json.encode(attributes.metadata))
    if attributes.headers:
        _remember(fd, _HEADERS, msgspec.json.encode(attributes.headers))


def forget(fd: int) -> None:
    """Have a file or folder remember nothing that was said of it."""
    for name in (_TYPE, _METADATA, _HEADERS):
        with suppress(OSError):
            os.removexattr(fd, name)


def give(fd: int, owner: Owner) -> None:
    """A file or folder belongs to somebody, or it is an error. Raises WriteDenied."""
    try:
        os.fchown(fd, owner.uid, owner.gid)
    except OSError as error:
        if error.errno not in _NO_GIFT:
            raise
        raise WriteDenied(
            f"nothing can be given to user {owner.uid} and group {owner.gid} there: {error.strerror}; this server runs "
            f"as user {os.geteuid()}, and needs the capability CAP_CHOWN"
        ) from error


def renew(file: NewFile, before: os.stat_result) -> None:
    """See to it that a file's version is another than that of the one it replaces."""
    found = os.fstat(file.fd)
    later = found.st_mtime_ns
    while (found.st_size, found.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
        later += max(1, later - found.st_mtime_ns) * 4  # some file systems count in seconds
        os.utime(file.fd, ns=(later, later))
        os.fsync(file.fd)
        found = os.fstat(file.fd)


def attributes_of(fd: int) -> Attributes:
    """What a file remembers."""
    try:
        if not os.listxattr(fd):
            return NO_ATTRIBUTES
    except OSError:
        return NO_ATTRIBUTES
    content_type = _remembered(fd, _TYPE).decode("utf-8", "replace")
    metadata, headers = _remembered_names(fd, _METADATA), _remembered_names(fd, _HEADERS)
    return Attributes(content_type, metadata, headers=headers)


def _remembered_names(fd: int, name: str) -> dict[str, str]:
    with suppress(ValueError):
        return msgspec.json.decode(_remembered(fd, name) or b"{}", type=dict[str, str])
    return {}


def keeps_attributes(folder: str) -> bool:
    """Whether files there can remember what is said of them."""
    try:
        os.getxattr(folder, _TYPE)
    except OSError as error:
        return error.errno == errno.ENODATA
    return True


def enter(root: str, folder: str, *, makes: bool, owner: Owner | None = None) -> int:
    """A descriptor of the folder below the root with that path, which may lead over links that stay inside.

    `makes`: folders that are missing are made. Raises FileNotFoundError, NotADirectoryError.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in folder.split("/") if folder else ():
            fd, above = _step(root, fd, name, makes=makes, owner=owner), fd
            os.close(above)
        _check_inside(root, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _step(root: str, above: int, name: str, *, makes: bool, owner: Owner | None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=above)
    except FileNotFoundError:
        if not makes:
            raise
    _check_inside(root, above)
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=above)
    fd = os.open(name, flags, dir_fd=above)
    try:
        if owner is not None:
            give(fd, owner)
        _flush(above)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_inside(root: str, fd: int) -> None:
    real = os.readlink(f"/proc/self/fd/{fd}")
    if os.path.commonpath([root, real]) != root:
        raise OSError(errno.ELOOP, "a link in it leads out of the folder")


def _flush(fd: int) -> None:
    flush_folder(f"/proc/self/fd/{fd}")


def publish(
    file: NewFile, root: str, key: str, owner: Owner | None, check: Callable[[bool], os.stat_result | None]
) -> None:
    """Give a flushed file its name, where `check` raises nothing, which tells what is there, and is told whether nobody
    else writes meanwhile. The name is flushed too."""
    folder, _, last = key.rpartition("/")
    for attempt in range(_ATTEMPTS):
        fd = enter(root, folder, makes=True, owner=owner)
        try:
            with locked(root) as is_alone:
                before = check(is_alone)
                if before is not None:
                    renew(file, before)
                _rename(file.path, last, fd)
            _flush(fd)
            return
        except FileNotFoundError:
            # Its folder was empty, and was removed for an object of that name.
            if attempt + 1 == _ATTEMPTS:
                raise
        finally:
            os.close(fd)


def _rename(path: str, name: str, folder: int) -> None:
    try:
        os.rename(path, name, dst_dir_fd=folder)
    except IsADirectoryError:
        # Folders without objects are none: they are what deleting has left.
        _remove_empty(name, folder)
        os.rename(path, name, dst_dir_fd=folder)


def _remove_empty(name: str, above: int) -> None:
    """Raises IsADirectoryError if there is anything but folders in it, which stays."""
    for inside, _, files, fd in os.fwalk(name, topdown=False, dir_fd=above):
        if files or FOLDER in os.listxattr(fd):
            raise IsADirectoryError(errno.EISDIR, "there are objects below it")
        for child in os.listdir(fd):
            os.rmdir(child, dir_fd=fd)
        del inside
    os.rmdir(name, dir_fd=above)


@contextmanager
def locked(root: str) -> Iterator[bool]:
    """One at a time of all who write to this folder through Stoker. False: there are no locks on this file system."""
    path = f"{root}/{STAGING}/lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        _make_staging(root)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _make_staging(root: str, *names: str) -> None:
    """The folders in which files are staged. The root itself is not made: where it is gone it was removed, and what
    would be written to it nobody would find."""
    path = root
    for name in (STAGING, *names):
        path += f"/{name}"
        with suppress(FileExistsError):
            os.mkdir(path)


def remove(root: str, key: str) -> None:
    """Remove a name; the folder is flushed."""
    folder, _, last = key.rpartition("/")
    fd = enter(root, folder, makes=False)
    try:
        with locked(root):
            os.unlink(last, dir_fd=fd)
        _flush(fd)
    finally:
        os.close(fd)


def _remember(fd: int, name: str, value: bytes) -> None:
    try:
        os.setxattr(fd, name, value)
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise


def _remembered(fd: int, name: str) -> bytes:
    try:
        return os.getxattr(fd, name)
    except OSError:
        return b""


def refusal(url: str, key: str, error: OSError) -> StokerError:
    """What a failed write of a file is called."""
    said = f"{key!r} cannot be written to {url}: {error.strerror or error}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return OriginFull(f"{said}; make room there")
        case errno.EROFS:
            return OriginReadOnly(f"{said}; mount it for writing, or write to another origin")
        case errno.EXDEV:
            return OriginReadOnly(
                f"{said}: it lies on another file system than {url} itself; give that folder a bucket of its own"
            )
        case errno.EACCES | errno.EPERM:
            return WriteDenied(
                f"{said} for user {os.geteuid()}; look at the owner and permissions of the folder"
            )
        case errno.ENAMETOOLONG | errno.EINVAL | errno.EILSEQ | errno.ELOOP:
            return BadKey(said)
        case errno.ENOTDIR | errno.EISDIR | errno.ENOTEMPTY | errno.EEXIST:
            return BadKey(
                f"{said}: in a folder there is no object beside others whose keys go on with its name and a slash"
            )
        case errno.EFBIG:
            return ObjectTooLarge(said)
    return OriginError(said)
