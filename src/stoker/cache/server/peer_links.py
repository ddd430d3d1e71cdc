"""Kept connections to the other servers of the fleet, and how long they are waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from stoker.cache.server.inquiry import peer_headers
from stoker.errors import CacheUnavailable, StokerError, WireError
from stoker.wire.cache_api import MSGPACK
from stoker.wire.http import HEAD_BYTES_MAX, ResponseHead, parse_response_head
from stoker.wire.tls import ClientTls, explained

CONNECT_S = 2.0
SILENCE_S = 2.0
"""After so long a peer is asked whether it lives; while it does, it is waited for: its origin may be slow."""
PATIENCE_S = 120.0
_IDLE_MAX = 16

T = TypeVar("T")
_Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class PeerLinks:
    """Raises CacheUnavailable where a peer cannot be reached, or falls silent."""

    def __init__(self, token: str | None, tls: ClientTls, silence_s: float = SILENCE_S) -> None:
        self.silence_s = silence_s
        self._tls = tls
        self._idle: dict[str, deque[_Link]] = defaultdict(deque)
        self._headers = f"Accept: {MSGPACK}\r\n"
        self.authorization = "" if token is None else f"Bearer {token}"
        """What is shown to peers; empty: nothing."""
        if token is not None:
            self._headers += f"Authorization: {self.authorization}\r\n"

    @contextlib.asynccontextmanager
    async def asked(
        self, url: str, method: str, target: str, headers: str, body: bytes | None
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, ResponseHead], None]:
        """Send a request and read the head of its answer; the body is read inside. A kept connection that was closed
        meanwhile is no failure."""
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        async with self.exchange(url, method, target.encode(), headers + length, body or b"") as asked:
            yield asked

    @contextlib.asynccontextmanager
    async def exchange(
        self,
        url: str,
        method: str,
        target: bytes,
        headers: str,
        body: bytes | AsyncIterator[bytes],
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, ResponseHead], None]:
        """Send a request, whose target and headers are complete, and read the head of its answer; the body of that is
        read inside. A body that comes in parts is sent once, over a new connection."""
        head_lines = f" HTTP/1.1\r\nHost: peer\r\n{self._headers}{headers}{peer_headers()}\r\n".encode()
        request = method.encode() + b" " + target + head_lines
        is_at_once = isinstance(body, bytes)
        request += body if isinstance(body, bytes) else b""
        link: _Link | None = None
        is_whole = False
        try:
            while True:
                was_kept = bool(self._idle[url]) and is_at_once
                link = self._idle[url].pop() if was_kept else await self._connect(url)
                try:
                    link[1].write(request)
                    if not isinstance(body, bytes):
                        with contextlib.suppress(ConnectionError):  # it may have said why before
                            async for part in body:
                                link[1].write(part)
                                await self.patiently(url, link[1].drain())
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
            raise CacheUnavailable(f"{url} cannot be asked: {explained(error)}") from None
        finally:
            if link is not None:
                if is_whole and len(self._idle[url]) < _IDLE_MAX:
                    self._idle[url].append(link)
                else:
                    link[1].close()

    async def _connect(self, url: str) -> _Link:
        parts = urlsplit(url)
        tls = self._tls.context() if parts.scheme == "https" else None
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(parts.hostname, parts.port, limit=HEAD_BYTES_MAX, ssl=tls)

    async def _head(self, url: str, reader: asyncio.StreamReader) -> ResponseHead:
        return parse_response_head((await self.patiently(url, reader.readuntil(b"\r\n\r\n")))[:-4])

    async def body(self, url: str, reader: asyncio.StreamReader, head: ResponseHead) -> bytes:
        """All of it. Raises WireError for one in chunks."""
        length = head.content_length
        if length is None:
            raise WireError("a peer answered in chunks")
        return await self.patiently(url, reader.readexactly(length))

    async def patiently(self, url: str, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a peer as long as it lives. Raises TimeoutError."""
        task = asyncio.ensure_future(work)
        waited_s = 0.0
        try:
            while not (await asyncio.wait((task,), timeout=self.silence_s))[0]:
                waited_s += self.silence_s
                if waited_s >= PATIENCE_S or not await self.is_alive(url):
                    raise TimeoutError
            return task.result()
        finally:
            task.cancel()

    async def is_alive(self, url: str) -> bool:
        """Whether a peer answers at all."""
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, ValueError, StokerError):
            async with asyncio.timeout(self.silence_s):
                reader, writer = await self._connect(url)
                try:
                    writer.write(f"GET /-/health HTTP/1.1\r\nHost: peer\r\n{self._headers}\r\n".encode())
                    head = parse_response_head((await reader.readuntil(b"\r\n\r\n"))[:-4])
                    return head.status == 200
                finally:
                    writer.close()
        return False

    def keep(self, urls: Iterable[str]) -> None:
        """Close the kept connections to all others, and forget these."""
        urls = set(urls)
        for url in self._idle.keys() - urls:
            for _, writer in self._idle.pop(url):
                writer.close()

    async def close(self) -> None:
        """Close all kept connections."""
        for links in self._idle.values():
            for _, writer in links:
                writer.close()
        self._idle.clear()
