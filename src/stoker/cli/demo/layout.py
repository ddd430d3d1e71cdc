"""Lay a dataset out as an origin: one object per record under `train/` and `test/`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.cli.demo.pictures import Source, Split
from stoker.errors import ConfigError, EnvironmentProblem

FORMAT = 1
TEST_BATCH = 256
MARKER = "layout.json"
Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`."""


class Layout(msgspec.Struct, frozen=True):
    """What lies in an origin folder; its presence there says that the layout is whole."""

    dataset: str
    train_records: int
    test_records: int
    train_bytes: int
    test_bytes: int
    wanted_records: int | None = None
    """`--records` that it was made for."""
    format: int = FORMAT

    @property
    def total_bytes(self) -> int:
        return self.train_bytes + self.test_bytes


def lay_out(source: Source, folder: Path, wanted_records: int | None, progress: Progress) -> Layout:
    """Make `folder` the origin of a dataset, or find that it already is.

    It is built beside its place and moved there when it is whole, so that an interrupted layout is done again.
    Raises EnvironmentProblem when it cannot be written, ConfigError for more records than there are.
    """
    known = read_layout(folder)
    if (
        known is not None
        and (known.dataset, known.wanted_records) == (source.name, wanted_records)
        and _count(folder / "train") == known.train_records
        and _count(folder / "test") == known.test_records
    ):
        return known
    train, test = source.load()
    if wanted_records is not None and wanted_records > len(train):
        raise ConfigError(f"--records {wanted_records}: {source.title} has {len(train)} training records")
    if wanted_records is not None:
        train = train.first(wanted_records)
        test = test.first(test_size(wanted_records, len(test)))
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        sizes = {
            name: _write(split, partial / name, progress)
            for name, split in (("train", train), ("test", test))
        }
        layout = Layout(source.name, len(train), len(test), sizes["train"], sizes["test"], wanted_records)
        (partial / MARKER).write_bytes(msgspec.json.encode(layout))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot lay the dataset out in {folder}: {error.strerror}; see --dir"
        ) from None
    return layout


def read_layout(folder: Path) -> Layout | None:
    """What lies in `folder`; None when nothing whole does."""
    try:
        known = msgspec.json.decode((folder / MARKER).read_bytes(), type=Layout)
    except (OSError, msgspec.MsgspecError):
        return None
    return known if known.format == FORMAT else None


def test_size(train_records: int, available: int) -> int:
    """A sixth of the training records. The last batch of the test set is never smaller than a world: a worker
    without a share would repeat a record, and accuracy would count it twice."""
    size = min(available, max(64, train_records // 6))
    tail = size % TEST_BATCH
    return size - tail if tail < 4 and size > tail else size


def record_name(number: int) -> str:
    """Name of a record's object: sorts as its number does."""
    return f"{number:06d}"


def _count(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def _write(split: Split, folder: Path, progress: Progress) -> int:
    """One object per record: the label's byte, then the pixels. Returns their bytes together."""
    folder.mkdir(parents=True)
    flat = split.pictures.reshape(len(split), -1)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    written = 0
    for number in range(len(split)):
        body = bytes([split.labels[number]]) + flat[number].tobytes()
        descriptor = os.open(folder / record_name(number), flags, 0o644)
        try:
            written += os.write(descriptor, body)
        finally:
            os.close(descriptor)
        if number % 1000 == 999 and number + 1 < len(split):
            progress(folder.name, number + 1, len(split))
    progress(folder.name, len(split), len(split))
    return written
