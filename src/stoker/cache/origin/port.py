"""The origin port."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol, runtime_checkable

from stoker.errors import ObjectChanged, ObjectNotFound, OriginError, ShortBody
from stoker.wire.cache_api import ObjectInfo

Part = bytes | bytearray
"""Some of an object's content. Who yields it does not touch it again."""

STAGING = ".stoker-writes"
"""Where what is being written lies in folders: no part of a key, and never listed."""


MARK = "\0"
"""No key has it."""


class ReadRefused(OriginError):
    """An origin that answers does not let us read this. It says nothing of anything else there."""


class OriginCounters:
    """Requests made, and bytes of object content received and sent, since the origin was opened."""

    __slots__ = ("bytes_read", "bytes_written", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.bytes_read = 0
        self.bytes_written = 0


class Opened(NamedTuple):
    """An object as it was found, and its first bytes, which are still to come: as `Origin.stream` gives them. Whoever
    has it closes them."""

    info: ObjectInfo
    parts: AsyncGenerator[Part, None]


class Origin(Protocol):
    """Remote storage, as it is read; see `writing_port.py`. Every method may raise OriginError."""

    @property
    def url(self) -> str:
        """Where it is, for people, without secrets."""
        ...

    @property
    def counters(self) -> OriginCounters:
        """What it has cost so far."""
        ...

    async def stat(self, key: str) -> ObjectInfo:
        """Size and version of an object. Raises ObjectNotFound."""
        ...

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        """Bytes `[start, stop)` of that version: exactly so many, of exactly that version.

        Raises ObjectNotFound, ObjectChanged if the object is another version now, ShortBody if the origin
        sent another number of bytes.
        """
        ...

    def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[Part, None]:
        """Bytes `[start, stop)` of that version in parts, in order, as they come.

        Exactly so many, of exactly that version: nothing of another version is ever yielded, and the last
        part only once it is certain to be the last. Raises as `read`: ObjectNotFound, ObjectChanged,
        ShortBody, OriginError; all but the first possibly after parts were yielded.
        """
        ...

    async def open(self, key: str, stop: int) -> Opened:
        """Whatever version is there, with bytes `[0, min(stop, size))` of it: in one request where the storage can,
        else as `stat` and then `stream`. Raises as `stat`; its parts raise as those of `stream`.
        """
        ...

    def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        """Pages of at most `limit` objects, sorted by key: those under `prefix` that come after `after`."""
        ...

    async def close(self) -> None:
        """Give up connections. The origin is not used afterwards."""
        ...


@runtime_checkable
class ReadsThrough(Protocol):
    """An origin that is, or may be, a cache that has origins itself."""

    async def sites(self, asked: int) -> int:
        """How many fleets are read through, one behind the other, for a question that so many were asked before: it
        ends beyond SITES_MAX, which a circle reaches. Raises OriginError if that cannot be found out."""
        ...


async def sites_of(origin: Origin, asked: int) -> int:
    """The same of any origin."""
    return await origin.sites(asked) if isinstance(origin, ReadsThrough) else 0


class Entries(NamedTuple):
    """Some of what is right below a prefix: objects, and keys that end with a slash in place of all that begin so, both
    sorted. `after`: the last of them, and perhaps behind MARK what the origin calls that place; None: nothing
    follows."""

    objects: list[ObjectInfo]
    folders: list[str]
    after: str | None


@runtime_checkable
class ListsFolders(Protocol):
    """An origin that need not list what is in folders to tell of them."""

    async def folder(self, prefix: str, after: str | None, limit: int) -> Entries | None:
        """At most `limit` entries, those after another one; None: it cannot, or not this time. Raises OriginError."""
        ...


async def folder_of(origin: Origin, prefix: str, after: str | None, limit: int) -> Entries | None:
    """The same of any origin."""
    return await origin.folder(prefix, after, limit) if isinstance(origin, ListsFolders) else None


async def begun(parts: AsyncGenerator[Part, None]) -> AsyncGenerator[Part, None]:
    """Parts of which the first is nothing, which is taken here: a generator that nobody has begun with does not give up
    what it was given when it is closed."""
    await anext(parts)
    return parts


async def open_in_two(origin: Origin, key: str, stop: int) -> Opened:
    """`Origin.open` where one request cannot tell a version and bring bytes."""
    info = await origin.stat(key)
    stop = min(stop, info.size_bytes)
    return Opened(info, origin.stream(key, 0, stop, info.version) if stop else _nothing())


async def _nothing() -> AsyncGenerator[bytes, None]:
    none: tuple[bytes, ...] = ()
    for part in none:
        yield part


def not_found(url: str, key: str) -> ObjectNotFound:
    """The error for a key that is not there."""
    return ObjectNotFound(f"no object {key!r} in {url}")


def changed(url: str, key: str, wanted: str, found: str) -> ObjectChanged:
    """The error for an object that is another version now."""
    return ObjectChanged(f"{key!r} in {url} changed: version {wanted} was opened, {found} is there now")


def check_length(url: str, key: str, data: bytes, start: int, stop: int) -> bytes:
    """Return `data` if it is as long as asked. Raises ShortBody."""
    if len(data) != stop - start:
        raise wrong_length(url, key, len(data), start, stop)
    return data


def wrong_length(url: str, key: str, sent_bytes: int, start: int, stop: int) -> ShortBody:
    """The error for another number of bytes than was asked for, be they too few or too many."""
    return ShortBody(f"{url} sent {sent_bytes} bytes of {key!r} where [{start}, {stop}) is {stop - start}")
