"""Where files lie that are written through a mount, until the origin has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

_NAME_BYTES_MAX = 255


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

    def keep(self, stage: int, path: str) -> Path | None:
        """It stays, under a name that says as what it was written; where it lies. None: there is none."""
        plain = self.path(stage)
        kept = plain.with_name(_kept_name(plain.name, path))
        try:
            plain.rename(kept)
        except FileNotFoundError:
            return None
        except OSError:  # such as of a file system with shorter names
            return plain
        return kept

    def write(self, stage: int, offset: int, data: bytes) -> None:
        """Bytes from there on."""
        with self._opened(self.path(stage), os.O_WRONLY) as file:
            left = memoryview(data)
            while left:
                written = os.pwrite(file.fileno(), left, offset)
                left, offset = left[written:], offset + written

    def resize(self, stage: int, size_bytes: int) -> None:
        """Have it so long; one that is not there is made."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened(self.path(stage), os.O_WRONLY | os.O_CREAT) as file:
            os.ftruncate(file.fileno(), size_bytes)

    def read(self, stage: int, start: int, stop: int) -> bytes:
        """These bytes, fewer at its end."""
        with self.open(stage) as file:
            return os.pread(file.fileno(), stop - start, start)

    def open(self, stage: int) -> BinaryIO:
        """To be read from its beginning."""
        try:
            return self._opened(self.path(stage), os.O_RDONLY)
        except FileNotFoundError:
            # Who began to read it before it was kept reads on.
            kept = [name for name in self.left() if name.startswith(f"{stage:x}-")]
            if not kept:
                raise
            return self._opened(self.folder / kept[0], os.O_RDONLY)

    def drop(self, stage: int) -> None:
        """It is needed no more."""
        self.path(stage).unlink(missing_ok=True)

    def _opened(self, path: Path, flags: int) -> BinaryIO:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        return os.fdopen(fd, "rb" if flags == os.O_RDONLY else "wb", buffering=0)


def _kept_name(number: str, path: str) -> str:
    """`NUMBER-PATH` as one name, which people can read: slashes and what no terminal shows as in an URL. Of a long path
    its end."""
    said = "".join(one if one.isprintable() and one not in "/%" else quote(one, safe="") for one in path)
    room = _NAME_BYTES_MAX - len(number) - 1
    if len(said.encode()) > room:
        said = "…" + said.encode()[len("…".encode()) - room :].decode(errors="ignore")
    return f"{number}-{said}"
