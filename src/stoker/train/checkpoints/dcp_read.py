"""Wholes and slices of tensors out of a checkpoint's files. Nothing is unpickled but tensors, by torch's own restricted
reader, and each is compared with its checksum."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple, cast

import torch

from stoker.errors import CheckpointDamaged
from stoker.train.checkpoints.hashing import hash_of
from stoker.train.checkpoints.manifest import Chunk
from stoker.train.checkpoints.places import Place

UNREADABLE = (
    *(OSError, RuntimeError, LookupError, EOFError, ValueError, TypeError, AttributeError),
    *(UnpicklingError, zipfile.BadZipFile),
)
"""What torch.load raises for other bytes than it wrote."""
READ_BYTES = 64 * 1024 * 1024
"""Neighbours in a file are read together up to this."""


class Slice(NamedTuple):
    """A part of a tensor that is wanted: so much of it, from there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Read(NamedTuple):
    """One range of a file, and the chunks in it."""

    file: str
    start: int
    stop: int
    chunks: list[Chunk]


def read_slices(
    place: Place, directory: str, chunks: Sequence[Chunk], wanted: dict[str, Slice]
) -> dict[str, torch.Tensor]:
    """The wanted slice of each tensor, put together from the chunks that have some of it.

    Raises CheckpointDamaged, EnvironmentProblem.
    """
    found: dict[str, torch.Tensor] = {}
    missing = {name: prod(one.sizes) for name, one in wanted.items()}
    stored = dict.fromkeys(wanted, 0)
    for chunk in chunks:
        if chunk.name in wanted:
            stored[chunk.name] += prod(chunk.sizes)
    for name, elements in stored.items():
        if elements < missing[name]:  # before so much memory is taken
            raise _incomplete(name, directory)
    for chunk in chunks:
        if chunk.name in wanted and chunk.name not in found:
            found[chunk.name] = torch.empty(wanted[chunk.name].sizes, dtype=dtype_of(chunk))
    if unknown := wanted.keys() - found.keys():
        raise CheckpointDamaged(f"{directory} holds no tensor {min(unknown)!r}")
    needed = [c for c in chunks if c.name in wanted and _overlap(c, wanted[c.name]) is not None]
    for chunk, tensor in _tensors(place, directory, needed):
        overlap = _overlap(chunk, wanted[chunk.name])
        assert overlap is not None
        if overlap == wanted[chunk.name] == (chunk.offsets, chunk.sizes):
            found[chunk.name] = tensor
            missing[chunk.name] = 0
            continue
        target = _narrowed(found[chunk.name], wanted[chunk.name].offsets, overlap)
        target.copy_(_narrowed(tensor, chunk.offsets, overlap))
        missing[chunk.name] -= prod(overlap.sizes)
    for name, elements in missing.items():
        if elements:
            raise _incomplete(name, directory)
    return found


def _incomplete(name: str, directory: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"the pieces of {name} in {directory} do not make up what is asked for")


def dtype_of(chunk: Chunk) -> torch.dtype:
    """Raises CheckpointDamaged."""
    dtype = getattr(torch, chunk.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointDamaged(f"{chunk.name} is of an unknown type of tensor, {chunk.dtype!r}")
    return dtype


def _tensors(place: Place, directory: str, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Of these chunks, in the order in which they lie."""
    if place.reads_at_once > 1:
        for read, raw in _read_ahead(place, directory, list(_reads(chunks))):
            for chunk in read.chunks:
                part = raw[chunk.start - read.start :][: chunk.length]
                yield chunk, _load(_View(part), chunk, directory)
        return
    for chunk in sorted(chunks, key=lambda c: (c.file, c.start)):
        try:
            file = place.range_of(directory, chunk.file, chunk.start, chunk.length)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{directory}/{chunk.file} is missing") from None
        assert file is not None
        with file:
            yield chunk, _load(file, chunk, directory)


def _read_ahead(place: Place, directory: str, reads: Sequence[_Read]) -> Iterator[tuple[_Read, memoryview]]:
    """The ranges' bytes, in order; each is good until the next is asked for. So many are under way as the place can do
    at once."""
    largest = max((read.stop - read.start for read in reads), default=0)
    buffers = [bytearray(largest) for _ in reads[: place.reads_at_once]]

    def fetch(number: int) -> memoryview:
        read = reads[number]
        view = memoryview(buffers[number % len(buffers)])[: read.stop - read.start]
        try:
            got = place.read_into(directory, read.file, read.start, view)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{directory}/{read.file} is missing") from None
        if got != len(view):
            raise CheckpointDamaged(f"{directory}/{read.file} is shorter than it was")
        return view

    if not buffers:
        return
    with ThreadPoolExecutor(len(buffers), "stoker-read") as pool:
        ahead = [pool.submit(fetch, number) for number in range(len(buffers))]
        for number, read in enumerate(reads):
            yield read, ahead[number].result()
            if number + len(buffers) < len(reads):
                ahead.append(pool.submit(fetch, number + len(buffers)))


def _load(file: io.RawIOBase, chunk: Chunk, directory: str) -> torch.Tensor:
    where = f"{chunk.name} in {directory}/{chunk.file}"
    try:
        tensor = torch.load(cast(IO[bytes], file), map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        why = str(error).partition("\n")[0]  # torch goes on with how to read it unsafely
        raise CheckpointDamaged(f"{where} cannot be read: {why}") from error
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.sizes:
        raise CheckpointDamaged(f"{where} is not the tensor that was written")
    if tensor.dtype != dtype_of(chunk) or hash_of(tensor) != chunk.xxh128:
        raise CheckpointDamaged(f"{where} does not match its checksum")
    return tensor


class _View(io.RawIOBase):
    """Bytes as a file, without a copy of them."""

    def __init__(self, raw: memoryview) -> None:
        self._raw = raw
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._raw)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._raw[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _reads(chunks: Iterable[Chunk]) -> Iterator[_Read]:
    """Neighbours together, in the order in which they lie."""
    run: _Read | None = None
    for chunk in sorted(chunks, key=lambda c: (c.file, c.start)):
        stop = chunk.start + chunk.length
        follows = run is not None and (run.file, run.stop) == (chunk.file, chunk.start)
        if run is not None and follows and stop - run.start <= READ_BYTES:
            run = _Read(run.file, run.start, stop, [*run.chunks, chunk])
            continue
        if run is not None:
            yield run
        run = _Read(chunk.file, chunk.start, stop, [chunk])
    if run is not None:
        yield run


def _overlap(chunk: Chunk, wanted: Slice) -> Slice | None:
    """What of a chunk is wanted, in the whole tensor."""
    starts, sizes = [], []
    for begin, size, wanted_begin, wanted_size in zip(
        chunk.offsets, chunk.sizes, wanted.offsets, wanted.sizes, strict=True
    ):
        start = max(begin, wanted_begin)
        stop = min(begin + size, wanted_begin + wanted_size)
        if stop <= start:
            return None
        starts.append(start)
        sizes.append(stop - start)
    return Slice(tuple(starts), tuple(sizes))


def _narrowed(tensor: torch.Tensor, begins: tuple[int, ...], part: Slice) -> torch.Tensor:
    """The part of a tensor that itself begins at `begins`."""
    for dim, (begin, start, size) in enumerate(zip(begins, part.offsets, part.sizes, strict=True)):
        tensor = tensor.narrow(dim, start - begin, size)
    return tensor
