"""Asking the other servers of the fleet, over kept connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from stoker.cache.server.marks import Marks
from stoker.cache.summary import ENCODED_BYTES_MAX
from stoker.errors import CacheUnavailable, ShortBody, StokerError, WireError
from stoker.wire.cache_api import (
    HOPS,
    MSGPACK,
    BucketAdded,
    BucketSpec,
    Evicted,
    FleetStatus,
    HeldAnswer,
    HeldQuery,
    ObjectPage,
    ObjectStat,
    Pins,
    Refreshed,
    failure_of,
    target_below,
)
from stoker.wire.cache_orders import Announced, Announcement, orders_target
from stoker.wire.http import HEAD_BYTES_MAX, ResponseHead, etag_of, object_target, parse_response_head

T = TypeVar("T")
CONNECT_S = 2.0
SILENCE_S = 2.0
"""After so long a peer is asked whether it lives; while it does, it is waited for: its origin may be slow."""
PATIENCE_S = 120.0
_IDLE_MAX = 16
_REFRESHING = "Cache-Control: no-cache\r\n"
_PART_BYTES = 256 * 1024

Block = tuple[str, str, int]
_Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PeerRefused(CacheUnavailable):
    """A peer does not take this server's token."""


class Peers:
    """Every method raises CacheUnavailable where the peer cannot be reached, falls silent, or refuses this server's
    token (PeerRefused), and what the peer says."""

    def __init__(self, token: str | None, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._idle: dict[str, deque[_Link]] = defaultdict(deque)
        self.marks = Marks()
        self._headers = f"Accept: {MSGPACK}\r\n"
        if token is not None:
            self._headers += f"Authorization: Bearer {token}\r\n"

    async def stat(
        self, url: str, bucket: str, key: str, hops: int, *, is_refreshing: bool = False, begins: bool = False
    ) -> ObjectStat:
        """What a peer knows of a key; as the owner it asks the origin, where it must or is to. If it `begins`, the
        peer's first block of it is wanted next."""
        target = f"/-/stat{object_target(bucket, key)}" + ("?begins=1" if begins else "")
        return await self._call(
            url,
            "GET",
            target,
            ObjectStat,
            hops=hops,
            headers=_REFRESHING if is_refreshing else "",
            bucket=bucket,
        )

    async def list_page(
        self, url: str, bucket: str, prefix: str, after: str | None, limit: int, hops: int
    ) -> ObjectPage:
        """A page of a list."""
        query = {"prefix": prefix, "limit": str(limit)} | ({} if after is None else {"after": after})
        target = f"/-/list/{quote(bucket, safe='')}?{urlencode(query)}"
        return await self._call(url, "GET", target, ObjectPage, hops=hops, bucket=bucket)

    async def refresh(self, url: str, bucket: str, prefix: str, hops: int) -> Refreshed:
        """Have a peer drop what it knows under a prefix."""
        return await self._call(
            url, "POST", target_below("refresh", bucket, prefix), Refreshed, b"", hops=hops
        )

    async def held(self, url: str, bucket: str, blocks: Sequence[Block]) -> HeldAnswer:
        """Which of these blocks a peer holds."""
        return await self._about("held", url, bucket, blocks)

    async def fetch(self, url: str, bucket: str, blocks: Sequence[Block], age_s: int = 0) -> HeldAnswer:
        """Have a peer fetch what it does not hold of these blocks, for a load that is so old; which it holds then."""
        return await self._about("fetch", url, bucket, blocks, age_s)

    async def add_bucket(
        self, url: str, name: str, spec: BucketSpec, *, is_check: bool = False
    ) -> BucketAdded:
        """Have a peer add a bucket, or only say whether it would, and tell nobody."""
        target = f"/-/buckets/{quote(name, safe='')}{'?check=1' if is_check else ''}"
        return await self._call(url, "PUT", target, BucketAdded, msgspec.json.encode(spec), hops=1)

    async def evict(self, url: str, bucket: str, prefix: str) -> Evicted:
        """Have a peer give up what it holds under a prefix."""
        return await self._call(url, "POST", target_below("evict", bucket, prefix), Evicted, b"", hops=1)

    async def pin(self, url: str, bucket: str, prefix: str, *, is_pinned: bool) -> Pins:
        """Have a peer keep what lies under a prefix, or no longer."""
        method = "PUT" if is_pinned else "DELETE"
        return await self._call(url, method, target_below("pin", bucket, prefix), Pins, b"", hops=1)

    async def announce(self, url: str, bucket: str, said: Announcement) -> Announced:
        """Hand on to an owner what is read of what it owns."""
        body = msgspec.msgpack.encode(said)
        return await self._call(
            url, "POST", orders_target(bucket, said.stream), Announced, body, bucket=bucket
        )

    async def withdraw(self, url: str, bucket: str, stream: str) -> Announced:
        """A stream of which parts were handed on to an owner goes on no more."""
        return await self._call(
            url, "DELETE", orders_target(bucket, stream, is_owned=True), Announced, bucket=bucket
        )

    async def summary(self, url: str) -> bytes:
        """What a peer holds, encoded; see `cache/summary.py`."""
        async with self._asked(url, "GET", "/-/summary", "", None) as (reader, head):
            if (head.content_length or 0) > ENCODED_BYTES_MAX:
                raise WireError(f"{url} sends a summary of {head.content_length} bytes, which none has")
            said = await self._body(url, reader, head)
        if head.status >= 400:
            raise _failure(url, head, said)
        return said

    async def _about(
        self, route: str, url: str, bucket: str, blocks: Sequence[Block], age_s: int = 0
    ) -> HeldAnswer:
        body = msgspec.msgpack.encode(HeldQuery(list(blocks), age_s))
        target = f"/-/{route}/{quote(bucket, safe='')}"
        answer = await self._call(url, "POST", target, HeldAnswer, body, bucket=bucket)
        if len(answer.held) != len(blocks):
            raise WireError(
                f"{url} said {len(answer.held)} times of {len(blocks)} blocks whether it holds them"
            )
        return answer

    async def stream(
        self, url: str, bucket: str, key: str, start: int, stop: int, version: str, hops: int
    ) -> AsyncGenerator[bytes, None]:
        """Bytes `[start, stop)` of that version, as they come."""
        headers = f"Range: bytes={start}-{stop - 1}\r\nIf-Match: {etag_of(version)}\r\n{HOPS}: {hops}\r\n"
        headers += self.marks.header(bucket)
        async with self._asked(url, "GET", object_target(bucket, key), headers, None) as (reader, head):
            if head.status >= 400:
                raise self.marks.refused(
                    url, bucket, _failure(url, head, await self._body(url, reader, head))
                )
            self.marks.agreed(url, bucket)
            left = head.content_length
            if head.status != 206 or left != stop - start:
                raise WireError(f"{url} answered {head.status} with {left} bytes for {stop - start}")
            while left:
                try:
                    part = await self._patiently(url, reader.read(min(left, _PART_BYTES)))
                except TimeoutError:
                    raise
                except OSError:
                    part = b""
                if not part:
                    # It may have broken off because its origin did: that is no reason to leave it out.
                    if await self.is_alive(url):
                        raise ShortBody(f"{url} broke off {left} bytes before the end")
                    raise ConnectionResetError("it closed the connection")
                left -= len(part)
                yield part

    async def fleet(self, url: str) -> FleetStatus:
        """Who a peer is, and how it sees the fleet; it must say so soon."""
        try:
            async with asyncio.timeout(self._silence_s):
                return await self._call(url, "GET", "/-/fleet", FleetStatus, hops=1)
        except TimeoutError:
            raise CacheUnavailable(f"{url} is silent") from None

    async def is_alive(self, url: str) -> bool:
        """Whether a peer answers at all."""
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, ValueError, StokerError):
            async with asyncio.timeout(self._silence_s):
                reader, writer = await self._connect(url)
                try:
                    writer.write(f"GET /-/health HTTP/1.1\r\nHost: peer\r\n{self._headers}\r\n".encode())
                    head = parse_response_head((await reader.readuntil(b"\r\n\r\n"))[:-4])
                    return head.status == 200
                finally:
                    writer.close()
        return False

    async def close(self) -> None:
        """Close all kept connections."""
        for links in self._idle.values():
            for _, writer in links:
                writer.close()
        self._idle.clear()

    async def _call(
        self,
        url: str,
        method: str,
        target: str,
        kind: type[T],
        body: bytes | None = None,
        *,
        hops: int = 0,
        headers: str = "",
        bucket: str = "",
    ) -> T:
        """`bucket`: what it is about, if the peer must have that from the same origin."""
        headers += self.marks.header(bucket)
        if hops:
            headers += f"{HOPS}: {hops}\r\n"
        async with self._asked(url, method, target, headers, body) as (reader, head):
            said = await self._body(url, reader, head)
        if head.status >= 400:
            raise self.marks.refused(url, bucket, _failure(url, head, said))
        self.marks.agreed(url, bucket)
        try:
            return msgspec.msgpack.decode(said, type=kind)
        except ValueError as error:
            raise WireError(f"the answer of {url} is not understood: {error}") from error

    @contextlib.asynccontextmanager
    async def _asked(
        self, url: str, method: str, target: str, headers: str, body: bytes | None
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, ResponseHead], None]:
        """Send a request and read the head of its answer; the body is read inside. A kept connection that was closed
        meanwhile is no failure."""
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        request = f"{method} {target} HTTP/1.1\r\nHost: peer\r\n{self._headers}{headers}{length}\r\n".encode()
        request += body or b""
        link: _Link | None = None
        is_whole = False
        try:
            while True:
                was_kept = bool(self._idle[url])
                link = self._idle[url].pop() if was_kept else await self._connect(url)
                try:
                    link[1].write(request)
                    head = await self._head(url, link[0])
                    break
                except TimeoutError:
                    raise
                except (OSError, EOFError, asyncio.IncompleteReadError):
                    link[1].close()
                    link = None
                    if not was_kept:
                        raise
            yield link[0], head
            is_whole = not head.closes
        except TimeoutError:
            raise CacheUnavailable(f"{url} is silent") from None
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:  # of a URL that cannot be
            raise CacheUnavailable(f"{url} cannot be asked: {error or type(error).__name__}") from None
        finally:
            if link is not None:
                if is_whole and len(self._idle[url]) < _IDLE_MAX:
                    self._idle[url].append(link)
                else:
                    link[1].close()

    def keep(self, urls: Iterable[str]) -> None:
        """Close the kept connections to all others, and forget these."""
        urls = set(urls)
        self.marks.keep(urls)
        for url in self._idle.keys() - urls:
            for _, writer in self._idle.pop(url):
                writer.close()

    async def _connect(self, url: str) -> _Link:
        parts = urlsplit(url)
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(parts.hostname, parts.port, limit=HEAD_BYTES_MAX)

    async def _head(self, url: str, reader: asyncio.StreamReader) -> ResponseHead:
        return parse_response_head((await self._patiently(url, reader.readuntil(b"\r\n\r\n")))[:-4])

    async def _body(self, url: str, reader: asyncio.StreamReader, head: ResponseHead) -> bytes:
        length = head.content_length
        if length is None:
            raise WireError("a peer answered in chunks")
        return await self._patiently(url, reader.readexactly(length))

    async def _patiently(self, url: str, reading: Coroutine[Any, Any, bytes]) -> bytes:
        """Wait for a peer as long as it lives. Raises TimeoutError."""
        task = asyncio.ensure_future(reading)
        waited_s = 0.0
        try:
            while not (await asyncio.wait((task,), timeout=self._silence_s))[0]:
                waited_s += self._silence_s
                if waited_s >= PATIENCE_S or not await self.is_alive(url):
                    raise TimeoutError
            return task.result()
        finally:
            task.cancel()


def _failure(url: str, head: ResponseHead, body: bytes) -> StokerError:
    error = failure_of(head.status, body)
    if isinstance(error, CacheUnavailable):
        return CacheUnavailable(f"{url} is leaving, or has no room for more connections")
    if head.status in (401, 403):
        return PeerRefused(f"{url} refuses our token: {error}")
    return error
