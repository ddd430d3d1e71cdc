"""Blocks as files: one immutable file each, and a durable index beside them.

DIR/lock             held by the one server that uses the folder
DIR/index.sqlite     the durable index
DIR/blocks/xx/NAME   a block
DIR/tmp/             blocks being written
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import threading
import time
from collections import OrderedDict
from pathlib import Path

from stoker.cache.layout import BlockId, block_name, block_path
from stoker.cache.store.index import SqliteIndex
from stoker.cache.store.port import Folder, Loaded, OpenFile, StoredBlock, StoredPointer
from stoker.errors import CorruptBlock, EnvironmentProblem

OPEN_FILES_MAX = 1024
_CHARGE_UNIT_BYTES = 4096


class DiskStore:
    """A folder of blocks. Opening it takes the lock; `load` reads the index and touches no block.

    Raises EnvironmentProblem if the folder cannot be used or another server uses it.
    """

    def __init__(self, folder: Path, open_files_max: int = OPEN_FILES_MAX) -> None:
        self._folder = str(folder)
        self._open_files: OrderedDict[BlockId, OpenFile] = OrderedDict()
        self._open_files_max = open_files_max
        self._temporary = itertools.count()
        self._stopping = threading.Event()
        self._sweeper: threading.Thread | None = None
        self._interrupted = False
        try:
            for part in ("blocks", "tmp"):
                (folder / part).mkdir(parents=True, exist_ok=True)
            found = os.stat(folder)
            self._place = Folder(os.fsencode(folder.absolute()), found.st_dev, found.st_ino)
            self._lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EnvironmentProblem(f"cannot use the cache folder {folder}: {error.strerror}") from error
        try:
            self._take_lock()
            self._empty_tmp()
            self._index = SqliteIndex(folder / "index.sqlite")
        except BaseException:
            os.close(self._lock_fd)
            raise

    def load(self) -> Loaded:
        started_wall_s = time.time()
        blocks, pointers, origins = self._index.load()
        notes: list[str] = []
        if self._index.was_lost is not None:
            notes.append(
                f"the index of {self._folder} was damaged ({self._index.was_lost}); the cache starts empty, "
                "the damaged file is kept as index.sqlite.damaged"
            )
            # All at once and before serving: what is not in the index would not count against the limit.
            shutil.rmtree(f"{self._folder}/blocks", ignore_errors=True)
        try:
            for number in range(256):
                os.makedirs(f"{self._folder}/blocks/{number:02x}", exist_ok=True)
        except OSError as error:
            self.close()
            raise EnvironmentProblem(
                f"cannot use the cache folder {self._folder}: {error.strerror}"
            ) from error
        if not self._index.was_clean:
            notes.append(
                "the last server on this folder was not stopped cleanly; blocks are being reconciled"
            )
            known = {block_name(stored.block) for stored in blocks}
            self._sweeper = threading.Thread(
                target=self._sweep, args=(known, started_wall_s), name="stoker-cache-sweep", daemon=True
            )
            self._sweeper.start()
        return Loaded(blocks, pointers, origins, notes)

    def charge_bytes(self, size_bytes: int) -> int:
        """Whole file system blocks, which is what the disk loses."""
        return -(-size_bytes // _CHARGE_UNIT_BYTES) * _CHARGE_UNIT_BYTES

    def write(self, block: BlockId, data: bytes, crc: int) -> None:
        name = block_name(block)
        temporary = f"{self._folder}/tmp/{next(self._temporary)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                written = os.write(fd, data)
                while written < len(data):
                    written += os.write(fd, memoryview(data)[written:])
            finally:
                os.close(fd)
            os.rename(temporary, f"{self._folder}/blocks/{block_path(name)}")
        except OSError as error:
            _unlink(temporary)
            raise EnvironmentProblem(f"cannot write to {self._folder}: {error.strerror}") from error
        self._index.put_block(name, StoredBlock(block, len(data), crc))

    def read(self, block: BlockId, start: int, stop: int) -> bytes:
        fd = self._descriptor(block)
        try:
            data = os.pread(fd, stop - start, start)
        except OSError as error:
            raise CorruptBlock(f"cannot read {block}: {error.strerror}") from error
        finally:
            os.close(fd)
        if len(data) != stop - start:
            raise CorruptBlock(f"{block} is shorter than it was")
        return data

    def open(self, block: BlockId) -> OpenFile | None:
        found = self._open_files.get(block)
        if found is not None:
            self._open_files.move_to_end(block)
            return found
        opened = OpenFile(self._descriptor(block))
        self._open_files[block] = opened
        if len(self._open_files) > self._open_files_max:
            self._open_files.popitem(last=False)
        return opened

    def folder(self) -> Folder | None:
        return self._place

    def path_of(self, block: BlockId) -> bytes:
        return f"blocks/{block_path(block_name(block))}".encode("ascii")

    def delete(self, block: BlockId) -> None:
        self._open_files.pop(block, None)
        name = block_name(block)
        _unlink(f"{self._folder}/blocks/{block_path(name)}")
        self._index.drop_block(name)

    def save_pointer(self, pointer: StoredPointer) -> None:
        self._index.put_pointer(pointer)

    def drop_pointer(self, bucket: str, key: str) -> None:
        self._index.drop_pointer(bucket, key)

    def save_origin(self, bucket: str, url: str) -> None:
        self._index.put_origin(bucket, url)

    def problem(self) -> str | None:
        return self._index.problem

    def close(self) -> None:
        self._stopping.set()
        if self._sweeper is not None:
            self._sweeper.join()
        self._open_files.clear()
        swept = self._sweeper is None or not self._interrupted
        self._index.close(clean=swept)
        os.close(self._lock_fd)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EnvironmentProblem(
                f"the cache folder {self._folder} is in use by another cache server; give each its own --dir"
            ) from error

    def _empty_tmp(self) -> None:
        for name in os.listdir(f"{self._folder}/tmp"):
            _unlink(f"{self._folder}/tmp/{name}")

    def _descriptor(self, block: BlockId) -> int:
        try:
            return os.open(
                f"{self._folder}/blocks/{block_path(block_name(block))}",
                os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW,
            )
        except OSError as error:
            raise CorruptBlock(f"cannot open {block}: {error.strerror}") from error

    def _sweep(self, known: set[str], before_wall_s: float) -> None:
        """Remove files that the index does not know.

        A file that is younger than this server is none of them. Should one be replaced between the look
        and the unlink, the new block is found missing when it is asked for, and is fetched again.
        """
        for number in range(256):
            try:
                with os.scandir(f"{self._folder}/blocks/{number:02x}") as entries:
                    for entry in entries:
                        if self._stopping.is_set():
                            self._interrupted = True
                            return
                        if entry.name not in known and entry.stat().st_ctime < before_wall_s:
                            _unlink(entry.path)
            except OSError:
                continue


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
