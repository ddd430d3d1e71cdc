"""The short circuit: read what the server holds from descriptors that it passes, after it has said yes.

What a process has descriptors of is its own, whatever connection they came by. Each request says it: nothing has to be
remembered for a connection, and a forked child goes on with what it inherited.
"""

from __future__ import annotations

import functools
import os
import resource
import struct
from collections.abc import Callable, Iterable
from collections.abc import Mapping as MappingOf
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from stoker._native import Mapping
from stoker.errors import WireError
from stoker.wire.cache_batch import DESCRIPTOR, INSTANCE_BYTES, DescriptorsWanted

PLACES_FROM_BYTES = 2 * 1024
"""From here on reading here is cheaper than bytes over a Unix socket."""
COUNT_MAX = 128
"""What a process keeps, and what it takes with one answer."""

_LIMIT_SHARE = 8
_WEEDED_AT_ONCE = 4
_KEPT_BYTES = 16 * 1024 * 1024
_MAPPED_BYTES_MIN = 1024 * 1024


class Descriptor:
    """One that the server has passed; closed with the last who refers to it. Views live on without it."""

    __slots__ = ("_mapped", "fd", "identity")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.identity: tuple[int, int] | None = None
        self._mapped = memoryview(b"")
        with suppress(OSError):
            found = os.fstat(fd)
            self.identity = found.st_dev, found.st_ino

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)  # when a process ends, `os` may be gone by now

    @property
    def is_given_up(self) -> bool:
        """Whether the server has given up the file: its room is free once all descriptors of it are closed."""
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError:
            return True

    def view(self, offset: int, size_bytes: int) -> memoryview | None:
        """So many bytes, as they lie in the file; None if it cannot be mapped, or ends before.

        A file may grow, and is mapped for longer than it is: what is behind its end is never looked at.
        """
        stop = offset + size_bytes
        mapped = self._mapped
        if stop > len(mapped):
            mapped = self._map(mapped)
            if stop > len(mapped):
                return None
        return mapped[offset:stop]

    def _map(self, mapped: memoryview) -> memoryview:
        """What there is of the file by now. Threads that do so at once each get what is right."""
        try:
            size_bytes = os.fstat(self.fd).st_size
            whole = memoryview(mapped.obj)
            if size_bytes > len(whole):
                length = max(_MAPPED_BYTES_MIN, 1 << (size_bytes - 1).bit_length())
                whole = memoryview(Mapping(self.fd, length))
        except OSError:
            return mapped
        self._mapped = whole[:size_bytes]
        return self._mapped


class Held(NamedTuple):
    """What this process has descriptors of: containers of one run of the server, those first that came first."""

    instance: bytes
    files: MappingOf[int, Descriptor]
    wanted: DescriptorsWanted | None
    """As requests say it; None if none are wanted any more."""


class Descriptors:
    """What a client has been passed. Any thread that learns something replaces it as a whole: what is lost when two do
    so at once is passed again. A pickled copy has none."""

    def __init__(self, from_bytes: int = PLACES_FROM_BYTES, count_max: int | None = None) -> None:
        if count_max is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            count_max = COUNT_MAX if soft == resource.RLIM_INFINITY else min(COUNT_MAX, soft // _LIMIT_SHARE)
        self._from_bytes = from_bytes
        self._count_max = count_max
        self._weeded = 0
        self._held = self._made(b"", {})

    def held(self) -> Held:
        """What to say in a request. What the server has given up is let go of, a few at a time."""
        held = self._held
        if held.files:
            first = self._weeded % len(held.files)
            some = list(islice(held.files, first, first + _WEEDED_AT_ONCE))
            gone = {number for number in some if held.files[number].is_given_up}
            self._weeded = first + len(some) - len(gone)
            if gone:
                files = {number: file for number, file in held.files.items() if number not in gone}
                self._held = held = self._made(held.instance, files)
        return held

    def add(self, instance: bytes, files: MappingOf[int, Descriptor]) -> None:
        """The server has passed these. Of another run of it nothing is kept, and of this one no more than allowed."""
        _keep_freed_memory()
        held = self._held
        merged = {**held.files, **files} if held.instance == instance else dict(files)
        for number in list(merged)[: max(0, len(merged) - self._count_max)]:
            del merged[number]
        self._held = self._made(instance, merged)

    def lacked(self) -> None:
        """Some did not come: this process has too many open, or something on the way does not pass them on."""
        self._count_max //= 2
        self._held = self._made(b"", {})

    def clear(self) -> None:
        """Let go of all."""
        self._held = self._made(b"", {})

    def __reduce__(self) -> tuple[type[Descriptors], tuple[int, int]]:
        return Descriptors, (self._from_bytes, self._count_max)

    def _made(self, instance: bytes, files: MappingOf[int, Descriptor]) -> Held:
        wanted = None
        if self._count_max:
            said = instance + struct.pack(f"!{len(files)}I", *sorted(files))
            wanted = DescriptorsWanted(self._from_bytes, self._count_max, said)
        return Held(instance, files, wanted)


class Places:
    """Reads what one answer names. `held` is what its request said; `arrived`: what has come so far."""

    def __init__(self, known: Descriptors, held: Held, arrived: Iterable[Descriptor]) -> None:
        self._known = known
        self._arrived = arrived
        self._instance = held.instance
        self._files = held.files

    def take(self, frame: bytes) -> None:
        """A DESCRIPTORS frame has come. Raises WireError."""
        instance, entries = frame[:INSTANCE_BYTES], frame[INSTANCE_BYTES:]
        if len(instance) < INSTANCE_BYTES or len(entries) % DESCRIPTOR.size:
            raise WireError("the server's list of descriptors is not understood")
        by_identity = {file.identity: file for file in self._arrived}
        came: dict[int, Descriptor] = {}
        for number, device, inode in DESCRIPTOR.iter_unpack(entries):
            file = by_identity.get((device, inode))
            if file is not None:
                came[number] = file
        self._files = {**(self._files if instance == self._instance else {}), **came}
        self._instance = instance
        if len(came) * DESCRIPTOR.size < len(entries):
            self._known.lacked()
        else:
            self._known.add(instance, came)

    def read(
        self, container: int, offset: int, size_bytes: int, *, views: bool = False
    ) -> bytes | memoryview | None:
        """So many bytes, or a view of them; None if there is no descriptor, or it cannot be read, or ends before."""
        file = self._files.get(container)
        if file is None:
            return None
        if views and (view := file.view(offset, size_bytes)) is not None:
            return view
        try:
            data = os.pread(file.fd, size_bytes, offset)
        except OSError:
            return None
        if len(data) != size_bytes:
            return None
        return memoryview(data) if views else data


@functools.cache
def _keep_freed_memory() -> None:
    """Let the allocator keep what a batch frees for the next one.

    By default glibc returns it at once, and each batch pays page faults that cost several times the reading. It
    raises its limits (M_MMAP_THRESHOLD, and twice that for M_TRIM_THRESHOLD) to the largest block it saw freed.
    """
    bytearray(_KEPT_BYTES)
