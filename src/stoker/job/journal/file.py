"""A journal in one SQLite file on the master's own disk.

What a death costs: the process's (SIGKILL, a crash) nothing that `write` returned from. The machine's (a power cut, a
kernel panic) may cost the last writes, at most those since SQLite last synchronised its write-ahead log (a few hundred
writes), but always whole ones and from the end: the file is that of an earlier moment, never a mixture.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import JournalDamaged, JournalHeld, JournalUnavailable
from stoker.job.journal.durable import Entry, entry_as_dict
from stoker.job.journal.memory import SoleLeadership

APPLICATION_ID = 0x53544B4A  # "STKJ" in the file's header
SCHEMA = 1
BUSY_TIMEOUT_S = 0.2
SYNC_AFTER_WRITES = 256
SYNC_AFTER_BYTES = 4 * 1024 * 1024
KEPT_ENTRIES = 200_000
"""Some 60 MB of them."""
TRIM_BATCH = 20_000
CREATE = (
    "CREATE TABLE record (name TEXT PRIMARY KEY, value BLOB NOT NULL, crc32 INTEGER NOT NULL)",
    "CREATE TABLE entry (seq INTEGER PRIMARY KEY, wall_s REAL NOT NULL, kind TEXT NOT NULL, why TEXT NOT NULL,"
    " details TEXT NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA}",
)
KEEP = (
    "INSERT INTO record VALUES (?, ?, ?)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value, crc32 = excluded.crc32"
)
APPEND = "INSERT INTO entry (wall_s, kind, why, details) VALUES (?, ?, ?, ?)"
TRIM = (
    "DELETE FROM entry"
    " WHERE seq <= (SELECT max(seq) FROM entry) - ? AND seq < (SELECT min(seq) FROM entry) + ?"
)
PASSING = frozenset(
    (
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
    )
)


class FileJournal:
    """One file, write-ahead mode, one writing process; others may read meanwhile.

    Writes run in the calling thread (tens of microseconds), but for the rare one that synchronises with the disk and
    deletes what is too old of the event log, which goes to a thread, so that a busy disk does not stop the event loop.
    """

    def __init__(self, path: Path, *, kept_entries: int = KEPT_ENTRIES) -> None:
        """`kept_entries`: at least so many of the newest are kept, and hardly more."""
        self.path = path
        self._kept_entries = kept_entries
        self._database: sqlite3.Connection | None = None
        self._lock: _FileLock | None = None
        self._in_use = threading.Lock()
        self._writes = 0
        self._bytes = 0

    def __str__(self) -> str:
        return str(self.path)

    async def lead(self, endpoint: str, *, ttl_s: float = 5.0) -> SoleLeadership:
        self._own()
        return SoleLeadership()

    async def load(self) -> dict[str, bytes]:
        database = self._own()
        records = {}
        with self._in_use, self._errors("read"):
            for name, value, crc32 in database.execute("SELECT name, value, crc32 FROM record"):
                if zlib.crc32(value) != crc32:
                    raise self._damaged(f"the bytes of record {name!r} do not match their checksum")
                records[name] = value
        return records

    async def write(self, records: Mapping[str, bytes | None], entries: Sequence[Entry] = ()) -> None:
        database = self._own()
        kept = [(name, value, zlib.crc32(value)) for name, value in records.items() if value is not None]
        deleted = [(name,) for name, value in records.items() if value is None]
        added = [(e.wall_s, e.kind, e.why, msgspec.json.encode(e.details).decode()) for e in entries]
        due = self._writes >= SYNC_AFTER_WRITES or self._bytes >= SYNC_AFTER_BYTES
        self._writes += 1
        self._bytes += sum(len(value) for _, value, _ in kept) + sum(len(row[3]) for row in added)
        if due:
            self._writes = self._bytes = 0
            await asyncio.to_thread(self._write, database, kept, deleted, added, sync=True)
        else:
            self._write(database, kept, deleted, added, sync=False)

    async def read_entries(self, after: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._read_entries, after, limit)

    async def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                await asyncio.to_thread(self._close, database)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- the file -----------------------------------------------------------------------------------------

    def _own(self) -> sqlite3.Connection:
        """The connection that writes, after the lock is taken and the file is known to be a journal."""
        if self._database is not None:
            return self._database
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock or _FileLock(self.path)
        except OSError as error:
            raise JournalUnavailable(
                f"cannot keep a journal in {self.path}: {error.strerror}; {MEND}"
            ) from None
        try:
            with self._errors("open"):
                self._database = self._opened()
        except BaseException:
            self._lock.release()
            self._lock = None
            raise
        return self._database

    def _opened(self) -> sqlite3.Connection:
        database = self._connect(f"{self.path.absolute().as_uri()}?mode=rwc")
        try:
            self._prepare(database)
        except BaseException:
            database.close()
            raise
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        """Lay out a new file; check one that is there."""
        empty = _is_blank(database)
        if not empty:
            self._check(database)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA wal_autocheckpoint = 0")
        if empty:
            database.execute("BEGIN IMMEDIATE")
            for statement in CREATE:
                database.execute(statement)
            database.execute("COMMIT")
        found = database.execute("PRAGMA quick_check(record)").fetchone()[0]
        if found != "ok":
            raise self._damaged(f"SQLite says: {found}")

    def _check(self, database: sqlite3.Connection) -> None:
        application, schema = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if application != APPLICATION_ID:
            raise JournalDamaged(
                f"{self.path} is a SQLite file of another program, or of an early Stoker: name another file for the"
                " journal, or move this one away"
            )
        if schema > SCHEMA:
            raise JournalDamaged(
                f"{self.path} was written by a newer Stoker (journal format {schema}, this one knows {SCHEMA}): go on"
                " with that version, or name another file to begin anew"
            )

    def _read_entries(self, after: int, limit: int | None) -> list[dict[str, Any]]:
        """Through a connection of its own, which sees whole writes only and leaves the file as it is."""
        if not self.path.is_file():
            raise JournalUnavailable(
                f"there is no journal at {self.path}: has the job run here, and kept one?"
            )
        with self._errors("read"), contextlib.closing(self._connected_to_read()) as database:
            if _is_blank(database):  # its master is about to lay it out
                return []
            self._check(database)
            rows = database.execute(
                "SELECT seq, wall_s, kind, why, details FROM entry WHERE seq > ? ORDER BY seq LIMIT ?",
                (after, -1 if limit is None else limit),
            ).fetchall()
        try:
            return [
                entry_as_dict(
                    seq, Entry(wall_s, kind, why, msgspec.json.decode(details, type=dict[str, Any]))
                )
                for seq, wall_s, kind, why, details in rows
            ]
        except msgspec.MsgspecError as error:
            raise self._damaged(f"an entry is not JSON: {error}") from None

    def _connected_to_read(self) -> sqlite3.Connection:
        """Where nobody writes it leaves no files beside the journal. Beside the write-ahead log of one who was killed
        SQLite needs one more, which a folder that we may not write to cannot take: then it is left aside."""
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        if self.path.with_name(f"{self.path.name}-wal").exists():
            database = self._connect(uri)
            try:
                database.execute("SELECT count(*) FROM sqlite_master").fetchone()
                return database
            except sqlite3.OperationalError as error:
                database.close()
                if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                    raise
        return self._connect(f"{uri}&immutable=1")

    def _connect(self, uri: str) -> sqlite3.Connection:
        return sqlite3.connect(
            uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )

    def _write(
        self,
        database: sqlite3.Connection,
        kept: list[tuple[str, bytes, int]],
        deleted: list[tuple[str]],
        added: list[tuple[float, str, str, str]],
        *,
        sync: bool,
    ) -> None:
        with self._in_use, self._errors("write"):
            if sync:
                database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            try:
                database.execute("BEGIN IMMEDIATE")
                database.executemany(KEEP, kept)
                database.executemany("DELETE FROM record WHERE name = ?", deleted)
                database.executemany(APPEND, added)
                if sync:
                    database.execute(TRIM, (self._kept_entries, TRIM_BATCH))
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise

    def _close(self, database: sqlite3.Connection) -> None:
        with self._in_use:
            database.close()

    @contextlib.contextmanager
    def _errors(self, verb: str) -> Any:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is not None and code & 0xFF in PASSING:
                raise JournalUnavailable(
                    f"cannot {verb} the journal in {self.path}: {error}; {MEND}"
                ) from None
            if code is not None and code & 0xFF == sqlite3.SQLITE_READONLY:
                raise JournalUnavailable(
                    f"cannot {verb} the journal in {self.path}: it is read-only; {MEND}"
                ) from None
            raise self._damaged(f"SQLite says: {error}") from None

    def _damaged(self, what: str) -> JournalDamaged:
        return JournalDamaged(
            f"{self.path} is not a journal, or a damaged one ({what}): move it away to begin anew, or put back a copy"
        )


MEND = "free space on that disk and check that this user may write there"


class _FileLock:
    """An exclusive lock beside the journal that the kernel releases when the process ends. Raises JournalHeld."""

    def __init__(self, journal: Path) -> None:
        path = journal.with_name(f"{journal.name}.lock")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            written = os.pread(self._file, 32, 0).strip()
            os.close(self._file)
            pid = int(written) if written.isdigit() else 0
            raise JournalHeld(
                f"the master with process id {pid or 'unknown'} holds the journal {journal}: stop it, or let it finish,"
                " or give this job a journal of its own",
                pid,
            ) from None
        except OSError:
            os.close(self._file)
            raise
        with contextlib.suppress(OSError):  # a full disk: only the pid in the other's error message is lost
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Let the next one in."""
        os.close(self._file)


def _is_blank(database: sqlite3.Connection) -> bool:
    """Whether nobody has written anything into the file."""
    tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    return bool(tables == 0 and database.execute("PRAGMA application_id").fetchone()[0] == 0)
