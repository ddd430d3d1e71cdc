"""Pieces of tensors as torch.distributed.checkpoint writes them: through its own writer, without a process group.

It is imported where something is written alone: it takes long.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from stoker.train.checkpoints.hashing import HashingSink, hash_of
from stoker.train.checkpoints.image import Piece
from stoker.train.checkpoints.manifest import Chunk, File, Written
from stoker.train.checkpoints.places import Place


def write_pieces(
    place: Place, directory: str, rank: int, pieces: Sequence[Piece], wrote: Callable[[int], None]
) -> Written:
    """This rank's file. `wrote` is told the bytes of each write. Raises EnvironmentProblem."""
    by_index = {(piece.name, piece.offsets): piece for piece in pieces}
    planner = _Planner(by_index)
    files = _Files(place, directory, wrote)
    writer = _writer(files)
    plan = SavePlan([_item(piece) for piece in pieces])
    mine = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    with _without_crc32():
        results = writer.write_data(mine, planner).wait()
    chunks = []
    for result in results:
        piece = by_index[_key(result.index)]
        stored = result.storage_data
        chunks.append(
            Chunk(
                name=piece.name,
                dtype=str(piece.tensor.dtype).removeprefix("torch."),
                shape=tuple(piece.shape),
                offsets=tuple(piece.offsets),
                sizes=tuple(piece.tensor.shape),
                xxh128=planner.hashes[_key(result.index)],
                file=stored.relative_path,
                start=stored.offset,
                length=stored.length,
            )
        )
    return Written(files.written, chunks)


def write_metadata(
    place: Place, directory: str, chunks: Sequence[Chunk], wrote: Callable[[int], None]
) -> list[File]:
    """`.metadata` of all ranks' chunks, by which torch.distributed.checkpoint finds them. Raises EnvironmentProblem."""
    files = _Files(place, directory, wrote)
    items = [_item_of(chunk) for chunk in chunks]
    (plan,), metadata = create_default_global_save_plan([SavePlan(items)])
    results = [
        WriteResult(item.index, chunk.length, _StorageInfo(chunk.file, chunk.start, chunk.length))
        for item, chunk in zip(plan.items, chunks, strict=True)
    ]
    _writer(files).finish(metadata, [results])
    return files.written


class _Planner(DefaultSavePlanner):
    """Gives out the pieces that are to be written, one after the other."""

    def __init__(self, pieces: dict[tuple[str, tuple[int, ...]], Piece]) -> None:
        super().__init__()
        self._pieces = pieces
        self.hashes: dict[tuple[str, tuple[int, ...]], str] = {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        tensor = self._pieces[_key(write_item.index)].tensor.detach().cpu().contiguous()
        self.hashes[_key(write_item.index)] = hash_of(tensor)
        return tensor


class _Files(FileSystemBase):
    """A place's directory, as torch's writer wants it. What is written under a temporary name is put there at once:
    the manifest says when all is there."""

    def __init__(self, place: Place, directory: str, wrote: Callable[[int], None]) -> None:
        self._place = place
        self._directory = directory
        self._wrote = wrote
        self.written: list[File] = []

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = str(path).removesuffix(".tmp")
        with self._place.create(self._directory, name) as sink:
            stream = HashingSink(sink, self._wrote)
            yield stream
        self.written.append(stream.file(name))

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    def init_path(self, path: Any) -> str:
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        """Done, in `create_stream`."""

    def mkdir(self, path: Any) -> None:
        """The place has done that."""

    def exists(self, path: Any) -> bool:
        return False

    def rm_file(self, path: Any) -> None:
        """There is nothing of that name."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Of the archive that torch.save makes of each tensor: it takes longer than all else together, nobody reads it, and
    we have a better one."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _writer(files: _Files) -> FileSystemWriter:
    writer = FileSystemWriter("", sync_files=False, thread_count=1, per_thread_copy_ahead=0)
    writer.fs = files  # type: ignore[assignment]  # as torch's own writer for fsspec does it
    return writer


def _item(piece: Piece) -> WriteItem:
    return _write_item(piece.name, piece.offsets, tuple(piece.tensor.shape), piece.shape, piece.tensor.dtype)


def _item_of(chunk: Chunk) -> WriteItem:
    return _write_item(chunk.name, chunk.offsets, chunk.sizes, chunk.shape, getattr(torch, chunk.dtype))


def _write_item(
    name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            TensorProperties(dtype=dtype),
            torch.Size(shape),
        ),
    )


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())
