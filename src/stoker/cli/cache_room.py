"""Whether what is to be loaded can be held: what servers have room for, and what they hold afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from stoker.base.units import format_bytes
from stoker.cache.client.servers import Servers
from stoker.cache.segments import spare_bytes_for
from stoker.errors import CacheUnavailable, ObjectNotFound
from stoker.wire.cache_api import BucketStatus, CacheStatus


class Sum(NamedTuple):
    """What is to be loaded. `unsized`: objects whose sizes nobody has said. `parts`: how many bytes of it are below
    each prefix with rules of its own."""

    objects: int
    size_bytes: int
    unsized: int = 0
    parts: Mapping[str, int] = MappingProxyType({})

    def said(self) -> dict[str, int]:
        """For programs."""
        return {"objects": self.objects, "size_bytes": self.size_bytes, "unsized": self.unsized}


class Space(NamedTuple):
    """What the servers with a bucket have for it, in bytes, all together: their limits, what other buckets take of
    them, and what the bucket has already. `unreachable`: servers that are not counted.

    `room_bytes`: what the bucket may hold, for nothing of another one leaves for what is loaded, and it has a quota
    (`quota_bytes`; 0: it has none somewhere). `parts`: prefixes with rules of their own, and their quotas. `copies`: on
    how many servers each block is to be held if nobody says.
    """

    servers: int
    capacity_bytes: int
    others_bytes: int
    own_bytes: int
    unreachable: tuple[str, ...] = ()
    room_bytes: int = 0
    quota_bytes: int = 0
    parts: Mapping[str, int] = MappingProxyType({})
    copies: int = 1

    def part_of(self, key: str) -> str | None:
        """The prefix whose rules a key is kept by."""
        return max((prefix for prefix in self.parts if key.startswith(prefix)), key=len, default=None)


def space_for(servers: Servers, urls: Sequence[str], bucket: str) -> Space:
    """Ask each server how much there is. Raises ObjectNotFound if none has the bucket, and what servers say."""
    found: list[CacheStatus] = []
    unreachable = []
    for url in urls:
        try:
            found.append(servers.client(url).status())
        except CacheUnavailable:
            unreachable.append(url)
    if found and not any(row.name == bucket for status in found for row in status.buckets):
        raise ObjectNotFound(f"there is no bucket {bucket!r}: see `stoker cache ls stoker://`")
    return space_of(found, bucket, unreachable)


def space_of(found: Sequence[CacheStatus], bucket: str, unreachable: Sequence[str] = ()) -> Space:
    """What servers that say this of themselves have for a bucket; those that do not have it can hold nothing of it.
    Pure."""
    rows = {n: row for n, status in enumerate(found) for row in status.buckets if row.name == bucket}
    known = list(rows.values())
    others_bytes = room_bytes = 0
    for number, row in rows.items():
        status = found[number]
        # What has left of it, and still takes room in its segments, makes room for it.
        other_bytes = max(0, status.held_bytes - max(row.used_bytes, row.held_bytes))
        left_bytes = max(0, status.capacity_bytes - spare_bytes_for(status.capacity_bytes) - other_bytes)
        room_bytes += min(left_bytes, row.quota_bytes) if row.quota_bytes else left_bytes
        others_bytes += other_bytes
    quotas = [row.quota_bytes for row in known]
    return Space(
        servers=len(known),
        capacity_bytes=sum(found[number].capacity_bytes for number in rows),
        others_bytes=others_bytes,
        own_bytes=sum(row.held_bytes for row in known),
        unreachable=tuple(unreachable),
        room_bytes=room_bytes,
        quota_bytes=sum(quotas) if all(quotas) else 0,
        parts=_parts(known),
        copies=max((row.max_replicas for row in known), default=1) or 1,
    )


def _parts(rows: Sequence[BucketStatus]) -> dict[str, int]:
    """Prefixes with rules, and their quotas on all servers together; 0 where one of them has none for it."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        for part in row.prefixes:
            found[part.prefix].append(part.quota_bytes)
    return {
        prefix: sum(quotas) if len(quotas) == len(rows) and all(quotas) else 0
        for prefix, quotas in found.items()
    }


def refusal(url: str, total: Sum, space: Space, replicas: int) -> str:
    """Why it cannot all be held on so many servers (0: as many as the bucket says); empty if it can."""
    copies = min(replicas or space.copies, max(1, space.servers))
    for prefix, size_bytes in sorted(total.parts.items()):
        quota_bytes = space.parts.get(prefix, 0)
        if quota_bytes and size_bytes * copies > quota_bytes:
            return (
                f"{_sized(url, total, copies)}, of which {prefix} has {format_bytes(size_bytes)}, and may take "
                f"{format_bytes(quota_bytes)}: that is its quota. Raise it, or load what fits with --force"
            )
    if total.size_bytes * copies <= space.room_bytes:
        return ""
    which = "the server" if space.servers == 1 else f"the {space.servers} servers"
    quota = f", and its quota is {format_bytes(space.quota_bytes)}" if space.quota_bytes else ""
    return (
        f"{_sized(url, total, copies)} and there is room for "
        f"{format_bytes(space.room_bytes)}: {which} may hold {format_bytes(space.capacity_bytes)}, of which other "
        f"buckets have {format_bytes(space.others_bytes)}{quota}. Load a smaller prefix, give up another bucket "
        "(`stoker cache evict`), give the servers more (`--capacity`), or load what fits with --force"
    )


def _sized(url: str, total: Sum, copies: int) -> str:
    size_bytes = total.size_bytes
    with_copies = f", {format_bytes(size_bytes * copies)} with {copies} copies," if copies > 1 else ""
    return f"{url} has {total.objects} objects of {format_bytes(size_bytes)}{with_copies}"


def left_bytes(should_be_held_bytes: int, space: Space) -> int:
    """How much of what was loaded has certainly left again: the bucket holds less than that. 0: it cannot be told."""
    return 0 if space.unreachable else max(0, should_be_held_bytes - space.own_bytes)
