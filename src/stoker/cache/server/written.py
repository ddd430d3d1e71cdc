"""Small files in the cache's folder in which a server writes down what operators told it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.base.flushing import flush_folder

T = TypeVar("T")


def read_file(path: Path, kind: type[T], notes: list[str], without_it: str) -> T | None:
    """What was written down; None where nothing was. What cannot be read is put aside before it is written anew: it
    may be of a later version, or the disk may read it tomorrow. `without_it`: what operators are told then."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        kept = _free_name(path)
        with suppress(OSError):
            os.replace(path, kept)
        is_kept = f"; the file is kept as {kept.name}" if not path.exists() else ""
        notes.append(f"{path.name} cannot be read ({error}): {without_it}{is_kept}")
        return None


def write_file(path: Path, value: Any) -> None:
    """Write it down, so that after a power cut it is what it was or what it is now. Raises OSError."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    # Not for everybody's eyes: an origin's URL may have keys in it.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_folder(path.parent)


def _free_name(path: Path) -> Path:
    """Beside it, and no file that was put aside before."""
    number = 0
    while (kept := path.with_name(f"{path.name}.damaged{number or ''}")).exists():
        number += 1
    return kept
