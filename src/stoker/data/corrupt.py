"""How many corrupt records were passed over, by all processes of one dataset together."""

from __future__ import annotations

import os
import secrets
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REASONS_MAX = 20


@dataclass(frozen=True)
class Corrupt:
    """What was passed over so far: how often, and why, the first few times."""

    count: int
    reasons: list[str]


class Tally:
    """Counts in this process, and in loader processes that have a copy of it.

    The file is made when there is something to count; a line is a reason.
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir()) / f"stoker-corrupt-{secrets.token_hex(16)}"
        self._told = 0
        weakref.finalize(self, _remove, self._path, os.getpid())

    def add(self, reason: str) -> None:
        """One more."""
        line = reason.replace("\n", " ")[:1000] if self._told < REASONS_MAX else ""
        self._told += 1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            os.write(descriptor, line.encode("utf-8", "replace") + b"\n")
        finally:
            os.close(descriptor)

    def read(self) -> Corrupt:
        """All that was counted."""
        try:
            lines = self._path.read_text("utf-8").split("\n")[:-1]
        except FileNotFoundError:
            return Corrupt(0, [])
        return Corrupt(len(lines), [line for line in lines if line][:REASONS_MAX])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # the file is removed by who made the tally


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
