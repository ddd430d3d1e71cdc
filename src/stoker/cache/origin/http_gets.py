"""GETs over kept connections, at the price of little more than receiving their bodies.

It understands answers with a Content-Length. What else may come (chunks, redirects, compressed bodies) is for whoever
falls back on a whole HTTP client. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncGenerator
from typing import cast

from stoker.errors import OriginError, WireError
from stoker.wire.http import HEAD_BYTES_MAX, ResponseHead, parse_response_head
from stoker.wire.lost_peers import give_up_when_unheard

CONNECT_S = 10.0
SILENCE_S = 60.0
WHOLE_S = 300.0
"""Longer one answer is not waited for, however little of it comes at a time."""
IDLE_S = 30.0
"""What is kept for longer may be gone without a word: there are such networks."""
IDLE_MAX = 128
UNHEARD_S = 10.0
"""So long may pass before the other side's kernel says that it has a request."""
_LOST_S = 1.0
"""What was kept and ends after so long of waiting was lost on the way, and not closed by the server."""
_LOOK_EVERY_S = 5.0
_PARTS_MAX = 4
"""So many that nobody has taken may be in memory, of each answer."""
_HEAD_AT_ONCE = 4096


class Lost(Exception):
    """A connection ended before its answer did. `is_begun`: some of that had come, or was waited for long."""

    def __init__(self, why: str, is_begun: bool) -> None:
        super().__init__(why)
        self.is_begun = is_begun


class Connection(asyncio.BufferedProtocol):
    """One request at a time. Bodies are received straight into the parts that are handed out."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(_HEAD_AT_ONCE)
        self._head_bytes = 0
        self._part = bytearray()
        self._part_at = 0
        self._parts: deque[bytearray] = deque()
        self._left_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Lost | None = None
        self._is_paused = False
        self._is_ready = False
        self.answer: ResponseHead | None = None
        self.length_bytes: int | None = None
        """Of the body; None: it does not say, and is not taken."""
        self.silent_s = 0.0
        """Nothing has come for so long; whoever looks after connections counts it up."""
        self.waited_s = 0.0
        """So long all of the answer has been waited for."""

    @property
    def is_usable(self) -> bool:
        """Whether one can go on with it."""
        return self._lost is None

    @property
    def is_done(self) -> bool:
        """Whether all of the answer has come, and was taken."""
        return self.answer is not None and not self._left_bytes and not self._parts

    async def ask(self, request: bytes) -> ResponseHead:
        """The head of the answer; with a body of one part, once that is there as well. Raises Lost."""
        assert self._transport is not None
        self.answer, self._head_bytes, self._is_ready = None, 0, False
        self.silent_s = self.waited_s = 0.0
        self._transport.write(request)
        while (answer := self._ready()) is None:
            await self._news()
        return answer

    async def part(self) -> bytearray | None:
        """The next part of the body; None at its end. Raises Lost."""
        while not self._parts:
            if self.is_done and self.length_bytes is not None:
                return None
            await self._news()
        part = self._parts.popleft()
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return part

    def waited(self, seconds: float) -> None:
        """So much longer; it ends if that is too long."""
        self.silent_s += seconds
        self.waited_s += seconds
        if self.silent_s >= SILENCE_S or self.waited_s >= WHOLE_S:
            is_silent = self.silent_s >= SILENCE_S
            why = f"was silent for {self.silent_s:.0f} s" if is_silent else "sent too little for too long"
            self._lost = self._lost or Lost(f"it {why}", True)
            self._wake()
            self.end()

    def drop(self) -> None:
        """What has come and was not taken is not wanted."""
        self._parts.clear()

    def end(self, why: str = "it was given up") -> None:
        """Whoever waits is told why. Never raises."""
        self._fail(why)
        if self._transport is not None:
            self._transport.abort()

    # -- what the loop calls ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._left_bytes:
            return memoryview(self._part)[self._part_at :]
        if self._head_bytes == len(self._head):
            self._head = self._head + bytes(len(self._head))
        return memoryview(self._head)[self._head_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        self.silent_s = 0.0
        if self._left_bytes:
            self._came(nbytes)
        elif self.answer is not None:
            self.end("it sent what nobody had asked for")
        else:
            looked_at = max(0, self._head_bytes - 3)
            self._head_bytes += nbytes
            end = self._head.find(b"\r\n\r\n", looked_at, self._head_bytes)
            if end >= 0:
                self._begin(end)
            elif self._head_bytes > HEAD_BYTES_MAX:
                self.end("the head of its answer is too long")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc or "it closed the connection"))

    # -----------------------------------------------------------------------------------------------------------

    def _ready(self) -> ResponseHead | None:
        return self.answer if self._is_ready else None

    async def _news(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, why: str) -> None:
        if self._lost is None:
            self._lost = Lost(why, self._head_bytes > 0)
            self._wake()

    def _begin(self, end: int) -> None:
        """The head has come, and perhaps some of the body."""
        try:
            answer = parse_response_head(bytes(self._head[:end]))
        except WireError as error:
            self.end(str(error))
            return
        length = self.length_bytes = _length_of(answer)
        if length is None:
            # What it says may be enough; where it ends is not known, so nothing can follow.
            self.answer, self._is_ready = answer, True
            self._fail("it does not say how long its answer is")
            self._wake()
            return
        self.answer, self._left_bytes = answer, length
        if length == 0 or length > self._part_bytes:
            self._is_ready = True
            self._wake()
        body = bytes(self._head[end + 4 : self._head_bytes])
        if len(body) > length:
            self._fail("it sent more than it was asked for")
        self._part, self._part_at = bytearray(min(self._part_bytes, length)), 0
        while body and self._left_bytes:
            size_bytes = min(len(body), len(self._part) - self._part_at)
            self._part[self._part_at : self._part_at + size_bytes] = body[:size_bytes]
            body = body[size_bytes:]
            self._came(size_bytes)

    def _came(self, size_bytes: int) -> None:
        """So much more of the part that is coming in."""
        self._part_at += size_bytes
        self._left_bytes -= size_bytes
        if self._part_at < len(self._part):
            return
        self._parts.append(self._part)
        self._part, self._part_at = bytearray(min(self._part_bytes, self._left_bytes)), 0
        if self._left_bytes and len(self._parts) >= _PARTS_MAX and not self._is_paused:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()
        self._is_ready = True
        self._wake()

    @property
    def waits(self) -> bool:
        """Whether it is the other side that something is missing of."""
        return not self._is_paused and (self.answer is None or self._left_bytes > 0)


def _length_of(answer: ResponseHead) -> int | None:
    """Of its body; None: it does not say."""
    try:
        return answer.content_length if answer.status not in (204, 304) else 0
    except WireError:
        return None


class HttpGets:
    """Connections to one host. Its methods raise OriginError with `url` in it, which is for people."""

    def __init__(
        self, url: str, host: str, port: int, part_bytes: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._url = url
        self.tls = tls
        """For connections that are still to be made."""
        self._host = host
        self._port = port
        self._part_bytes = part_bytes
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def ask(self, request: bytes) -> tuple[ResponseHead, Connection]:
        """The head of the answer to a request. What it came on is given to `parts` or to `leave` in the end."""
        while True:
            kept = self._kept()
            connection = kept or await self._connect()
            if self._is_closed:
                connection.end()
                raise OriginError(f"{self._url} is not asked any more")
            self._busy.add(connection)
            began = asyncio.get_running_loop().time()
            if self._looking is None:
                self._looking = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)
            try:
                return await connection.ask(request), connection
            except Lost as error:
                self.leave(connection)
                if kept is None or error.is_begun:
                    raise OriginError(f"{self._url}: {error}") from None
                # It was closed while it was kept: the request has reached nobody.
                if asyncio.get_running_loop().time() - began > _LOST_S:
                    self.forget_kept()  # so are those that went the same way
            except BaseException:
                self.leave(connection)
                raise

    async def parts(self, connection: Connection) -> AsyncGenerator[bytearray, None]:
        """The parts of a body, as they come."""
        try:
            while (part := await connection.part()) is not None:
                yield part
        except Lost as error:
            raise OriginError(f"{self._url}: {error}") from None
        finally:
            self.leave(connection)

    def leave(self, connection: Connection) -> None:
        """Nothing is wanted any more of its answer."""
        if connection not in self._busy:
            return  # it was left before
        self._busy.discard(connection)
        answer = connection.answer
        if not connection.waits:
            connection.drop()
        is_kept = connection.is_done and connection.is_usable and answer is not None and not answer.closes
        if is_kept and len(self._idle) < IDLE_MAX:
            connection.silent_s = 0.0
            self._idle.append(connection)
        else:
            connection.end()

    def close(self) -> None:
        """End all connections, and make no others."""
        self._is_closed = True
        if self._looking is not None:
            self._looking.cancel()
        for connection in self._busy:
            connection.end()
        self._busy.clear()
        self.forget_kept()

    def forget_kept(self) -> None:
        """Those that are kept may have been lost without a word: others are made."""
        for connection in self._idle:
            connection.end()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop, why = asyncio.get_running_loop(), "its name has no address"
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
                for host in addresses:
                    try:
                        async with asyncio.timeout(CONNECT_S / len(addresses)):
                            transport, connection = await loop.create_connection(
                                lambda: Connection(self._part_bytes), host, self._port,
                                ssl=self.tls, server_hostname=self._host if self.tls else None,
                            )  # fmt: skip
                        give_up_when_unheard(transport.get_extra_info("socket"), UNHEARD_S)
                        return connection
                    except TimeoutError:
                        why = f"{host} does not answer"
                    except OSError as error:
                        why = error.strerror or str(error)
        except TimeoutError:
            why = f"none within {CONNECT_S:.0f} s"
        except OSError as error:
            why = error.strerror or str(error)
        raise OriginError(f"{self._url}: no connection: {why}")

    def _look(self) -> None:
        """End what has been silent for long: one timer for all costs less than one for each request."""
        for connection in self._busy:
            if connection.waits:
                connection.waited(_LOOK_EVERY_S)
        for connection in self._idle:
            connection.silent_s += _LOOK_EVERY_S
            if connection.silent_s >= IDLE_S:
                connection.end()
        self._idle = [connection for connection in self._idle if connection.is_usable]
        self._looking = None
        if self._idle or self._busy:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)
