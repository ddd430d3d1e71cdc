"""The folder of indexes on this node: each is built by one process, found by all, and removed when it is outdated.

DIR/DATASET-CONTENT.index      the index of a dataset as its objects were at one time
DIR/DATASET.lock               held by who builds one for the dataset
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stoker.data.index_file import BadIndexFile
from stoker.data.record_index import RecordIndex

log = logging.getLogger("stoker.data")

OUTDATED_KEPT_S = 3600.0
"""A run may still start processes that open the index it began with."""
UNUSED_KEPT_S = 30 * 86400.0


class IndexName(NamedTuple):
    """Of a dataset (its URL, format and options), and of what it has in it (every key, version and size)."""

    dataset: str
    content: str

    @property
    def file(self) -> str:
        return f"{self.dataset}-{self.content}.index"


class Entry(NamedTuple):
    """A file in the folder, and how long ago it was opened last."""

    file: str
    unused_s: float


def outdated(current: IndexName, entries: Iterable[Entry]) -> list[str]:
    """The files that can go: older indexes of this dataset, and those of others that nobody has opened for long."""
    return [
        entry.file
        for entry in entries
        if entry.file != current.file
        and entry.unused_s
        > (OUTDATED_KEPT_S if _dataset_of(entry.file) == current.dataset else UNUSED_KEPT_S)
    ]


class IndexStore:
    """The folder; it is made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, name: IndexName) -> RecordIndex | None:
        """The index, if it was built."""
        path = self.folder / name.file
        try:
            index = RecordIndex.open(path)
            os.utime(path)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            log.debug("an index's time cannot be set: %s", error)
            return index
        except (OSError, BadIndexFile) as error:
            log.warning("the index is built anew: %s", error)
            return None
        return index

    def keep(self, name: IndexName, index: RecordIndex) -> RecordIndex:
        """Save it, and remove what is outdated. What cannot be saved stays in this process's memory."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = index.save(self.folder / name.file)
        except OSError as error:
            log.warning(
                "the index of the dataset cannot be kept in %s (%s): it will be built again next time, and each "
                "process has its own; STOKER_CACHE_DIR names another folder", self.folder, error,
            )  # fmt: skip
            return index
        self._clear(name)
        return kept

    @contextlib.contextmanager
    def building(self, name: IndexName) -> Iterator[None]:
        """Only one process of the node is in here for a dataset, where its file system has locks."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / f"{name.dataset}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield
            return
        try:
            self._take(lock)
            yield
        finally:
            os.close(lock)

    def _take(self, lock: int) -> None:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process is building the index of the dataset: waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            log.debug("no lock in %s: %s", self.folder, error)

    def _clear(self, name: IndexName) -> None:
        now = time.time()
        with contextlib.suppress(OSError):
            entries = [
                Entry(found.name, now - found.stat().st_mtime)
                for found in os.scandir(self.folder)
                if found.name.endswith((".index", ".partial"))
            ]
            for file in outdated(name, entries):
                (self.folder / file).unlink(missing_ok=True)


def _dataset_of(file: str) -> str:
    return file.removeprefix(".").partition("-")[0]
