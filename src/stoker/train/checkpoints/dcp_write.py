"""Pieces of tensors as torch.distributed.checkpoint writes them: through its own writer, without a process group.

It is imported where something is written alone: it takes long.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from stoker.errors import EnvironmentProblem
from stoker.train.checkpoints.hashing import HashingSink, hash_of
from stoker.train.checkpoints.image import Piece
from stoker.train.checkpoints.manifest import Chunk, File, Written
from stoker.train.checkpoints.places import Place

FILE_BYTES_MIN = 8 * 1024 * 1024
"""Of less than this no further file is made."""


def write_pieces(
    place: Place, directory: str, rank: int, pieces: Sequence[Piece], wrote: Callable[[int], None]
) -> Written:
    """This rank's files, as many at once as the place takes. Raises EnvironmentProblem.

    `wrote` is told the bytes of each write, by one thread at a time.
    """
    # What is on a device is copied from there by the thread that called: others know nothing of its stream.
    is_here = all(piece.tensor.is_cpu for piece in pieces)
    size_bytes = sum(piece.tensor.nbytes for piece in pieces)
    count = min(place.writes_at_once, 1 + size_bytes // FILE_BYTES_MIN) if is_here else 1
    parts = [part for part in _split(pieces, count) if part] or [[]]
    names = [f"__{rank}_{number}.distcp" for number in range(len(parts))]
    with _without_crc32():
        if len(parts) == 1:
            return _write_file(place, directory, names[0], parts[0], wrote)
        written = _write_files(place, directory, names, parts, wrote)
    return Written(
        [file for one in written for file in one.files], [c for one in written for c in one.chunks]
    )


def _write_files(
    place: Place,
    directory: str,
    names: Sequence[str],
    parts: Sequence[Sequence[Piece]],
    wrote: Callable[[int], None],
) -> list[Written]:
    """All at once; where one fails, the others stop. Raises what that one did."""
    telling = threading.Lock()
    failed: list[BaseException] = []

    def tell(size_bytes: int) -> None:
        with telling:
            if failed:
                raise EnvironmentProblem("another file of the checkpoint could not be written")
            wrote(size_bytes)

    def write(name: str, pieces: Sequence[Piece]) -> Written:
        try:
            return _write_file(place, directory, name, pieces, tell)
        except BaseException as error:  # whatever it is, the others need not go on; and it is raised
            failed.append(error)
            raise

    with ThreadPoolExecutor(len(parts), "stoker-write") as pool:
        begun = [pool.submit(write, name, pieces) for name, pieces in zip(names, parts, strict=True)]
    if failed:
        raise failed[0]
    return [one.result() for one in begun]


def _split(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """Over so many files, none of which is to be much larger than the others; neighbours stay together."""
    total, done = sum(piece.tensor.nbytes for piece in pieces), 0
    parts: list[list[Piece]] = [[] for _ in range(count)]
    for piece in pieces:
        parts[min(count - 1, done * count // max(1, total))].append(piece)
        done += piece.tensor.nbytes
    return parts


def _write_file(
    place: Place, directory: str, name: str, pieces: Sequence[Piece], wrote: Callable[[int], None]
) -> Written:
    by_index = {(piece.name, piece.offsets): piece for piece in pieces}
    planner = _Planner(by_index)
    files = _Files(place, directory, wrote, name)
    writer = _writer(files)
    (plan,) = writer.prepare_global_plan([SavePlan([_item(piece) for piece in pieces])])
    chunks = []
    for result in writer.write_data(plan, planner).wait():
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
                file=name,
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

    def __init__(self, place: Place, directory: str, wrote: Callable[[int], None], name: str = "") -> None:
        """`name`: of the one file, in place of torch's."""
        self._place = place
        self._directory = directory
        self._wrote = wrote
        self._name = name
        self.written: list[File] = []

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = self._name or str(path).removesuffix(".tmp")
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
