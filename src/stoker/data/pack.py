"""Write a dataset's records into shard files of a local folder, for others and for Stoker to read.

Shards are written into a folder inside that one, and moved into it together at the end: who looks sees what was there
before, or all of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from stoker.data.dataset import Dataset
from stoker.data.framing.scan import Malformed
from stoker.data.pack_shards import WRITERS, Packed, Shard, ShardWriter
from stoker.errors import BadRecord, ConfigError, EnvironmentProblem

SHARD_BYTES = 64 * 1024 * 1024
BATCH_RECORDS, BATCH_BYTES = 256, 64 * 1024 * 1024
"""So much is read together at most; a record that is larger is read alone."""
_WORK = ".packing"
_SHARD = re.compile(r"shard[-.][0-9]{5,}\.[a-z]+|index\.json")


class PackProgress(NamedTuple):
    """How far it is."""

    records_done: int
    records: int
    written_bytes: int
    shards: int


class PackedAll(NamedTuple):
    """What was written. `skipped`: corrupt records, which were left out."""

    records: int
    skipped: int
    size_bytes: int
    files: list[str]


def pack(
    dataset: Dataset,
    folder: Path,
    form: str,
    *,
    shard_bytes: int = SHARD_BYTES,
    is_forced: bool = False,
    on_progress: Callable[[PackProgress], None] = lambda _: None,
) -> PackedAll:
    """Write all records of a dataset into shards of about `shard_bytes`. `is_forced`: shards that are there are
    replaced.

    Raises ConfigError if something is there, BadRecord for records that the format cannot hold, EnvironmentProblem if
    the folder cannot be written to, and what reading raises. The folder then is as it was.
    """
    make = WRITERS.get(form)
    if make is None:
        raise ConfigError(f"records can be packed into {', '.join(WRITERS)}, not {form!r}")
    if shard_bytes < 1:
        raise ConfigError("a shard has at least 1 byte")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _workplace(folder) as work:
            before = _replaced(folder, is_forced)
            done = _Shards(dataset, work, make(), shard_bytes, on_progress).write()
            _move(work, folder, done.files, before)
        return done
    except OSError as error:
        raise EnvironmentProblem(f"cannot write to {folder}: {error.strerror or error}") from error
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if nothing came of it


def batches(dataset: Dataset) -> Iterator[range]:
    """All record numbers, in pieces that can be read together."""
    first, total = 0, len(dataset)
    while first < total:
        last = min(total, first + BATCH_RECORDS)
        reads = dataset.reads(np.arange(first, last, dtype=np.int64))
        if reads is not None:
            sums = np.cumsum(reads.stops - reads.starts)
            last = first + max(1, int(np.searchsorted(sums, BATCH_BYTES, side="right")))
        yield range(first, min(last, total))
        first = min(last, total)


def _replaced(folder: Path, is_forced: bool) -> list[str]:
    """The files that will be replaced. Raises ConfigError for others."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name != _WORK)
    if names and not is_forced:
        raise ConfigError(
            f"{folder} is not empty ({names[0]!r}): name another folder, or replace shards with --force"
        )
    others = [name for name in names if not _SHARD.fullmatch(name)]
    if others:
        raise ConfigError(f"{folder} has {others[0]!r} in it, which is no shard: name another folder")
    return names


@contextlib.contextmanager
def _workplace(folder: Path) -> Iterator[Path]:
    """A folder to write in, removed at the end. Only one process packs into a folder at a time."""
    work = folder / _WORK
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is packing into {folder}") from None
        shutil.rmtree(work, ignore_errors=True)  # of one that was killed
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(held)


def _move(work: Path, folder: Path, files: Sequence[str], before: Sequence[str]) -> None:
    try:
        for name in files:
            os.replace(work / name, folder / name)
        for name in set(before) - set(files):
            (folder / name).unlink(missing_ok=True)
    except BaseException:
        for name in set(files) - set(before):
            (folder / name).unlink(missing_ok=True)
        raise


class _Shards:
    """Writes shard after shard."""

    def __init__(
        self,
        dataset: Dataset,
        work: Path,
        writer: ShardWriter,
        shard_bytes: int,
        on_progress: Callable[[PackProgress], None],
    ) -> None:
        self._dataset = dataset
        self._work = work
        self._writer = writer
        self._shard_bytes = shard_bytes
        self._on_progress = on_progress
        self._done: list[Shard] = []
        self._sizes: list[int] = []
        self._body: BinaryIO | None = None
        self._in_shard_bytes = 0
        self._written_bytes = 0

    def write(self) -> PackedAll:
        """Read all records and write them."""
        total, records, read = len(self._dataset), 0, 0
        try:
            for numbers in batches(self._dataset):
                for packed in self._good(numbers):
                    self._add(packed)
                    records += 1
                read += len(numbers)
                shards = len(self._done) + (self._body is not None)
                self._on_progress(PackProgress(read, total, self._written_bytes, shards))
            self._finish()
        finally:
            if self._body is not None:
                self._body.close()
        files = [shard.name for shard in self._done]
        size_bytes = sum(shard.size_bytes for shard in self._done)
        for name, data in self._writer.beside(self._done).items() if self._done else ():
            with open(self._work / name, "wb") as file:
                _write_out(file, data)
            files.append(name)
            size_bytes += len(data)
        return PackedAll(records, total - records, size_bytes, files)

    def _good(self, numbers: range) -> Iterator[Packed]:
        """The records of a batch without those that are passed over."""
        dataset = self._dataset
        samples: Sequence[Any] = dataset.__getitems__(numbers)
        kinds = self._kinds(numbers)
        if len(samples) == len(numbers):
            yield from map(Packed, numbers, samples, kinds)
            return
        for number, kind in zip(numbers, kinds, strict=True):
            yield from (Packed(number, sample, kind) for sample in dataset.__getitems__([number]))

    def _kinds(self, numbers: range) -> list[str]:
        """What follows the dot in the names of objects that are one record each."""
        if self._dataset.format not in ("objects", "folder"):
            return [""] * len(numbers)
        names = [self._dataset.keys[number].rpartition("/")[2].lower() for number in numbers]
        return [name.partition(".")[2] if not name.startswith(".") else "" for name in names]

    def _add(self, packed: Packed) -> None:
        try:
            data = self._writer.frame(packed)
        except Malformed as error:
            raise BadRecord(
                f"record {packed.number} of {self._dataset.url!r} cannot be packed: {error}"
            ) from None
        if self._body is None:
            self._body = open(self._work / "body", "wb")  # noqa: SIM115 (closed when the shard is full)
        self._body.write(data)
        self._sizes.append(len(data))
        self._written_bytes += len(data)
        self._in_shard_bytes += len(data)
        if self._in_shard_bytes >= self._shard_bytes:
            self._finish()

    def _finish(self) -> None:
        """End the shard, if one was begun."""
        if self._body is None:
            return
        self._body.write(self._writer.tail())
        path = self._work / self._writer.name(len(self._done))
        try:
            head = self._writer.head(self._sizes)
        except Malformed as error:
            raise ConfigError(str(error)) from None
        if head:
            self._body.close()
            with open(path, "wb") as file, open(self._work / "body", "rb") as body:
                file.write(head)
                shutil.copyfileobj(body, file)
                _write_out(file, b"")
        else:
            _write_out(self._body, b"")
            self._body.close()
            os.replace(self._work / "body", path)
        self._body = None
        self._done.append(Shard(path.name, self._sizes, path.stat().st_size))
        self._sizes, self._in_shard_bytes = [], 0


def _write_out(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
