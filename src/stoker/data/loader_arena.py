"""Memory that a loader process shares with the training process, so that a batch crosses without being copied.

Each loader process has one file of its own, without a name (memfd: it takes no room in /dev/shm, and nothing is left
behind). It begins with a page of marks: the number of the pass that is wanted, and for each slot whether the training
process uses it. A slot holds one tensor. The loader process alone makes slots and takes free ones; the training process
alone frees them, when the last tensor that lies there is gone. So there is nothing to lock, and memory is used again
while it is warm: fresh pages for each batch cost more than reading it.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing import reduction
from typing import Any, NamedTuple

import numpy as np

from stoker._native import Lent

_PASS_BYTES = 8
HEAD_BYTES = mmap.PAGESIZE
SLOTS_MAX = HEAD_BYTES - _PASS_BYTES
_SPARE = 8
"""A slot is made larger by an eighth than what it is made for: batches vary."""


class Place(NamedTuple):
    """A slot, and how much of the file it is."""

    slot: int
    offset: int
    capacity_bytes: int


class ArenaFile:
    """The shared file; as it is pickled for a process that is started, it is passed on."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("stoker-loader", os.MFD_CLOEXEC)
            os.ftruncate(fd, HEAD_BYTES)
        self.fd = fd
        self.head = mmap.mmap(fd, HEAD_BYTES)

    @property
    def wanted_pass(self) -> int:
        """The number of the loader's present pass."""
        return int.from_bytes(self.head[:_PASS_BYTES], "little")

    @wanted_pass.setter
    def wanted_pass(self, number: int) -> None:
        self.head[:_PASS_BYTES] = number.to_bytes(_PASS_BYTES, "little")

    def is_used(self, slot: int) -> bool:
        """Whether a tensor that was handed over lies there."""
        return self.head[_PASS_BYTES + slot] != 0

    def mark(self, slot: int, *, used: bool) -> None:
        """Say so."""
        self.head[_PASS_BYTES + slot] = used

    def lent(self, memory: mmap.mmap, size_bytes: int, slot: int) -> memoryview:
        """The slot's first bytes, which nobody uses once all that see them are gone; not by a forked copy that goes."""
        return memoryview(Lent(memory, size_bytes, self.head, _PASS_BYTES + slot))

    def mapped(self, place: Place) -> mmap.mmap:
        """The slot's memory."""
        return mmap.mmap(self.fd, place.capacity_bytes, offset=place.offset)

    def close(self) -> None:
        """Close the file; what is mapped stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fd),)


def _received(passed: Any) -> ArenaFile:
    return ArenaFile(passed.detach())


class ArenaWriter:
    """The loader process's side."""

    def __init__(self, file: ArenaFile) -> None:
        self._file = file
        self._slots: list[tuple[Place, mmap.mmap]] = []
        self._end = HEAD_BYTES

    def take(self, size_bytes: int, *, but: set[int]) -> tuple[Place, mmap.mmap] | None:
        """A free slot of at least this size, none of `but`; None where there is no memory, or too many are in use."""
        best = unfit = None
        for index, (place, memory) in enumerate(self._slots):
            if index in but or self._file.is_used(index):
                continue
            if place.capacity_bytes < size_bytes:
                unfit = index
            elif best is None or place.capacity_bytes < best[0].capacity_bytes:
                best = place, memory
        if best is not None:
            return best
        if unfit is None and len(self._slots) >= SLOTS_MAX:
            return None
        return self._made(size_bytes, len(self._slots) if unfit is None else unfit)

    def _made(self, size_bytes: int, index: int) -> tuple[Place, mmap.mmap] | None:
        """A new slot at the file's end. The memory is taken now: without it, writing there would be a SIGBUS."""
        wanted = size_bytes + size_bytes // _SPARE
        capacity = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        place = Place(index, self._end, capacity)
        try:
            os.posix_fallocate(self._file.fd, place.offset, capacity)
            made = place, self._file.mapped(place)
        except OSError:
            return None
        self._end += capacity
        if index < len(self._slots):
            self._slots[index][1].madvise(mmap.MADV_REMOVE)
            self._slots[index] = made
        else:
            self._slots.append(made)
        return made


class ArenaReader:
    """The training process's side."""

    def __init__(self, file: ArenaFile) -> None:
        self._file = file
        self._mapped: dict[int, tuple[Place, mmap.mmap]] = {}

    def bytes_of(self, place: Place, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The slot's first bytes; it is free again once they, and all that shares their memory, are gone."""
        known = self._mapped.get(place.slot)
        if known is None or known[0] != place:
            known = self._mapped[place.slot] = place, self._file.mapped(place)
        return np.frombuffer(self._file.lent(known[1], size_bytes, place.slot), dtype=np.uint8)
