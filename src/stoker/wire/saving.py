"""Messages between an agent and its node's saver, which writes snapshots to a storage: lines of JSON."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from stoker.errors import WireError

T = TypeVar("T")
STORAGE_FILE = "storage.json"
"""In the folder of a node's snapshots: where they are to be written to, by the worker that takes them."""


class StorageWanted(msgspec.Struct, frozen=True):
    """Where a run's checkpoints are to last."""

    url: str
    """It may hold secrets, as the query of s3://… does: the folder is its user's alone."""
    keep: int = 2
    every_s: float = 0.0
    """Seconds between the beginnings of two, at least; 0: every snapshot, as far as the storage keeps up."""


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """To the saver. One line holds one of them."""

    watch: str = ""
    """Folder of the snapshots: begin to write those that appear there to `url`."""
    run_id: str = ""
    url: str = ""
    keep: int = 2
    every_s: float = 0.0
    hangs_after_s: float = 60.0
    """A storage that does nothing for so long is told of, and again after twice as long each time."""
    save: dict[str, str] | None = None
    """Write the newest snapshot now, unless it is written."""
    finish: bool = False
    """The same, and end."""
    beside_others: bool = False
    """Other nodes may be writing as well: write nothing unless told to, nor what is there, and remove nothing."""


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """From the saver."""

    saved: int | None = None
    """Commits of a checkpoint that is whole now."""
    took_s: float = 0.0
    size_bytes: int = 0
    failed: str = ""
    """Why one is not written. It is tried again."""
    commits: int | None = None
    """Of the one that failed, or is being written."""
    done_bytes: int = 0
    """Of the one that is being written, so far; of about `size_bytes`."""
    ready: bool = False
    """It has begun to watch."""


def encode_line(message: Command | Result) -> bytes:
    """A line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """Raises WireError."""
    return _decode(line, Command)


def decode_result(line: bytes) -> Result:
    """Raises WireError."""
    return _decode(line, Result)


def _decode(line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not a message of the saver: {error}") from None
