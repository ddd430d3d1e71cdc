"""A bucket of another fleet of cache servers, as an origin.

Its servers are asked to be sure: their origin is asked for versions, so that what is known here is as old as `ttl_s`
here allows and no older. Bytes of a version never change, and come from what they hold. Where their origin fails, what
they still know is good, as far as their `stale_if_error_s` goes; unless somebody else can be asked (`is_sure`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from stoker.cache.origin.content import seconds_of
from stoker.cache.origin.fleet_servers import FleetServer, FleetServers, FleetUnreachable
from stoker.cache.origin.fleet_url import FleetPlace
from stoker.cache.origin.http_gets import Connection
from stoker.cache.origin.port import (
    Entries,
    Opened,
    OriginCounters,
    Part,
    ReadRefused,
    begun,
    changed,
    check_length,
    not_found,
    open_in_two,
    wrong_length,
)
from stoker.errors import (
    AccessDenied,
    ObjectChanged,
    ObjectNotFound,
    OriginError,
    StokerError,
    WireError,
)
from stoker.wire.cache_api import (
    LIST_LIMIT_MAX,
    ORIGIN,
    SITES,
    SITES_MAX,
    ObjectInfo,
    ObjectPage,
    ObjectStat,
    Sites,
)
from stoker.wire.cache_errors import failure_of
from stoker.wire.http import ResponseHead, etag_of, object_target, version_of

T = TypeVar("T")
_TO_BE_SURE = "Cache-Control: no-cache\r\n"
_SITES_S, _SITES_FAILED_S = 60.0, 5.0
"""So long it is believed how many fleets are read through; and after so long it is asked again where nobody knew."""
_ERROR_BYTES_MAX = 64 * 1024
_CONTENT_FIELDS = frozenset(
    (
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    )
)
_UNKNOWN_TYPE = "application/octet-stream"


class _Coming(NamedTuple):
    """Bytes `[start, stop)` that come on a connection, of an object of that version and size."""

    server: FleetServer
    connection: Connection
    start: int
    stop: int
    info: ObjectInfo


class OriginAway(OriginError):
    """The fleet answers, and its own origin cannot be asked."""


class _CameBack(Exception):
    """It was not there, and now it is: `version`."""

    def __init__(self, version: str) -> None:
        super().__init__(version)
        self.version = version


class FleetOrigin:
    """`mark`: of the origin that the bucket must be from there (`mark_of`), where that is known. `is_sure`: what its
    servers are not sure of is said by `known` alone. Lives on one event loop. Raises ConfigError."""

    def __init__(self, place: FleetPlace, *, is_sure: bool = False) -> None:
        self.url = place.url
        self.counters = OriginCounters()
        self.mark = ""
        self._bucket = place.bucket
        self._prefix = place.prefix
        self._servers = FleetServers(place)
        self._checking = asyncio.Lock()
        self._check: asyncio.Future[None] | None = None
        self._fleets: int | None = None
        self._checked_until = -1.0
        self._is_sure = is_sure

    async def stat(self, key: str) -> ObjectInfo:
        await self._check_sites()
        try:
            return await self._stat(key, _TO_BE_SURE)
        except (FleetUnreachable, ReadRefused):
            raise
        except OriginError:
            if self._is_sure:
                raise
            return await self._stat(key, "")

    async def known(self, key: str) -> ObjectInfo:
        """What its servers know, as old as that may be: their origin need not be there. Raises as `stat`."""
        await self._check_sites()
        return await self._stat(key, "")

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        async with aclosing(self.stream(key, start, stop, version)) as parts:
            data = b"".join([part async for part in parts])
        return check_length(self.url, key, data, start, stop)

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[Part, None]:
        await self._check_sites()
        if start == stop:
            return
        fields = f"Range: bytes={start}-{stop - 1}\r\nIf-Match: {etag_of(version)}\r\n"
        try:
            coming = await self._get(key, fields)
        except _CameBack as back:
            if back.version != version:
                raise changed(self.url, key, version, back.version) from None
            raise OriginError(f"{self.url} says of {key!r} that it is there, and that it is not") from None
        if coming is None:
            raise wrong_length(self.url, key, 0, start, stop)
        if coming.info.version != version:
            self._leave(coming)
            raise changed(self.url, key, version, coming.info.version)
        if (coming.start, coming.stop) != (start, stop):
            self._leave(coming)
            raise wrong_length(self.url, key, coming.stop - coming.start, start, stop)
        async with aclosing(await begun(self._parts(key, coming))) as parts:
            async for part in parts:
                yield part

    async def open(self, key: str, stop: int) -> Opened:
        await self._check_sites()
        coming = None
        if stop:
            try:
                coming = await self._get(key, f"Range: bytes=0-{stop - 1}\r\n{_TO_BE_SURE}")
            except (FleetUnreachable, ReadRefused):
                raise
            except _CameBack:
                coming = None
            except OriginError:
                if self._is_sure:
                    raise
                coming = None  # `stat` has another way
        if coming is None:
            return await open_in_two(self, key, stop)
        last = min(stop, coming.info.size_bytes)
        if (coming.start, coming.stop) != (0, last):
            self._leave(coming)
            raise wrong_length(self.url, key, coming.stop - coming.start, 0, last)
        return Opened(coming.info, await begun(self._parts(key, coming)))

    async def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        await self._check_sites()
        while True:
            query = {"prefix": self._prefix + prefix, "limit": str(min(limit, LIST_LIMIT_MAX))}
            if after is not None:
                query["after"] = self._prefix + after
            page = await self._call(f"list/{quote(self._bucket, safe='')}?{urlencode(query)}", ObjectPage)
            found = [
                msgspec.structs.replace(info, key=info.key.removeprefix(self._prefix))
                for info in page.objects
            ]
            if found:
                yield found
            if page.after is None:
                return
            if after is not None and self._prefix + after >= page.after:
                raise OriginError(f"{self.url} goes on with its list before {after!r}")
            after = page.after.removeprefix(self._prefix)

    async def folder(self, prefix: str, after: str | None, limit: int) -> Entries | None:
        """See `ListsFolders`."""
        await self._check_sites()
        inside = len(self._prefix)
        query = {"prefix": self._prefix + prefix, "limit": str(min(limit, LIST_LIMIT_MAX)), "delimiter": "/"}
        query |= {} if after is None else {"after": self._prefix + after}
        page = await self._call(f"list/{quote(self._bucket, safe='')}?{urlencode(query)}", ObjectPage)
        if page.folders is None:
            return None
        objects = [msgspec.structs.replace(info, key=info.key[inside:]) for info in page.objects]
        folders = [folder[inside:] for folder in page.folders]
        return Entries(objects, folders, None if page.after is None else page.after[inside:])

    async def sites(self, asked: int) -> int:
        """See `ReadsThrough`."""
        if asked >= SITES_MAX:
            return 1  # and who knows how many more
        said = await self._call(
            f"sites/{quote(self._bucket, safe='')}", Sites, fields=f"{SITES}: {asked + 1}\r\n"
        )
        return 1 + said.fleets

    async def close(self) -> None:
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)
        self._servers.close()

    async def _check_sites(self) -> None:
        """Raises OriginError where fleets read through each other: they would wait for each other for ever."""
        clock = asyncio.get_running_loop().time
        if clock() >= self._checked_until:
            if self._fleets is not None:
                self._check_meanwhile()
            else:
                async with self._checking:
                    if clock() >= self._checked_until:
                        await self._find_sites()
        if self._fleets is not None and self._fleets > SITES_MAX:
            raise OriginError(
                f"{self.url} is read through more than {SITES_MAX} fleets, one behind the other: perhaps one of them "
                "reads through itself; give one of them the origin itself"
            )

    def _check_meanwhile(self) -> None:
        """What was known holds until the answer comes: no reader waits for it."""
        if self._check is None or self._check.done():
            self._check = asyncio.ensure_future(self._find_sites())
            self._check.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _find_sites(self) -> None:
        """Raises FleetUnreachable."""
        clock = asyncio.get_running_loop().time
        try:
            self._fleets = await self.sites(0)
        except OriginError as error:
            # The answer may come later; what can be read until then says more than that.
            self._checked_until = clock() + _SITES_FAILED_S
            if isinstance(error, FleetUnreachable):
                raise
        else:
            self._checked_until = clock() + _SITES_S

    async def _stat(self, key: str, fields: str) -> ObjectInfo:
        target = f"stat{object_target(self._bucket, self._prefix + key)}"
        stat = await self._call(target, ObjectStat, fields=fields)
        if stat.is_absent:
            raise not_found(self.url, key)
        lines = dict(line.partition(": ")[::2] for line in stat.attributes.split("\r\n") if line)
        modified_s = seconds_of(lines.pop("Last-Modified", ""))
        return ObjectInfo(key, stat.size_bytes, stat.version, modified_s, tuple(lines.items()))

    async def _get(self, key: str, fields: str) -> _Coming | None:
        """What comes; None: no such bytes are in it. Raises ObjectNotFound, ObjectChanged, OriginError, _CameBack."""
        target = object_target(self._bucket, self._prefix + key)
        head, server, connection = await self._servers.get(target, fields + self._mark(), self._count)
        if head.status in (206, 416):
            coming = _coming(key, head, server, connection) if head.status == 206 else None
            if coming is None:
                server.gets.leave(connection)
            if head.status == 206 and coming is None:
                raise OriginError(f"{server.url} answers nonsense: {head.headers.get('content-range')!r}")
            return coming
        body = bytearray()
        async with aclosing(self._servers.parts(server, connection)) as parts:
            async for part in parts:
                body += part[: _ERROR_BYTES_MAX - len(body)]
        error = failure_of(head.status, body) if head.status >= 400 else WireError(f"answer {head.status}")
        if isinstance(error, ObjectNotFound):
            # It may be the bucket that is not there: /-/stat tells them apart.
            raise _CameBack((await self._stat(key, "")).version)
        raise self._failure(server.url, error)

    async def _parts(self, key: str, coming: _Coming) -> AsyncGenerator[Part, None]:
        """The first is nothing: see `begun`."""
        at = coming.start
        try:
            yield b""
        except BaseException:
            self._leave(coming)
            raise
        async with aclosing(self._servers.parts(coming.server, coming.connection)) as parts:
            async for part in parts:
                at += len(part)
                self.counters.bytes_read += len(part)
                yield part
        if at != coming.stop:
            raise wrong_length(self.url, key, at - coming.start, coming.start, coming.stop)

    async def _call(self, route: str, kind: type[T], *, fields: str = "") -> T:
        """The answer of one of the servers' own routes. Raises OriginError."""
        answer = await self._servers.call(f"/-/{route}", fields + self._mark(), self._count)
        if answer.status != 200:
            raise self._failure(self.url, failure_of(answer.status, answer.body), is_object=False)
        try:
            return msgspec.msgpack.decode(answer.body, type=kind)
        except ValueError as error:
            raise OriginError(f"{self.url} answers nonsense: {error}") from error

    def _failure(self, url: str, error: StokerError, *, is_object: bool = True) -> StokerError:
        if isinstance(error, ObjectChanged) and is_object:
            return error
        if isinstance(error, ObjectNotFound):
            return OriginError(f"{url} has no bucket {self._bucket!r} for us: {error}")
        if isinstance(error, AccessDenied):
            return ReadRefused(f"{url} does not let {self._servers.shown} read this: {error}")
        if isinstance(error, OriginError):
            return OriginAway(f"{url}: {error}")
        return OriginError(f"{url}: {error}")

    def _mark(self) -> str:
        return f"{ORIGIN}: {self.mark}\r\n" if self.mark else ""

    def _count(self) -> None:
        self.counters.requests += 1

    def _leave(self, coming: _Coming) -> None:
        coming.server.gets.leave(coming.connection)


def _coming(key: str, head: ResponseHead, server: FleetServer, connection: Connection) -> _Coming | None:
    """None where the answer does not say what it is."""
    fields = head.headers
    unit, _, rest = fields.get("content-range", "").partition(" ")
    span, _, size = rest.partition("/")
    first, _, last = span.partition("-")
    if unit != "bytes" or not all(n.isascii() and n.isdigit() and len(n) < 19 for n in (first, last, size)):
        return None
    start, stop = int(first), int(last) + 1
    if connection.length_bytes != stop - start or not fields.get("etag"):
        return None
    told = tuple(
        (name, value)
        for name, value in fields.items()
        if (name in _CONTENT_FIELDS or name.startswith("x-amz-meta-"))
        and (name, value) != ("content-type", _UNKNOWN_TYPE)
    )
    modified_s = seconds_of(fields.get("last-modified", ""))
    info = ObjectInfo(key, int(size), version_of(fields["etag"]), modified_s, told)
    return _Coming(server, connection, start, stop, info)
