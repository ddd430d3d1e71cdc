"""What a checkpoint's directory says about itself: `pieces.json` of its tensors, and `manifest.json`, which makes it
whole."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from stoker.errors import CheckpointDamaged

FORMAT = 1
MANIFEST = "manifest.json"
"""Written last: a directory without it is torn."""
PIECES = "pieces.json"
REMOVAL = "removal.json"
"""In a directory without manifest, which is being removed: its writer must not publish it."""
METADATA = ".metadata"
"""For torch.distributed.checkpoint, which pickles it. Nothing here reads it."""
PLAIN = "stoker.plain"
"""The name of what is no tensor: msgpack, kept as a tensor of bytes."""

Size = Annotated[int, msgspec.Meta(ge=0)]
_STEP = re.compile(r"^step-(\d{12})(-[A-Za-z0-9_-]{1,64})?$")
_FILE = re.compile(r"^(__\d+_\d+\.distcp|\.metadata|pieces\.json)$")
T = TypeVar("T", bound=msgspec.Struct)


class File(msgspec.Struct, frozen=True):
    """One of the directory's files."""

    name: str
    size_bytes: Size
    xxh128: str


class Chunk(msgspec.Struct, frozen=True):
    """A tensor, or a piece of one, and where it lies."""

    name: str
    dtype: str
    """As torch names it: `bfloat16`."""
    shape: tuple[Size, ...]
    """Of the whole tensor."""
    offsets: tuple[Size, ...]
    """Where in the whole it begins."""
    sizes: tuple[Size, ...]
    xxh128: str
    """Of its elements, in the order of rows."""
    file: str
    start: Size
    length: Size
    """Of what torch.save made of it, in bytes."""


class Written(NamedTuple):
    """What a writer has put into a directory."""

    files: list[File]
    chunks: list[Chunk]


class Part(msgspec.Struct, frozen=True):
    """What one rank has written."""

    attempt: str
    rank: Size
    files: list[File]
    chunks: list[Chunk]


class Pieces(msgspec.Struct, frozen=True):
    """All tensors of a checkpoint."""

    chunks: list[Chunk]


class Manifest(msgspec.Struct, frozen=True):
    """A whole checkpoint."""

    format: int
    commits: Size
    world_size: Size
    """Ranks that have written a part of it."""
    written_at: float
    """Seconds since 1970."""
    stoker: str
    torch: str
    files: list[File]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def step_name(commits: int) -> str:
    """The name of a checkpoint's directory. A second one of that commit has its writer's attempt behind it."""
    return f"step-{commits:012d}"


def commits_of(name: str) -> int | None:
    """The commits of a directory of that name; None: it is none of a checkpoint."""
    found = _STEP.match(name)
    return int(found[1]) if found else None


def encode(value: msgspec.Struct) -> bytes:
    """JSON, for people to read as well."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def decode(raw: bytes, kind: type[T], where: str) -> T:
    """Read one of the structs above. Raises CheckpointDamaged."""
    try:
        found = msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(f"{where} cannot be read: {error}") from None
    if isinstance(found, Manifest):
        _check(found, where)
    return found


def _check(manifest: Manifest, where: str) -> None:
    """Of what others may have put there, no name is to lead out of the directory."""
    if manifest.format != FORMAT:
        raise CheckpointDamaged(f"{where} is of format {manifest.format}, this Stoker reads format {FORMAT}")
    for file in manifest.files:
        if not _FILE.match(file.name):
            raise CheckpointDamaged(f"{where} names {file.name!r}, which is no file of a checkpoint")
    missing = {METADATA, PIECES} - {file.name for file in manifest.files}
    if missing:
        raise CheckpointDamaged(f"{where} does not name {', '.join(sorted(missing))}")
