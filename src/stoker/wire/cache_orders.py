"""Announced orders: what a reader is going to read, in order.

    POST   /-/orders/BUCKET            Announcement -> Announced
    DELETE /-/orders/BUCKET?stream=    a stream goes on no more (&owned=1: what was handed on of it) -> Announced
    GET    /-/orders/BUCKET            OrdersStatus

A *stream* is one reader's coming reads; a position in it is a read. Objects are numbered in a *catalog*, which streams
may share and which is sent but once. Announcements are idempotent: each says from which position on, and what was
announced from there on before is forgotten. The answer says how much of the catalog and of the stream is known, and so
from where to go on, also with a server that has restarted. A server forgets a stream that it has not heard of for
`lease_s`.

In a fleet a stream is announced to one server, any of them, which hands on to each owner what is read of what that
owns: only some positions of the stream, and a catalog of its own.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote, urlencode

import msgspec

ORDER_KEYS_MAX = 65_536
ORDER_READS_MAX = 65_536
"""In one announcement."""
ORDER_COUNT_MAX = 2**32
"""Positions in one announcement."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Announcement(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a stream, of its catalog, or both, and how far the stream is read."""

    stream: Name
    plan: Count = 0
    """What is announced under a higher number replaces all of a lower one."""
    group: str = ""
    """Streams of one group read everything once between them: the ranks of a job. Without one, a stream is alone."""
    catalog: str = ""
    """Without a name it is the stream's own."""
    first_key: Count = 0
    keys: list[str] = []
    """The objects with the numbers from `first_key` on."""
    start: Count = 0
    """The position of the first of these reads."""
    count: Count = 0
    """At how many positions from there on all reads are told; 0: as many as there are reads."""
    reads: bytes = b""
    """The number of the object of each read (u32, little endian)."""
    offsets: bytes = b""
    """At which position each is, counted from `start` (u32, little endian, ascending); nothing: one after the other."""
    spans: bytes = b""
    """Of each read its first byte and the one after its last (u64 each, little endian); nothing: whole objects."""
    round: Count | None = None
    """In which round, in which nothing is read twice, all of these reads are; if they are."""
    cursor: Count = 0
    """Reads before it are done."""
    asked: Count = 0
    """Reads before it are asked for already: they need not be fetched ahead."""
    read_s: Seconds = 0.0
    """Seconds a read takes the reader, as far as that is known: so when each is due."""
    at_owners: bool = False
    """The reader asks the owners, not this server: each brings what it owns."""
    placed: str = ""
    """What a server hands on to owners says by which placement; empty: it comes from the reader."""
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 60.0


class Announced(msgspec.Struct, frozen=True):
    """What is known by now: how many objects of the catalog, and the reads of the stream up to which position."""

    keys: int
    stop: int
    plan: int = 0
    prefetched: int = 0
    """Reads of the stream that were fetched before they were asked for, by this server and since it is announced."""
    prefetched_bytes: int = 0


class StreamStatus(msgspec.Struct, frozen=True):
    """A stream as a server knows it."""

    stream: str
    group: str
    plan: int
    cursor: int
    stop: int
    read_s: float
    prefetched: int
    prefetched_bytes: int
    is_owned: bool
    """Whether it is a part of a stream, which another server has handed on: of what this server owns."""
    ahead: int
    """Reads after the cursor that are here, on their way, or were found not to be had."""


class OrdersStatus(msgspec.Struct, frozen=True):
    """All streams of a bucket."""

    streams: list[StreamStatus]


def orders_target(bucket: str, stream: str = "", *, is_owned: bool = False) -> str:
    """Where a stream is announced and withdrawn; without one, where all are listed."""
    query = ({"stream": stream} if stream else {}) | ({"owned": "1"} if is_owned else {})
    return f"/-/orders/{quote(bucket, safe='')}" + (f"?{urlencode(query)}" if query else "")
