"""Whether what is to be loaded can be held: what servers have room for, and what they hold afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stoker.base.units import format_bytes
from stoker.cache.client.servers import Servers
from stoker.errors import CacheUnavailable, ObjectNotFound


class Sum(NamedTuple):
    """What is to be loaded. `unsized`: objects whose sizes nobody has said."""

    objects: int
    size_bytes: int
    unsized: int = 0


class Space(NamedTuple):
    """What servers have for a bucket, in bytes, all together: their limits, what other buckets take of them, and what
    the bucket has already. `unreachable`: servers that are not counted."""

    servers: int
    capacity_bytes: int
    others_bytes: int
    own_bytes: int
    unreachable: tuple[str, ...] = ()

    @property
    def room_bytes(self) -> int:
        """Nothing of another bucket leaves for what is loaded."""
        return max(0, self.capacity_bytes - self.others_bytes)


def space_for(servers: Servers, urls: Sequence[str], bucket: str) -> Space:
    """Ask each server how much there is. Raises ObjectNotFound if none has the bucket, and what servers say."""
    capacity_bytes = others_bytes = own_bytes = answered = 0
    unreachable = []
    is_known = False
    for url in urls:
        try:
            status = servers.client(url).status()
        except CacheUnavailable:
            unreachable.append(url)
            continue
        own = [row.held_bytes for row in status.buckets if row.name == bucket]
        is_known = is_known or bool(own)
        answered += 1
        capacity_bytes += status.capacity_bytes
        others_bytes += max(0, status.held_bytes - sum(own))
        own_bytes += sum(own)
    if answered and not is_known:
        raise ObjectNotFound(f"there is no bucket {bucket!r}: see `stoker cache ls stoker://`")
    return Space(answered, capacity_bytes, others_bytes, own_bytes, tuple(unreachable))


def refusal(url: str, total: Sum, space: Space, replicas: int) -> str:
    """Why it cannot all be held; empty if it can."""
    needed_bytes = total.size_bytes * min(replicas, max(1, space.servers))
    if needed_bytes <= space.room_bytes:
        return ""
    copies = (
        "" if needed_bytes == total.size_bytes else f", {format_bytes(needed_bytes)} with {replicas} copies,"
    )
    which = "the server" if space.servers == 1 else f"the {space.servers} servers"
    return (
        f"{url} has {total.objects} objects of {format_bytes(total.size_bytes)}{copies} and there is room for "
        f"{format_bytes(space.room_bytes)}: {which} may hold {format_bytes(space.capacity_bytes)}, of which other "
        f"buckets have {format_bytes(space.others_bytes)}. Load a smaller prefix, give up another bucket "
        "(`stoker cache evict`), give the servers more (`--capacity`), or load what fits with --force"
    )


def left_bytes(should_be_held_bytes: int, space: Space) -> int:
    """How much of what was loaded has certainly left again: the bucket holds less than that. 0: it cannot be told."""
    return 0 if space.unreachable else max(0, should_be_held_bytes - space.own_bytes)
