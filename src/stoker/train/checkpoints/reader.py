"""One whole checkpoint, to be read or checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from math import prod

import msgspec
import torch
import xxhash

from stoker.errors import CheckpointDamaged
from stoker.train.checkpoints.dcp_read import Slice, dtype_of, read_slices
from stoker.train.checkpoints.image import Image, Piece
from stoker.train.checkpoints.manifest import (
    MANIFEST,
    METADATA,
    PIECES,
    PLAIN,
    Chunk,
    File,
    Manifest,
    Pieces,
    commits_of,
    decode,
)
from stoker.train.checkpoints.places import Place

CHECK_BYTES = 32 * 1024 * 1024
"""Read at a time for a checksum."""


def read_manifest(place: Place, directory: str, sizes: Mapping[str, int]) -> Manifest:
    """Of a checkpoint whose files are there; `sizes` as listed.

    Raises CheckpointDamaged where one is missing or of another size, FileNotFoundError where the manifest is gone by
    now, EnvironmentProblem.
    """
    manifest = decode(place.read(directory, MANIFEST), Manifest, f"{directory}/{MANIFEST}")
    if manifest.commits != commits_of(directory):
        raise CheckpointDamaged(f"{directory} says that it is of commit {manifest.commits}")
    for file in manifest.files:
        size_bytes = sizes.get(file.name)
        if size_bytes is None:
            raise CheckpointDamaged(f"{directory}/{file.name} is missing")
        if size_bytes != file.size_bytes:
            raise CheckpointDamaged(
                f"{directory}/{file.name} has {size_bytes} bytes, not the {file.size_bytes} that were written"
            )
    return manifest


class CheckpointReader:
    """Made by `CheckpointStorage`. All of it raises CheckpointDamaged, EnvironmentProblem."""

    def __init__(self, place: Place, directory: str, sizes: Mapping[str, int]) -> None:
        """Reads what is small and says what there is; `sizes` of the directory's files, as listed.

        Raises CheckpointDamaged also where one is missing or of another size, FileNotFoundError where the manifest is
        gone by now.
        """
        self._place = place
        self._directory = directory
        self.manifest = read_manifest(place, directory, sizes)
        small = {file.name: file for file in self.manifest.files if file.name in (METADATA, PIECES)}
        self._checked(small[METADATA])
        self._chunks = decode(self._checked(small[PIECES]), Pieces, f"{directory}/{PIECES}").chunks
        file_bytes = {file.name: file.size_bytes for file in self.manifest.files}
        for chunk in self._chunks:
            self._check_chunk(chunk, file_bytes)

    @property
    def commits(self) -> int:
        return self.manifest.commits

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, by their names."""
        return {chunk.name: chunk.shape for chunk in self._chunks if chunk.name != PLAIN}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of all tensors, by their names."""
        return {chunk.name: dtype_of(chunk) for chunk in self._chunks if chunk.name != PLAIN}

    def read(self) -> Image:
        """All of it, of whole tensors, whatever number of ranks has written it."""
        plain, names = self.read_plain()
        wholes = self.read_tensors(names)
        pieces = [Piece(n, self.shapes[n], (0,) * len(self.shapes[n]), wholes[n]) for n in names]
        return Image(self.commits, plain, pieces)

    def read_plain(self) -> tuple[object, list[str]]:
        """An image's plain part, and the names of its pieces in their order."""
        (shape,) = {chunk.shape for chunk in self._chunks if chunk.name == PLAIN} or {(0,)}
        held = self._slices({PLAIN: Slice((0,), shape)})[PLAIN]
        try:
            plain, names = msgspec.msgpack.decode(held.numpy().tobytes())
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            raise CheckpointDamaged(f"the plain part of {self._directory} cannot be read: {error}") from None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointDamaged(f"the plain part of {self._directory} names no tensors")
        if unknown := set(names) - self.shapes.keys():
            raise CheckpointDamaged(f"{self._directory} holds no tensor {min(unknown)!r}")
        return plain, names

    def read_tensors(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Whole tensors."""
        if unknown := set(names) - self.shapes.keys():
            raise CheckpointDamaged(f"{self._directory} holds no tensor {min(unknown)!r}")
        return self._slices({n: Slice((0,) * len(self.shapes[n]), self.shapes[n]) for n in names})

    def read_slices(self, wanted: dict[str, Slice]) -> dict[str, torch.Tensor]:
        """A part of each tensor, such as a rank's own in a world of any size. Only what holds some of it is read."""
        return self._slices(wanted)

    def verify(self, on_bytes: Callable[[int], None] = lambda size_bytes: None) -> list[str]:
        """Compare every file with its checksum; what is wrong, empty: nothing. `on_bytes` is told what was read."""
        problems = []
        for file in self.manifest.files:
            hashed = xxhash.xxh3_128()
            try:
                for start in range(0, file.size_bytes, CHECK_BYTES):
                    stop = min(start + CHECK_BYTES, file.size_bytes)
                    hashed.update(self._place.read(self._directory, file.name, start, stop))
                    on_bytes(stop - start)
            except (FileNotFoundError, CheckpointDamaged) as error:
                problems.append(f"{self._directory}/{file.name}: {error}")
                continue
            if hashed.hexdigest() != file.xxh128:
                problems.append(f"{self._directory}/{file.name} does not match its checksum")
        return problems

    def _slices(self, wanted: dict[str, Slice]) -> dict[str, torch.Tensor]:
        return read_slices(self._place, self._directory, self._chunks, wanted)

    def _checked(self, file: File) -> bytes:
        try:
            raw = self._place.read(self._directory, file.name)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self._directory}/{file.name} is missing") from None
        if xxhash.xxh3_128(raw).hexdigest() != file.xxh128:
            raise CheckpointDamaged(f"{self._directory}/{file.name} does not match its checksum")
        return raw

    def _check_chunk(self, chunk: Chunk, file_bytes: Mapping[str, int]) -> None:
        where = f"{chunk.name} in {self._directory}"
        if chunk.start + chunk.length > file_bytes.get(chunk.file, 0):
            raise CheckpointDamaged(f"{where} lies beyond the end of {chunk.file}")
        if not len(chunk.shape) == len(chunk.offsets) == len(chunk.sizes) or any(
            begin + size > whole
            for begin, size, whole in zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True)
        ):
            raise CheckpointDamaged(f"{where} does not fit into a tensor of {chunk.shape}")
        if prod(chunk.sizes) * dtype_of(chunk).itemsize > chunk.length:
            raise CheckpointDamaged(f"{where} has fewer bytes than its elements take")
