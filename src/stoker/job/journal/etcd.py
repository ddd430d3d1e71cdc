"""A journal in etcd: survives the master's machine. Only the leader writes; anybody who may read etcd can look on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from stoker.errors import JournalDamaged, JournalUnavailable, LeadershipLost, StokerError
from stoker.job.journal.durable import Entry, entry_as_dict
from stoker.job.journal.etcd_layout import (
    INLINE,
    LAYOUT,
    REFERRED,
    Delete,
    Head,
    Keys,
    Operation,
    Put,
    Ref,
    decode_entry,
    decode_pending,
    end_of,
    plan_batch,
    record_operations,
    transactions,
)
from stoker.job.journal.etcd_room import EtcdRoom
from stoker.job.journal.leadership import EtcdLeadership, key_was_created_at
from stoker.wire.etcd import (
    OUT_OF_RANGE,
    EtcdClient,
    EtcdFull,
    EtcdRefused,
    KeyValue,
    Range,
    Transaction,
)

PAGE_RECORDS, PAGE_ENTRIES, PAGE_PIECES, PAGE_NAMES = 32, 200, 4, 1000
TIDY_TIMEOUT_S = 1.0
TRIES = 3


class _HeadMoved(Exception):
    """An earlier request of this same leader, given up for lost, got through after all."""


class EtcdJournal:
    """One job's journal.

    A write is one transaction that holds only while this process leads and nothing was written since its last one, so
    neither a deposed master nor a request that was delayed on its way can change anything.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        *,
        compact_after_s: float | None = 3600.0,
        write_timeout_s: float = 5.0,
    ) -> None:
        """`compact_after_s`: see `EtcdRoom`.
        `write_timeout_s`: how long one transaction may take before the journal is unavailable.
        """
        self.keys = keys
        self._client = client
        self._leadership: EtcdLeadership | None = None
        self._writing = asyncio.Lock()
        self._head = Head()
        self._head_revision = -1
        self._known = False
        self._next_seq = 0
        self._attempts = 0
        self._referred: dict[str, str] = {}
        self._garbage: set[str] = set()
        self._write_timeout_s = write_timeout_s
        self._room = EtcdRoom(client, keys.head, compact_after_s=compact_after_s)

    def __str__(self) -> str:
        return f"etcd at {self._client}, below {self.keys}"

    async def lead(self, endpoint: str, *, ttl_s: float = 5.0) -> EtcdLeadership:
        if self._leadership is not None:
            await self._leadership.resign()
        self._known, self._next_seq = False, 0
        self._leadership = EtcdLeadership(self._client, self.keys, ttl_s=ttl_s, room=self._room)
        await self._leadership.campaign(endpoint)
        return self._leadership

    async def load(self) -> dict[str, bytes]:
        async with self._writing:
            return await self._load()

    async def write(self, records: Mapping[str, bytes | None], entries: Sequence[Entry] = ()) -> None:
        async with self._writing:
            self._leading()
            try:
                await self._write_into_room(dict(records), tuple(entries))
            except BaseException as error:
                self._known = False
                if isinstance(error, JournalUnavailable):
                    self._leading()
                raise
            await self._tidy()

    async def read_entries(self, after: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        head, _, _ = await self._read_head()
        first = max(after + 1, head.first_seq)
        last = head.next_seq if limit is None else min(head.next_seq, first + limit)
        if first >= last:
            return []
        try:
            return [
                entry_as_dict(self.keys.seq_of(kv.key), decode_entry(kv.value))
                async for kv in self._range(self.keys.entry(first), self.keys.entry(last), page=PAGE_ENTRIES)
            ]
        except ValueError as error:
            raise self._damaged(f"an entry cannot be read: {error}") from None

    async def close(self) -> None:
        if self._leadership is not None:
            await self._leadership.resign()
        await self._client.close()

    # -- reading ------------------------------------------------------------------------------------------

    async def _load(self) -> dict[str, bytes]:
        """Read everything at one revision; as the leader also learn what the next write builds on."""
        for _ in range(TRIES):
            try:
                return await self._load_once()
            except EtcdRefused as error:
                if error.code != OUT_OF_RANGE:
                    raise
        raise JournalUnavailable("etcd is compacted faster than the journal can be read; try again")

    async def _load_once(self) -> dict[str, bytes]:
        head, head_revision, revision = await self._read_head()
        stored: dict[str, bytes | None] = {}
        try:
            async for kv in self._range(
                self.keys.records, end_of(self.keys.records), revision, page=PAGE_RECORDS
            ):
                stored[self.keys.name_of(kv.key)] = kv.value
            if head.pending is not None:
                stored.update(decode_pending(await self._pieces(head.pending, revision)))
            refs = {
                name: msgspec.json.decode(value[1:], type=Ref)
                for name, value in stored.items()
                if value is not None and value[:1] == REFERRED
            }
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._damaged(f"a record cannot be read: {error}") from None
        records = {}
        for name, value in stored.items():
            if name in refs:
                records[name] = await self._pieces(refs[name], revision)
            elif value is not None:
                if value[:1] != INLINE:
                    raise self._damaged(f"record {name!r} begins with {value[:1]!r}")
                records[name] = value[1:]
        needed = {ref.id for ref in refs.values()} | (
            {head.pending.id} if head.pending is not None else set()
        )
        self._garbage = await self._piece_ids(revision) - needed
        self._referred = {name: ref.id for name, ref in refs.items()}
        self._head, self._head_revision, self._known = head, head_revision, True
        self._next_seq = self._next_seq or head.next_seq
        return records

    async def _read_head(self) -> tuple[Head, int, int]:
        """The head, its revision (0: there is none), the store's revision."""
        found, revision = await self._client.get(self.keys.head)
        if found is None:
            return Head(), 0, revision
        head = self._decode_head(found)
        if head.layout > LAYOUT:
            raise JournalDamaged(
                f"the journal below {self.keys.head!r} in etcd was written by a newer Stoker (format {head.layout},"
                f" this one knows {LAYOUT}): go on with that version, or give the job another name"
            )
        return head, found.mod_revision, revision

    def _decode_head(self, found: KeyValue) -> Head:
        try:
            return msgspec.json.decode(found.value or b"{}", type=Head)
        except msgspec.MsgspecError as error:
            raise self._damaged(f"the head cannot be read: {error}") from None

    async def _range(
        self, start: bytes, end: bytes, revision: int = 0, *, keys_only: bool = False, page: int
    ) -> AsyncGenerator[KeyValue, None]:
        more = True
        while more:
            request = {
                "key": start,
                "range_end": end,
                "revision": revision,
                "limit": page,
                "keys_only": keys_only,
            }
            found = await self._client.call("kv/range", request, Range)
            for kv in found.kvs:
                yield kv
                start = kv.key + b"\x00"
            more = found.more

    async def _pieces(self, ref: Ref, revision: int) -> bytes:
        start, end = self.keys.pieces_of(ref.id)
        value = b"".join([kv.value async for kv in self._range(start, end, revision, page=PAGE_PIECES)])
        if len(value) != ref.size_bytes:
            raise self._damaged(f"value {ref.id} has {len(value)} bytes instead of {ref.size_bytes}")
        return value

    async def _piece_ids(self, revision: int) -> set[str]:
        end = end_of(self.keys.pieces)
        pieces = self._range(self.keys.pieces, end, revision, keys_only=True, page=PAGE_NAMES)
        return {self.keys.id_of(kv.key) async for kv in pieces}

    def _damaged(self, what: str) -> JournalDamaged:
        return JournalDamaged(
            f"the journal below {self.keys.head!r} in etcd is damaged ({what}): delete these keys to begin anew, or"
            " restore a snapshot of etcd"
        )

    # -- writing ------------------------------------------------------------------------------------------

    def _leading(self) -> EtcdLeadership:
        if self._leadership is None:
            raise LeadershipLost(
                "this process never was the job's master: only a leader may write the journal"
            )
        self._leadership.check()
        return self._leadership

    async def _write_into_room(self, records: dict[str, bytes | None], entries: Sequence[Entry]) -> None:
        try:
            await self._write(records, entries)
        except EtcdFull:
            if not await self._room.make():
                raise
            self._known = False
            self._leading()
            await self._write(records, entries)

    async def _write(self, records: dict[str, bytes | None], entries: Sequence[Entry]) -> None:
        for _ in range(TRIES):
            try:
                if not self._known:
                    await self._load()
                if self._head.pending is not None:
                    await self._settle(self._head.pending)
                return await self._keep(records, entries)
            except _HeadMoved:
                self._known = False
        raise JournalUnavailable("the journal in etcd goes on changing without this process; try again")

    async def _keep(self, records: dict[str, bytes | None], entries: Sequence[Entry]) -> None:
        plan = plan_batch(self.keys, self._head, self._next_seq, self._attempt(), records, entries)
        for group in transactions(plan.early):
            await self._transact(group)
        await self._transact(plan.flip, plan.head)
        self._next_seq = plan.head.next_seq
        for name, ref_id in plan.referred.items():
            if (old := self._referred.pop(name, None)) is not None:
                self._garbage.add(old)
            if ref_id is not None:
                self._referred[name] = ref_id
        if plan.head.pending is not None:
            await self._settle(plan.head.pending)

    async def _settle(self, pending: Ref) -> None:
        """Copy a pending batch to the records' own keys; may be begun anew any number of times."""
        try:
            stored = decode_pending(await self._pieces(pending, 0))
        except msgspec.MsgspecError as error:
            raise self._damaged(f"pending records cannot be read: {error}") from None
        for group in transactions(record_operations(self.keys, stored)):
            await self._transact(group)
        head = msgspec.structs.replace(self._head, attempt=self._attempt(), pending=None)
        await self._transact([Delete(*self.keys.pieces_of(pending.id))], head)

    async def _transact(self, operations: Iterable[Operation], head: Head | None = None) -> None:
        """Do this if this process still leads and nothing was written meanwhile; all or nothing."""
        leadership, keys = self._leading(), self.keys
        changes = [*operations]
        if head is not None:
            changes.append(Put(keys.head, msgspec.json.encode(head)))
        answer = await self._client.call(
            "kv/txn",
            {
                "compare": [
                    key_was_created_at(keys.master, leadership.epoch),
                    {
                        "key": keys.head,
                        "target": "MOD",
                        "result": "EQUAL",
                        "mod_revision": self._head_revision,
                    },
                ],
                "success": [change.request() for change in changes],
                "failure": [{"request_range": {"key": keys.master}}, {"request_range": {"key": keys.head}}],
            },
            Transaction,
            timeout_s=min(self._write_timeout_s, leadership.remaining_s()),
        )
        if answer.succeeded:
            if head is not None:
                self._head, self._head_revision = head, answer.header.revision
            self._room.note(answer.header.revision, sum(change.size_bytes for change in changes))
            return
        master, found = ((r.kvs[0] if r.kvs else KeyValue()) for r in answer.ranges)
        if master.create_revision != leadership.epoch:
            leadership.depose(f"etcd names {master.value.decode(errors='replace') or 'nobody'} as the master")
        if head is not None and self._decode_head(found) == head:
            self._head, self._head_revision = head, found.mod_revision
            return
        raise _HeadMoved

    def _attempt(self) -> str:
        self._attempts += 1
        return f"{self._leading().epoch}-{self._attempts}"

    # -- in passing ---------------------------------------------------------------------------------------

    async def _tidy(self) -> None:
        """Delete pieces that nothing refers to, and let etcd forget; what fails is left for a later time."""
        with contextlib.suppress(StokerError, _HeadMoved, TimeoutError):
            async with asyncio.timeout(TIDY_TIMEOUT_S):
                await self._collect_garbage()
                await self._room.keep()

    async def _collect_garbage(self) -> None:
        while self._garbage:
            ref_id = next(iter(self._garbage))
            await self._transact([Delete(*self.keys.pieces_of(ref_id))])
            self._garbage.discard(ref_id)
