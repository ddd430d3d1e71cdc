"""A journal in one SQLite file: survives the process and, but for the last moment, the machine."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import EnvironmentProblem


class SqliteJournal:
    """Entries in write-ahead mode; readers may look on while the job runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS entry"
                " (seq INTEGER PRIMARY KEY, wall_s REAL, kind TEXT, why TEXT, details TEXT)"
            )
        except (sqlite3.Error, OSError) as error:
            raise EnvironmentProblem(f"cannot keep the job's journal in {path}: {error}") from None

    def append(self, wall_s: float, kind: str, why: str, details: dict[str, Any]) -> None:
        try:
            self._database.execute(
                "INSERT INTO entry (wall_s, kind, why, details) VALUES (?, ?, ?, ?)",
                (wall_s, kind, why, msgspec.json.encode(details).decode()),
            )
        except sqlite3.Error as error:
            raise EnvironmentProblem(f"cannot write the job's journal in {self.path}: {error}") from None

    def entries(self) -> list[dict[str, Any]]:
        rows = self._database.execute("SELECT seq, wall_s, kind, why, details FROM entry ORDER BY seq")
        return [
            {"seq": seq, "wall_s": wall_s, "kind": kind, "why": why, **msgspec.json.decode(details)}
            for seq, wall_s, kind, why, details in rows
        ]

    def close(self) -> None:
        self._database.close()
