"""Asking the other servers of the fleet, over kept connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from stoker.cache.server.marks import Marks
from stoker.cache.server.peer_links import SILENCE_S, PeerLinks
from stoker.cache.summary import ENCODED_BYTES_MAX
from stoker.errors import CacheUnavailable, ShortBody, StokerError, WireError
from stoker.settings import ClientTlsFiles
from stoker.wire.cache_api import (
    HOPS,
    BucketAdded,
    BucketRemoved,
    BucketSpec,
    Evicted,
    FleetStatus,
    HeldAnswer,
    HeldQuery,
    ObjectPage,
    ObjectStat,
    Pins,
    Refreshed,
    target_below,
)
from stoker.wire.cache_errors import failure_of
from stoker.wire.cache_orders import Announced, Announcement, orders_target
from stoker.wire.http import ResponseHead, etag_of, object_target
from stoker.wire.tls import ClientTls

T = TypeVar("T")
_REFRESHING = "Cache-Control: no-cache\r\n"
_PART_BYTES = 256 * 1024

Block = tuple[str, str, int]


class PeerRefused(CacheUnavailable):
    """A peer does not take this server's token."""


class Peers:
    """Every method raises CacheUnavailable where the peer cannot be reached, falls silent, or refuses this server's
    token (PeerRefused), and what the peer says."""

    def __init__(self, token: str | None, tls: ClientTls | None = None, silence_s: float = SILENCE_S) -> None:
        self.links = PeerLinks(token, tls or ClientTls(ClientTlsFiles()), silence_s)
        self.marks = Marks()

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
        self,
        url: str,
        bucket: str,
        prefix: str,
        after: str | None,
        limit: int,
        hops: int,
        delimiter: str = "",
    ) -> ObjectPage:
        """A page of a list; with a delimiter, if the peer knows that, of what is right below the prefix."""
        query = {"prefix": prefix, "limit": str(limit)} | ({} if after is None else {"after": after})
        query |= {"delimiter": delimiter} if delimiter else {}
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

    async def remove_bucket(self, url: str, name: str, at_ms: int) -> BucketRemoved:
        """Tell a peer that an S3 client removed a bucket."""
        target = f"/-/buckets/{quote(name, safe='')}?at_ms={at_ms}"
        return await self._call(url, "DELETE", target, BucketRemoved, hops=1)

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
        async with self.links.asked(url, "GET", "/-/summary", "", None) as (reader, head):
            if (head.content_length or 0) > ENCODED_BYTES_MAX:
                raise WireError(f"{url} sends a summary of {head.content_length} bytes, which none has")
            said = await self.links.body(url, reader, head)
        if head.status >= 400:
            raise _failure(url, head, said)
        return said

    async def ask_about_blobs(self, url: str, route: str, question: object, kind: type[T]) -> T:
        """What servers ask each other about blobs: see `server/blobs/council.py`."""
        body = msgspec.msgpack.encode(question)
        return await self._call(url, "POST", f"/-/blobs/{route}", kind, body, hops=1)

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
        async with self.links.asked(url, "GET", object_target(bucket, key), headers, None) as (reader, head):
            if head.status >= 400:
                raise self.marks.refused(
                    url, bucket, _failure(url, head, await self.links.body(url, reader, head))
                )
            self.marks.agreed(url, bucket)
            left = head.content_length
            if head.status != 206 or left != stop - start:
                raise WireError(f"{url} answered {head.status} with {left} bytes for {stop - start}")
            while left:
                try:
                    part = await self.links.patiently(url, reader.read(min(left, _PART_BYTES)))
                except TimeoutError:
                    raise
                except OSError:
                    part = b""
                if not part:
                    # It may have broken off because its origin did: that is no reason to leave it out.
                    if await self.links.is_alive(url):
                        raise ShortBody(f"{url} broke off {left} bytes before the end")
                    raise ConnectionResetError("it closed the connection")
                left -= len(part)
                yield part

    async def fleet(self, url: str) -> FleetStatus:
        """Who a peer is, and how it sees the fleet; it must say so soon."""
        try:
            async with asyncio.timeout(self.links.silence_s):
                return await self._call(url, "GET", "/-/fleet", FleetStatus, hops=1)
        except TimeoutError:
            raise CacheUnavailable(f"{url} is silent") from None

    def keep(self, urls: Iterable[str]) -> None:
        """Close the kept connections to all others, and forget these."""
        self.marks.keep(set(urls))
        self.links.keep(urls)

    async def close(self) -> None:
        """Close all kept connections."""
        await self.links.close()

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
        async with self.links.asked(url, method, target, headers, body) as (reader, head):
            said = await self.links.body(url, reader, head)
        if head.status >= 400:
            raise self.marks.refused(url, bucket, _failure(url, head, said))
        self.marks.agreed(url, bucket)
        try:
            return msgspec.msgpack.decode(said, type=kind)
        except ValueError as error:
            raise WireError(f"the answer of {url} is not understood: {error}") from error


def _failure(url: str, head: ResponseHead, body: bytes) -> StokerError:
    error = failure_of(head.status, body)
    if isinstance(error, CacheUnavailable):
        return CacheUnavailable(f"{url} is leaving, or has no room for more connections")
    if head.status in (401, 403):
        return PeerRefused(f"{url} refuses our token: {error}")
    return error
