"""Files of a place for checkpoints: how they are read and written, and what hides behind their errors."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from stoker.errors import StokerError

FLUSH_BYTES = 64 * 1024 * 1024
"""Of a file that is being written, so much reaches the disk at a time."""
DEFECTS = (AssertionError, AttributeError, MemoryError, NameError, TypeError)
"""What no storage raises: mistakes in a program, and what has to do with this process."""


class FileRange(io.RawIOBase):
    """A range of a file, as a file that is read into the place where its bytes are wanted."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        """Raises OSError."""
        self._file = path.open("rb", buffering=0)
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        """All that fits, unless the file is shorter."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        filled = 0
        while filled < len(view):
            got = os.preadv(self._file.fileno(), [view[filled:]], self._start + self._at)
            if not got:
                break
            filled += got
            self._at += got
        return filled

    def close(self) -> None:
        self._file.close()
        super().close()


class Flushed:
    """A file that is brought to the disk while it is written, so that no flush takes minutes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._unflushed_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data)
        self._unflushed_bytes += len(data)
        if self._unflushed_bytes >= FLUSH_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._unflushed_bytes = 0
        return len(data)


class Copied:
    """A file that is given bytes of its own: obstore sends them from where they are, at a time when a tensor's memory
    may hold another one."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(bytes(data))
        return len(data)


def cause_of(error: Exception) -> Exception:
    """torch's own complaint about a file that could not be written hides why it could not.

    Raises what is no trouble of the storage: what Stoker has said already, an interrupt, a defect.
    """
    cause = error.__context__ if isinstance(error, RuntimeError) and error.__context__ is not None else error
    if isinstance(cause, (StokerError, *DEFECTS)) or not isinstance(cause, Exception):
        raise cause
    return cause


def sizes_in(folder: Path) -> dict[str, int]:
    try:
        return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
    except FileNotFoundError:
        return {}  # it was removed just now
