"""The store port."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from stoker.cache.layout import BlockId


class StoredBlock(NamedTuple):
    """A block as the durable index knows it."""

    block: BlockId
    size_bytes: int
    crc: int


class StoredPointer(NamedTuple):
    """A pointer as the durable index knows it; `checked_wall_s` is when the origin last confirmed it."""

    bucket: str
    key: str
    version: str
    size_bytes: int
    checked_wall_s: float


class Loaded(NamedTuple):
    """What a store held when it was opened; oldest block first.

    `origins` are the buckets' origins at that time; `notes` is what an operator should know.
    """

    blocks: Iterable[StoredBlock]
    pointers: Iterable[StoredPointer]
    origins: dict[str, str]
    notes: list[str]


class Folder(NamedTuple):
    """Where the files of a store are, and the identity of that folder."""

    path: bytes
    device: int
    inode: int


class OpenFile:
    """A descriptor that closes with its last user, so that nobody is served from a reused number."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Store(Protocol):
    """Keeps the bytes of blocks, and a durable index of blocks and pointers. It decides nothing."""

    def load(self) -> Loaded:
        """What is here from before. Called once, before all else."""
        ...

    def charge_bytes(self, size_bytes: int) -> int:
        """What a block of this size takes of the limit."""
        ...

    def write(self, block: BlockId, data: bytes, crc: int) -> None:
        """Publish a block atomically. May be called from any thread. Raises EnvironmentProblem."""
        ...

    def read(self, block: BlockId, start: int, stop: int) -> bytes:
        """Bytes of a block that was written. Raises CorruptBlock if they are not all there."""
        ...

    def open(self, block: BlockId) -> OpenFile | None:
        """A descriptor to send the block from; None where there are no files. Raises CorruptBlock."""
        ...

    def folder(self) -> Folder | None:
        """The folder that `path_of` starts from; None where there are no files."""
        ...

    def path_of(self, block: BlockId) -> bytes:
        """Where the file of a block is, in `folder`. Whether it is there is not looked up."""
        ...

    def delete(self, block: BlockId) -> None:
        """Forget a block and its bytes. Never raises."""
        ...

    def save_pointer(self, pointer: StoredPointer) -> None:
        """Make a pointer durable, soon."""
        ...

    def drop_pointer(self, bucket: str, key: str) -> None:
        """Forget a pointer, soon."""
        ...

    def save_origin(self, bucket: str, url: str) -> None:
        """Remember where a bucket's objects come from, soon."""
        ...

    def problem(self) -> str | None:
        """Why the index cannot be made durable at the moment; None if it can."""
        ...

    def close(self) -> None:
        """Make everything durable and let go."""
        ...
