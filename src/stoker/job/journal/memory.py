"""A journal that dies with its process, and leadership that nobody contests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stoker.job.journal.durable import Entry, entry_as_dict

KEPT_ENTRIES = 10_000


class SoleLeadership:
    """Leadership that is held until the end of the process."""

    epoch = 0
    waited = False
    lost = None

    async def wait_lost(self) -> str:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")


class MemoryJournal:
    """Keeps records and entries in memory: for runs whose master may not be restarted, and for tests."""

    def __init__(self, *, kept_entries: int = KEPT_ENTRIES) -> None:
        """`kept_entries`: at least so many of the newest are kept, and at most twice as many."""
        self._records: dict[str, bytes] = {}
        self._entries: list[dict[str, Any]] = []
        self._forgotten = 0
        self._kept_entries = kept_entries

    def __str__(self) -> str:
        return "memory"

    async def lead(self, endpoint: str, *, ttl_s: float = 5.0) -> SoleLeadership:
        return SoleLeadership()

    async def load(self) -> dict[str, bytes]:
        return dict(self._records)

    async def write(self, records: Mapping[str, bytes | None], entries: Sequence[Entry] = ()) -> None:
        first = self._forgotten + len(self._entries) + 1
        added = [
            entry_as_dict(
                seq, entry._replace(details=msgspec.json.decode(msgspec.json.encode(entry.details)))
            )
            for seq, entry in enumerate(entries, first)
        ]
        for name, value in records.items():
            if value is None:
                self._records.pop(name, None)
            else:
                self._records[name] = value
        self._entries += added
        if len(self._entries) > 2 * self._kept_entries:
            too_many = len(self._entries) - self._kept_entries
            del self._entries[:too_many]
            self._forgotten += too_many

    async def read_entries(self, after: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        after = max(after - self._forgotten, 0)
        return self._entries[after : None if limit is None else after + limit]

    async def close(self) -> None:
        return
