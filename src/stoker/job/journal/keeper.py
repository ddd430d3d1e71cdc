"""What a master still has to write down: batches it for the journal and keeps its order through failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.base.clock import Clock
from stoker.errors import ConfigError, JournalUnavailable, LeadershipLost
from stoker.job.journal.durable import Entry, Journal, Leadership
from stoker.job.records import decode_records

log = logging.getLogger("stoker.master")
RETRY_S = 0.2
WAITING_ENTRIES_MAX = 10_000
"""So many wait in memory while the journal cannot be written."""

MASTERS = "masters"
CLOSED = "closed"
"""Record of a job whose end every node has heard of: whoever takes up its journal begins a new one."""


class Masters(msgspec.Struct, frozen=True):
    """The masters that a job has had."""

    count: int = 1
    began_wall_s: float = 0.0
    """When the first of them began."""
    job: str = ""
    """Name of the job."""


class Keeper:
    """The journal as its one master writes it.

    While a journal that only this machine has cannot be written (a full disk), the job goes on and what is to be kept
    waits: should this master die meanwhile, the next one learns from the nodes that its journal is older than they are.
    A journal that other masters may take over is waited for: what is not in it has not been decided.
    """

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self.journal = journal
        self.clock = clock
        self.problem = ""
        """Why what is to be kept is not; empty: all of it is."""
        self.masters = Masters()
        self._leadership: Leadership | None = None
        self._records: dict[str, bytes | None] = {}
        self._entries: list[Entry] = []
        self._dropped = 0
        """Entries that were not taken since the journal was last written."""
        self._told = asyncio.Event()
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def epoch(self) -> int:
        """Number of this mastership; 0 where nobody can follow on another machine."""
        return self._leadership.epoch if self._leadership is not None else 0

    @property
    def leads(self) -> bool:
        """Whether this process has become the job's master."""
        return self._leadership is not None

    async def lead(
        self, endpoint: str, *, ttl_s: float, continues: bool = False, patience_s: float = 0.0
    ) -> dict[str, bytes]:
        """Become the job's only master; returns what was kept, but for what is left of a job that is over.

        `continues`: its master died just now, perhaps before all nodes had heard of the end: nothing new is begun. Nor
        is it by a candidate that has waited for its turn, and may have to tell the others. For anybody else the journal
        of a job that has ended is an old one, though its master may have died before it could note that all had heard.

        `patience_s`: how long a journal that cannot be reached is waited for.

        Raises what the journal does, LeadershipLost where the job has ended and all have heard of it while this process
        waited its turn, and WireError for records that cannot be read.
        """
        leadership, records = await self._reach(endpoint, ttl_s, patience_s)
        self._leadership = leadership
        if CLOSED in records and leadership.waited:
            raise LeadershipLost("the job has ended while this process waited to become its master")
        if not (continues or leadership.waited) and (CLOSED in records or _has_ended(records)):
            log.info("the job in this journal has ended: a new one begins")
            self._records.update(dict.fromkeys(records))
            await self.flush()
            return {}
        return records

    async def _reach(
        self, endpoint: str, ttl_s: float, patience_s: float
    ) -> tuple[Leadership, dict[str, bytes]]:
        deadline, is_told = self.clock.now() + patience_s, False
        while True:
            try:
                return await self.journal.lead(endpoint, ttl_s=ttl_s), await self.journal.load()
            except JournalUnavailable as error:
                if self.clock.now() >= deadline:
                    raise
                if not is_told:
                    log.warning("waiting for the journal, for %.0f s at most: %s", patience_s, error)
                is_told = True
            await asyncio.sleep(RETRY_S)

    def begin(self, records: Mapping[str, bytes], job: str) -> None:
        """Count this master among those of its job. Raises ConfigError where the journal is another job's."""
        kept = records.get(MASTERS)
        before = msgspec.msgpack.decode(kept, type=Masters) if kept is not None else None
        if before is not None and before.job not in ("", job):
            raise ConfigError(
                f"the journal is that of job {before.job!r}, which has not ended: give --rdzv-id {before.job}, or "
                f"job {job!r} a --journal of its own"
            )
        began = before.began_wall_s if before is not None else self.clock.wall()
        self.masters = Masters(before.count + 1 if before is not None else 1, began, job)
        self.keep(MASTERS, self.masters)

    async def wait_lost(self) -> None:
        """Raise LeadershipLost once it is lost; never return."""
        assert self._leadership is not None
        raise LeadershipLost(await self._leadership.wait_lost())

    def keep(self, key: str, record: msgspec.Struct | None) -> None:
        """To be kept with the next flush (None: removed)."""
        self._records[key] = None if record is None else self._encode(record)

    def keep_bytes(self, key: str, value: bytes | None) -> None:
        self._records[key] = value

    def tell(self, kind: str, why: str, details: dict[str, Any]) -> None:
        """A line of the event log, to be kept with the next flush."""
        if not self.problem or len(self._entries) < WAITING_ENTRIES_MAX:
            self._entries.append(Entry(self.clock.wall(), kind, why, details))
            return
        if not self._dropped:
            log.error(
                "%d events wait for the journal to be written: newer ones are not written down until then",
                len(self._entries),
            )
        self._dropped += 1

    async def flush(self) -> None:
        """Write what is to be kept. Raises LeadershipLost."""
        while self._records or self._entries:
            records, entries = self._records, self._entries
            self._records, self._entries = {}, []
            try:
                await self.journal.write(records, entries)
            except JournalUnavailable as error:
                # What came meanwhile is newer; the batch may have been kept all the same, so its entries come first.
                self._records = {**records, **self._records}
                self._entries = entries + self._entries
                if not self.problem:
                    self.problem = str(error)
                    meanwhile = (
                        "nothing is decided until it can be written; the workers train on"
                        if self.epoch
                        else "the job goes on, but a master that dies now would be missed"
                    )
                    log.error("%s; %s", error, meanwhile)
                if not self.epoch:
                    return
                await asyncio.sleep(RETRY_S)
                continue
            if self.problem:
                self._on_written_again()
            if entries:
                told, self._told = self._told, asyncio.Event()
                told.set()

    def _on_written_again(self) -> None:
        why, self.problem = self.problem, ""
        log.warning("the journal is written again")
        dropped, self._dropped = self._dropped, 0
        if dropped:
            self.tell("events-dropped", f"{dropped} events are missing here: {why}", {"count": dropped})

    @property
    def next_entries(self) -> asyncio.Event:
        """Set once the next entries are written. To be taken before looking for those that are there: what is written
        during the look would be waited for in vain."""
        return self._told

    async def close_job(self) -> None:
        """Note that every node has heard of the end, if it can be kept."""
        self.keep_bytes(CLOSED, b"1")
        try:
            await self.flush()
        except LeadershipLost as error:
            log.warning("%s", error)

    async def close(self) -> None:
        await self.journal.close()


def _has_ended(records: Mapping[str, bytes]) -> bool:
    """Whether these are of a job that has ended. Raises WireError."""
    job = decode_records({key: value for key, value in records.items() if key == "job"}).job
    return job is not None and job.phase == "ended"
