"""The durable index of a disk store: SQLite, written in batches by one thread.

A row follows its block's file and not the other way round, so a row whose file is missing or short is a
miss, a file without a row is an orphan, and neither is ever served.
"""

from __future__ import annotations

import itertools
import os
import queue
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.cache.layout import BlockId, block_name
from stoker.cache.store.port import StoredBlock, StoredPointer
from stoker.errors import EnvironmentProblem

SCHEMA_VERSION = 1
_BATCH_WAIT_S = 0.05
_BATCH_OPERATIONS = 5000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    name BLOB PRIMARY KEY, bucket TEXT NOT NULL, key TEXT NOT NULL, version TEXT NOT NULL,
    position INTEGER NOT NULL, size_bytes INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS pointers (
    bucket TEXT NOT NULL, key TEXT NOT NULL, version TEXT NOT NULL, size_bytes INTEGER NOT NULL,
    checked_wall_s REAL NOT NULL, PRIMARY KEY (bucket, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_PUT_BLOCK = "INSERT OR REPLACE INTO blocks VALUES (?,?,?,?,?,?,?)"
_DROP_BLOCK = "DELETE FROM blocks WHERE name = ?"
_PUT_POINTER = "INSERT OR REPLACE INTO pointers VALUES (?,?,?,?,?)"
_DROP_POINTER = "DELETE FROM pointers WHERE bucket = ? AND key = ?"
_MARK = "INSERT OR REPLACE INTO marks VALUES (?,?)"

_Operation = tuple[str, tuple[Any, ...]]


class SqliteIndex:
    """Opened once per folder, which must be locked by the caller.

    `was_clean` says whether the last owner closed it; `was_lost` why it had to be begun anew, if it had to.
    Raises EnvironmentProblem if the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.was_lost: str | None = None
        self.problem: str | None = None
        self._path = path
        try:
            self._connection, self.was_clean = self._open()
        except sqlite3.DatabaseError as error:
            if _is_environment(error):
                raise EnvironmentProblem(f"cannot open the cache index {path}: {error}") from error
            self._begin_anew(str(error))
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="stoker-cache-index", daemon=True)
        self._thread.start()

    def load(self) -> tuple[list[StoredBlock], list[StoredPointer], dict[str, str]]:
        """All rows, the oldest block first. A damaged index is emptied, and `was_lost` set. Call it once."""
        if self.was_lost is not None:
            return [], [], {}
        try:
            reader = sqlite3.connect(self._path)
        except sqlite3.DatabaseError as error:
            raise EnvironmentProblem(f"cannot open the cache index {self._path}: {error}") from error
        try:
            return list(_blocks(reader)), list(_pointers(reader)), _origins(reader)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            reader.close()
            self.close(clean=False)
            self._begin_anew(str(error))
            self._thread = threading.Thread(target=self._write, name="stoker-cache-index", daemon=True)
            self._thread.start()
            return [], [], {}
        finally:
            reader.close()

    def put_block(self, name: str, stored: StoredBlock) -> None:
        block = stored.block
        row = (
            bytes.fromhex(name),
            block.bucket,
            block.key,
            block.version,
            block.index,
            stored.size_bytes,
            stored.crc,
        )
        self._queue.put((_PUT_BLOCK, row))

    def drop_block(self, name: str) -> None:
        self._queue.put((_DROP_BLOCK, (bytes.fromhex(name),)))

    def put_pointer(self, pointer: StoredPointer) -> None:
        self._queue.put((_PUT_POINTER, tuple(pointer)))

    def drop_pointer(self, bucket: str, key: str) -> None:
        self._queue.put((_DROP_POINTER, (bucket, key)))

    def put_origin(self, bucket: str, url: str) -> None:
        self._queue.put((_MARK, (f"origin:{bucket}", url)))

    def close(self, clean: bool = True) -> None:
        """Write what is queued and close. `clean` promises that rows and files agree."""
        if clean and self.problem is None:
            self._queue.put((_MARK, ("clean", "1")))
        self._queue.put(None)
        self._thread.join()

    def _open(self) -> tuple[sqlite3.Connection, bool]:
        connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            found = int(connection.execute("PRAGMA user_version").fetchone()[0])
            if found not in (0, SCHEMA_VERSION):
                raise sqlite3.DatabaseError(f"it has format {found} and this version writes {SCHEMA_VERSION}")
            connection.executescript(_SCHEMA)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            row = connection.execute("SELECT value FROM marks WHERE name='clean'").fetchone()
            connection.execute(_MARK, ("clean", "0"))
        except BaseException:
            connection.close()
            raise
        return connection, found == 0 or (row is not None and row[0] == "1")

    def _begin_anew(self, reason: str) -> None:
        self.was_lost = reason
        for suffix in ("", "-wal", "-shm"):
            damaged = Path(f"{self._path}{suffix}")
            if damaged.exists():
                os.replace(damaged, f"{self._path}.damaged{suffix}")
        self._connection, self.was_clean = self._open()

    def _write(self) -> None:
        try:
            while self._write_batch():
                pass
        finally:
            self._connection.close()

    def _write_batch(self) -> bool:
        operation = self._queue.get()
        if operation is None:
            return False
        batch = [operation]
        more = True
        try:
            while len(batch) < _BATCH_OPERATIONS:
                following = self._queue.get(timeout=_BATCH_WAIT_S)
                if following is None:
                    more = False
                    break
                batch.append(following)
        except queue.Empty:
            pass
        try:
            self._connection.execute("BEGIN")
            for sql, operations in itertools.groupby(batch, key=lambda operation: operation[0]):
                self._connection.executemany(sql, [row for _, row in operations])
            self._connection.execute("COMMIT")
            self.problem = None
        except sqlite3.Error as error:
            # Lost rows make orphans and misses, never wrong bytes: say so and go on.
            self.problem = f"the index cannot be written: {error}"
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        return more


def _blocks(connection: sqlite3.Connection) -> Iterator[StoredBlock]:
    for name, bucket, key, version, index, size_bytes, crc in connection.execute(
        "SELECT name, bucket, key, version, position, size_bytes, crc FROM blocks ORDER BY rowid"
    ):
        block = BlockId(bucket, key, version, index)
        # A row that SQLite can read may still be damaged; its name is a checksum of its identity.
        if not isinstance(index, int) or bytes.fromhex(block_name(block)) != name:
            raise sqlite3.DatabaseError(f"the row of {key!r} is damaged")
        yield StoredBlock(block, size_bytes, crc)


def _pointers(connection: sqlite3.Connection) -> Iterator[StoredPointer]:
    for row in connection.execute("SELECT bucket, key, version, size_bytes, checked_wall_s FROM pointers"):
        yield StoredPointer(*row)


def _origins(connection: sqlite3.Connection) -> dict[str, str]:
    rows = connection.execute("SELECT name, value FROM marks WHERE name LIKE 'origin:%'")
    return {name.removeprefix("origin:"): url for name, url in rows}


def _is_environment(error: sqlite3.DatabaseError) -> bool:
    if not isinstance(error, sqlite3.OperationalError):
        return False
    return any(word in str(error) for word in ("full", "readonly", "unable to open", "I/O", "locked"))
