"""Where a job's journal lies in etcd, and how a batch is cut into transactions that etcd accepts. Pure.

Keys, below `<prefix>/jobs/<job>/`:

    master                      the leader's endpoint, bound to its lease
    journal/head                one Head: what makes everything else visible
    journal/record/<name>       b"=" + the value, or b"#" + a Ref to where it lies in pieces
    journal/entry/<seq>         an entry of the event log as JSON
    journal/piece/<id>/<n>      pieces of large values; written once, never changed

etcd's limits are 128 operations and 1.5 MiB a request. A batch that fits is one transaction. Otherwise, what may be
written early goes first (pieces, which nothing refers to yet; entries, which the head does not count yet), then one
transaction flips head and records. Where even the records alone do not fit, they go as one large value that the head
calls `pending`: from then on they are kept, and are copied to their own keys before anything else is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stoker.job.journal.durable import Entry

LAYOUT = 1
MAX_OPERATIONS = 120
MAX_REQUEST_BYTES = (
    704 * 1024
)  # under 1 MiB as base64, as the HTTP client wants it, and well under etcd's limit
MAX_INLINE_BYTES = 384 * 1024
PIECE_BYTES = 512 * 1024
MAX_ENTRY_BYTES = 64 * 1024
KEPT_ENTRIES = 10_000
TRIM_SLACK = 256
INLINE, REFERRED = b"=", b"#"


class Ref(msgspec.Struct, frozen=True):
    """A value in pieces."""

    id: str
    pieces: int
    size_bytes: int


class Head(msgspec.Struct, frozen=True):
    """What is kept. `attempt` tells a writer whether it was its own request that got through."""

    layout: int = LAYOUT
    attempt: str = ""
    first_seq: int = 1
    next_seq: int = 1
    pending: Ref | None = None


class Put(NamedTuple):
    """Set a key."""

    key: bytes
    value: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.key) + len(self.value) + 16

    def request(self) -> dict[str, Any]:
        return {"request_put": {"key": self.key, "value": self.value}}


class Delete(NamedTuple):
    """Delete a key, or all keys from `key` up to `end`."""

    key: bytes
    end: bytes = b""

    @property
    def size_bytes(self) -> int:
        return len(self.key) + len(self.end) + 16

    def request(self) -> dict[str, Any]:
        return {"request_delete_range": {"key": self.key, "range_end": self.end}}


Operation = Put | Delete


class Keys:
    """The keys of one job."""

    def __init__(self, prefix: str, job: str) -> None:
        base = f"{prefix}/jobs/{job}".encode()
        self.master = base + b"/master"
        self.head = base + b"/journal/head"
        self.records = base + b"/journal/record/"
        self.entries = base + b"/journal/entry/"
        self.pieces = base + b"/journal/piece/"

    def __str__(self) -> str:
        return self.master.decode().removesuffix("/master")

    def record(self, name: str) -> bytes:
        return self.records + name.encode()

    def name_of(self, key: bytes) -> str:
        return key[len(self.records) :].decode()

    def entry(self, seq: int) -> bytes:
        return self.entries + b"%016d" % seq

    def seq_of(self, key: bytes) -> int:
        return int(key[len(self.entries) :])

    def piece(self, ref_id: str, number: int) -> bytes:
        return self.pieces + b"%s/%08d" % (ref_id.encode(), number)

    def pieces_of(self, ref_id: str) -> tuple[bytes, bytes]:
        """First key, and the end (exclusive), of all pieces of one value."""
        start = self.pieces + ref_id.encode() + b"/"
        return start, end_of(start)

    def id_of(self, piece_key: bytes) -> str:
        return piece_key[len(self.pieces) :].partition(b"/")[0].decode()


def end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with the prefix, which does not end in 0xFF."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class Plan(NamedTuple):
    """A batch, cut: `early` first, then `flip` with the head in one transaction, then what `head.pending` holds."""

    early: list[Operation]
    flip: list[Operation]
    head: Head
    referred: dict[str, str | None]


def plan_batch(
    keys: Keys,
    head: Head,
    next_seq: int,
    attempt: str,
    records: Mapping[str, bytes | None],
    entries: Sequence[Entry],
) -> Plan:
    """Cut a batch. `referred`: for each record of it, the id of its pieces, or None if it lies in its own key."""
    early: list[Operation] = []
    stored: dict[str, bytes | None] = {}
    referred: dict[str, str | None] = {}
    for number, (name, value) in enumerate(records.items()):
        referred[name] = None
        if value is not None and len(value) > MAX_INLINE_BYTES:
            ref, pieces = cut(keys, f"{attempt}-{number}", value)
            early += pieces
            stored[name] = REFERRED + msgspec.json.encode(ref)
            referred[name] = ref.id
        else:
            stored[name] = None if value is None else INLINE + value
    logged = [Put(keys.entry(next_seq + i), encode_entry(entry)) for i, entry in enumerate(entries)]
    end_seq = next_seq + len(entries)
    first_seq = head.first_seq
    trim: list[Operation] = []
    if end_seq - first_seq > KEPT_ENTRIES + TRIM_SLACK:
        first_seq = end_seq - KEPT_ENTRIES
        trim = [Delete(keys.entry(0), keys.entry(first_seq))]
        logged = [put for put in logged if keys.seq_of(put.key) >= first_seq]
    flip = record_operations(keys, stored)
    new = Head(LAYOUT, attempt, first_seq, end_seq)
    if fits([*trim, *flip, *logged]):
        return Plan(early, [*trim, *flip, *logged], new, referred)
    early += logged
    if fits([*trim, *flip]):
        return Plan(early, [*trim, *flip], new, referred)
    ref, pieces = cut(keys, f"{attempt}-all", msgspec.msgpack.encode(stored))
    return Plan([*early, *pieces], trim, msgspec.structs.replace(new, pending=ref), referred)


def record_operations(keys: Keys, stored: Mapping[str, bytes | None]) -> list[Operation]:
    """Set or delete the records' keys."""
    return [
        Delete(keys.record(name)) if value is None else Put(keys.record(name), value)
        for name, value in stored.items()
    ]


def decode_pending(blob: bytes) -> dict[str, bytes | None]:
    """What `plan_batch` put into a pending value. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(blob, type=dict[str, bytes | None])


def cut(keys: Keys, ref_id: str, value: bytes) -> tuple[Ref, list[Operation]]:
    """Cut a value into pieces."""
    pieces: list[Operation] = [
        Put(keys.piece(ref_id, number), value[start : start + PIECE_BYTES])
        for number, start in enumerate(range(0, len(value), PIECE_BYTES))
    ]
    return Ref(ref_id, len(pieces), len(value)), pieces


def fits(operations: Sequence[Operation]) -> bool:
    """Whether these, with the head, are one transaction."""
    return len(operations) < MAX_OPERATIONS and sum(o.size_bytes for o in operations) <= MAX_REQUEST_BYTES


def transactions(operations: Iterable[Operation]) -> Iterator[list[Operation]]:
    """Cut operations, in their order, into lists that fit."""
    group: list[Operation] = []
    size_bytes = 0
    for operation in operations:
        if group and (len(group) >= MAX_OPERATIONS or size_bytes + operation.size_bytes > MAX_REQUEST_BYTES):
            yield group
            group, size_bytes = [], 0
        group.append(operation)
        size_bytes += operation.size_bytes
    if group:
        yield group


def encode_entry(entry: Entry) -> bytes:
    """An entry as JSON; one that is too large for etcd keeps its beginning and says what was left out."""
    body = msgspec.json.encode(entry)
    if len(body) <= MAX_ENTRY_BYTES:
        return body
    left_out = len(msgspec.json.encode(entry.details))
    why = entry.why if len(entry.why) <= MAX_ENTRY_BYTES // 8 else entry.why[: MAX_ENTRY_BYTES // 8] + " …"
    return msgspec.json.encode(entry._replace(why=why, details={"left_out_bytes": left_out}))


def decode_entry(body: bytes) -> Entry:
    """The entry again. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(body, type=Entry)
