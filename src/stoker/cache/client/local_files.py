"""The short circuit: read what the server holds from its files, after the server has said yes."""

from __future__ import annotations

import functools
import os

import msgspec

from stoker.errors import WireError
from stoker.wire.cache_api import StoreFolder

PLACES_FROM_BYTES = 24 * 1024
"""From here on a file is cheaper than bytes over a Unix socket."""

_KEPT_BYTES = 16 * 1024 * 1024
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalFiles:
    """What a client knows of the folder of its server. Keeps nothing open, so that a fork is no matter."""

    def __init__(self, from_bytes: int = PLACES_FROM_BYTES) -> None:
        self.from_bytes: int | None = from_bytes
        self.is_used = False
        self._known: tuple[bytes, bytes] = b"", b""

    def find(self, frame: bytes) -> bytes | None:
        """What to put before the server's paths; None, from then on too, if its folder is not to be seen here.

        The same path may be another folder here, with other content under the same names: a server may live
        in a container and share no more than its socket.
        """
        known, prefix = self._known
        if frame == known:
            return prefix
        try:
            folder = msgspec.msgpack.decode(frame, type=StoreFolder)
        except msgspec.DecodeError as error:
            raise WireError(f"the server's folder is not understood: {error}") from error
        try:
            found = os.stat(folder.path)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (folder.device, folder.inode):
            self.from_bytes = None
            return None
        _keep_freed_memory()
        self.is_used = True
        self._known = frame, folder.path + b"/"
        return folder.path + b"/"


@functools.cache
def _keep_freed_memory() -> None:
    """Let the allocator keep what a batch frees for the next one.

    By default glibc returns it at once, and each batch pays page faults that cost several times the reading. It
    raises its limits (M_MMAP_THRESHOLD, and twice that for M_TRIM_THRESHOLD) to the largest block it saw freed.
    """
    bytearray(_KEPT_BYTES)


class OpenedFiles:
    """The files that one batch is read from, each opened once. Nothing stays open: a fork is no matter, and what the
    server gives up leaves the disk."""

    def __init__(self) -> None:
        self._fds: dict[bytes, int] = {}

    def read(self, path: bytes, offset: int, size_bytes: int) -> bytes | None:
        """So many bytes of a file; None if it is not there, cannot be read or ends before."""
        try:
            fd = self._fds.get(path)
            if fd is None:
                fd = self._fds[path] = os.open(path, _FLAGS)
            data = os.pread(fd, size_bytes, offset)
        except OSError:
            return None
        return data if len(data) == size_bytes else None

    def __enter__(self) -> OpenedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)
