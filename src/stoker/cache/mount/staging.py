"""Where files lie that are written through a mount, until the origin has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


class Staging:
    """Files of a folder, by number. They outlive the daemon. Everything may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, stage: int) -> Path:
        """Where one lies."""
        return self.folder / f"{stage:x}"

    def left(self) -> list[str]:
        """The names of those that are there."""
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            return []

    def write(self, stage: int, offset: int, data: bytes) -> None:
        """Bytes from there on."""
        with self._opened(stage, os.O_WRONLY) as file:
            left = memoryview(data)
            while left:
                written = os.pwrite(file.fileno(), left, offset)
                left, offset = left[written:], offset + written

    def resize(self, stage: int, size_bytes: int) -> None:
        """Have it so long; one that is not there is made."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened(stage, os.O_WRONLY | os.O_CREAT) as file:
            os.ftruncate(file.fileno(), size_bytes)

    def read(self, stage: int, start: int, stop: int) -> bytes:
        """These bytes, fewer at its end."""
        with self._opened(stage, os.O_RDONLY) as file:
            return os.pread(file.fileno(), stop - start, start)

    def open(self, stage: int) -> BinaryIO:
        """To be read from its beginning."""
        return self._opened(stage, os.O_RDONLY)

    def drop(self, stage: int) -> None:
        """It is needed no more."""
        self.path(stage).unlink(missing_ok=True)

    def _opened(self, stage: int, flags: int) -> BinaryIO:
        fd = os.open(self.path(stage), flags | os.O_CLOEXEC, 0o600)
        return os.fdopen(fd, "rb" if flags == os.O_RDONLY else "wb", buffering=0)
