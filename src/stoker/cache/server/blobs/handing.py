"""Requests for blobs that other servers own: they are handed on, bodies and answers as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing

from stoker.cache.blobs.keys import BlobName
from stoker.cache.blobs.votes import Said
from stoker.cache.maglev import block_owner_name
from stoker.cache.server.blobs.buckets import BlobBucket
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.port import Answer, Request
from stoker.errors import CacheUnavailable, ObjectNotFound, ShortBody, WireError
from stoker.wire.cache_api import HOPS, HOPS_MAX
from stoker.wire.http import ResponseHead, etag_of, version_of

SILENCE_S = 30.0
_PART_BYTES = 256 * 1024
_ASKED = (b"range", b"if-range", b"if-match", b"if-none-match")
_TOLD = ("etag", "content-type", "accept-ranges", "content-range")


class _ReaderGone(WireError):
    """Who asked is gone: that is no fault of the server that was asked in turn."""


class Handing:
    """Of one server of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def read(self, bucket: BlobBucket, name: BlobName, request: Request, answer: Answer) -> bool:
        """Whether the owner answered; False: this server is to. Raises ObjectNotFound if that has no such blob."""
        headers = "".join(
            f"{which.decode()}: {said}\r\n" for which in _ASKED if (said := request.header(which)) is not None
        )
        for peer, url in self._candidates(bucket, name):
            try:
                async with self._fleet.peers.links.exchange(
                    url, request.method, name.target, f"{headers}{HOPS}: 1\r\n", b""
                ) as (reader, head):
                    if head.status == 404:
                        await _thrown_away(reader, head, request.method)
                        raise ObjectNotFound(f"no blob {name.key!r} in {bucket.name!r}")
                    if head.status < 500:
                        await _passed_on(reader, head, answer, request, bucket)
                        return True
                    await _thrown_away(reader, head, request.method)
            except (_ReaderGone, ShortBody) as error:
                raise ConnectionAbortedError(str(error)) from error
            except CacheUnavailable as error:
                self._fleet.lost(peer, error)
                if answer.has_started:
                    raise ConnectionAbortedError(str(error)) from error
        return False

    async def write(
        self, bucket: BlobBucket, name: BlobName, request: Request, size_bytes: int, answer: Answer
    ) -> bool:
        """Whether the owner answered; False: this server is to. Raises CacheUnavailable if it broke off: who has begun
        with it may end it later, so that nobody else is to."""
        parts = _Handed(request)
        for peer, url in self._candidates(bucket, name):
            try:
                async with self._fleet.peers.links.exchange(
                    url,
                    request.method,
                    name.target,
                    f"Content-Length: {size_bytes}\r\n{HOPS}: 1\r\n",
                    aiter(parts),
                ) as (reader, head):
                    await _passed_on(reader, head, answer, request, None)
                    return True
            except (_ReaderGone, ShortBody) as error:
                raise ConnectionAbortedError(str(error)) from error
            except CacheUnavailable as error:
                self._fleet.lost(peer, error)
                if answer.has_started:
                    raise ConnectionAbortedError(str(error)) from error
                if parts.has_begun:
                    raise
        return False

    async def content(self, holder: str, name: BlobName, newest: Said) -> AsyncGenerator[bytes, None]:
        """The bytes of a version, from a server that holds it. Raises CacheUnavailable, ObjectNotFound, ShortBody."""
        url = self._fleet.url(holder)
        if url is None:
            raise CacheUnavailable(f"{holder} is not in the fleet any more")
        headers = f"If-Match: {etag_of(newest.version)}\r\n{HOPS}: {HOPS_MAX}\r\n"
        async with self._fleet.peers.links.exchange(url, "GET", name.target, headers, b"") as (reader, head):
            is_it = head.status == 200 and version_of(head.headers.get("etag", "")) == newest.version
            if not is_it or head.content_length != newest.size_bytes:
                await _thrown_away(reader, head, "GET")
                raise ObjectNotFound(f"{holder} has another version by now")
            async with aclosing(_parts(reader, newest.size_bytes)) as parts:
                async for part in parts:
                    yield part

    def _candidates(self, bucket: BlobBucket, name: BlobName) -> Iterator[tuple[str, str]]:
        """The owner, and who stands in for it while it cannot be reached."""
        return self._fleet.candidates(block_owner_name(bucket.name, name.key, 0), 1, 0)


class _Handed:
    """A body, and whether anybody was sent the request that it belongs to."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.has_begun = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.has_begun = True
        if self._request.parts is not None:
            async for part in self._request.parts:
                yield part


async def _passed_on(
    reader: asyncio.StreamReader,
    head: ResponseHead,
    answer: Answer,
    request: Request,
    bucket: BlobBucket | None,
) -> None:
    length = head.content_length or 0
    headers = [(name, head.headers[name]) for name in _TOLD if name in head.headers]
    if request.parts is not None and not request.parts.is_over:
        headers.append(("Connection", "close"))  # the front closes it, for the rest of the body is not read
    answer.start(head.status, headers, length)
    if request.method != "HEAD":
        async with aclosing(_parts(reader, length)) as parts:
            async for part in parts:
                answer.data(part)
                if bucket is not None:
                    bucket.peer_bytes += len(part)
                try:
                    await answer.drain()
                except ConnectionError as error:
                    raise _ReaderGone(str(error)) from error
    answer.finish()


async def _thrown_away(reader: asyncio.StreamReader, head: ResponseHead, method: str) -> None:
    if method != "HEAD":
        async with aclosing(_parts(reader, head.content_length or 0)) as parts:
            async for _ in parts:
                pass


async def _parts(reader: asyncio.StreamReader, size_bytes: int) -> AsyncGenerator[bytes, None]:
    """Raises ShortBody; TimeoutError, which `exchange` takes for silence."""
    left = size_bytes
    while left:
        async with asyncio.timeout(SILENCE_S):
            part = await reader.read(min(left, _PART_BYTES))
        if not part:
            raise ShortBody(f"a server broke off {left} bytes before the end")
        left -= len(part)
        yield part
