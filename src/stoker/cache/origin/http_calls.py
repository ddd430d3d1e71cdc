"""HTTP requests of any kind over kept connections, with bodies that are sent as they come, and answers that fit in
memory. For GETs of content see `http_gets.py`. Lives on one event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from stoker.errors import OriginBusy, OriginError, WireError
from stoker.wire.http import HEAD_BYTES_MAX, ResponseHead, parse_response_head
from stoker.wire.lost_peers import give_up_when_unheard

CONNECT_S = 10.0
GO_AHEAD_S = 1.0
"""So long a server is given to refuse a body before it is sent; many never say that they do not."""
STALL_S = 60.0
"""So long it may take none of a body."""
ANSWER_S = 300.0
"""So long it may take to answer once it has all: what puts large objects together takes its time."""
IDLE_S = 15.0
IDLE_MAX = 16
_EARLY_S = 0.1
_READ_BYTES = 256 * 1024
ANSWER_BYTES_MAX = 16 * 1024 * 1024


class Answer(NamedTuple):
    """What a server says, with all of its body."""

    status: int
    headers: dict[str, str]
    body: bytes


class _Stream:
    """A connection. `kept_until`: on the loop's clock."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.kept_until: float | None = None

    @property
    def is_usable(self) -> bool:
        return not (self.reader.at_eof() or self.writer.is_closing() or self.reader.exception())

    def end(self) -> None:
        """At once: what is half sent must not look like a whole."""
        self.writer.transport.abort()


class _Unanswered(Exception):
    """A connection broke before any of the answer came. `is_untouched`: and before any of a body went out."""

    def __init__(self, why: str, is_untouched: bool) -> None:
        super().__init__(why)
        self.is_untouched = is_untouched


class _BodyFailed(Exception):
    """What was to be sent could not be had: `error` is whose that is."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class HttpCalls:
    """Requests to one host. Raises OriginError with `url` in it, which is for people."""

    def __init__(self, url: str, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._url = url
        self._host = host
        self._port = port
        self.tls = tls
        """For connections that are still to be made."""
        self._idle: list[_Stream] = []
        self._is_closed = False
        self._ending: asyncio.TimerHandle | None = None

    async def call(
        self, request: bytes, *, is_head: bool = False, may_repeat: bool = False, is_apart: bool = False
    ) -> Answer:
        """Of a request with its body, if it has one. `may_repeat`: it does no harm if it is made twice. `is_apart`: on
        a connection of its own."""
        return await self._on_a_stream(request, None, is_head, may_repeat, is_apart=is_apart)

    async def send(self, head: bytes, body: AsyncGenerator[bytes, None]) -> Answer:
        """Of a request whose body is sent as it comes. The head says `Expect: 100-continue`: a server that refuses is
        not sent the body. Whatever the body raises is raised, and the server never has all of it."""
        async with aclosing(body):
            return await self._on_a_stream(head, body, False, True)

    def close(self) -> None:
        """End all connections that are kept, and keep none any more."""
        self._is_closed = True
        self.forget_kept()

    def forget_kept(self) -> None:
        """Those that are kept may have been lost without a word: others are made."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        for stream in self._idle:
            stream.end()
        self._idle.clear()

    async def _on_a_stream(
        self,
        head: bytes,
        body: AsyncGenerator[bytes, None] | None,
        is_head: bool,
        may_repeat: bool,
        *,
        is_apart: bool = False,
    ) -> Answer:
        while True:
            stream = (None if is_apart else self._kept()) or await self._connect()
            is_kept, is_good = stream.kept_until is not None, False
            try:
                answer, is_good = await self._exchange(stream, head, body, is_head)
                return answer
            except _BodyFailed as failed:
                raise failed.error from failed.error.__cause__
            except _Unanswered as error:
                # One that was closed while it was kept has brought nothing to anybody, as far as can be told.
                if not (is_kept and may_repeat and error.is_untouched):
                    raise OriginBusy(f"{self._url}: {error}") from None
                if isinstance(error.__cause__, TimeoutError):
                    self.forget_kept()  # it was lost, and so are those that went the same way
            except (WireError, ValueError) as error:
                raise OriginError(f"{self._url}: {error}") from None
            finally:
                self._leave(stream) if is_good else stream.end()

    async def _exchange(
        self, stream: _Stream, head: bytes, body: AsyncGenerator[bytes, None] | None, is_head: bool
    ) -> tuple[Answer, bool]:
        """The answer, and whether the connection is good for more."""
        go_ahead = asyncio.Event()
        answering = asyncio.ensure_future(_answer(stream.reader, go_ahead, is_head))
        is_all = body is None
        is_untouched = True
        try:
            stream.writer.write(head)
            if body is not None:
                await _either(answering, go_ahead)
                if not answering.done():
                    is_untouched = False
                    is_all = await _sent(stream.writer, body, answering)
            if not (await asyncio.wait((answering,), timeout=ANSWER_S))[0]:
                raise OriginError(f"{self._url}: no answer within {ANSWER_S:.0f} s")
            answer, closes = answering.result()
        except (EOFError, OSError) as error:
            raise _Unanswered(str(error) or "it closed the connection", is_untouched) from error
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        return answer, is_all and not closes

    def _kept(self) -> _Stream | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            stream = self._idle.pop()
            if stream.is_usable and (stream.kept_until or 0.0) > now:
                return stream
            stream.end()
        return None

    def _leave(self, stream: _Stream) -> None:
        if stream.is_usable and len(self._idle) < IDLE_MAX and not self._is_closed:
            loop = asyncio.get_running_loop()
            stream.kept_until = loop.time() + IDLE_S
            self._idle.append(stream)
            if self._ending is None:
                self._ending = loop.call_later(IDLE_S, self._end_old)
        else:
            stream.end()

    def _end_old(self) -> None:
        """Those that nobody has wanted for long: the first are the oldest."""
        loop = asyncio.get_running_loop()
        now = loop.time() + _EARLY_S
        while self._idle and (self._idle[0].kept_until or 0.0) <= now:
            self._idle.pop(0).end()
        left_s = ((self._idle[0].kept_until or 0.0) - loop.time()) if self._idle else 0.0
        self._ending = loop.call_later(left_s, self._end_old) if self._idle else None

    async def _connect(self) -> _Stream:
        try:
            async with asyncio.timeout(CONNECT_S):
                stream = _Stream(
                    *await asyncio.open_connection(self._host, self._port, ssl=self.tls, limit=HEAD_BYTES_MAX)
                )
            give_up_when_unheard(stream.writer.get_extra_info("socket"), STALL_S)
            return stream
        except TimeoutError:
            why = f"none within {CONNECT_S:.0f} s"
        except OSError as error:
            why = error.strerror or str(error)
        raise OriginBusy(f"{self._url}: no connection: {why}")


async def _either(answering: asyncio.Future[tuple[Answer, bool]], go_ahead: asyncio.Event) -> None:
    """Until the body is asked for, or refused, or neither comes."""
    going = asyncio.ensure_future(go_ahead.wait())
    both: set[asyncio.Future[Any]] = {answering, going}
    try:
        await asyncio.wait(both, timeout=GO_AHEAD_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        going.cancel()


async def _sent(
    writer: asyncio.StreamWriter,
    body: AsyncGenerator[bytes, None],
    answering: asyncio.Future[tuple[Answer, bool]],
) -> bool:
    """Whether all was sent: a server may have its answer before. Raises _BodyFailed, ConnectionError."""
    while True:
        try:
            part = await anext(body, None)
        except Exception as error:
            raise _BodyFailed(error) from error
        if part is None:
            return True
        if answering.done():
            return False
        try:
            writer.write(part)
            await asyncio.sleep(0)  # others have their turn, also where the kernel takes all at once
            async with asyncio.timeout(STALL_S):
                await writer.drain()
        except TimeoutError:
            raise ConnectionError(f"it took nothing for {STALL_S:.0f} s") from None
        except ConnectionError:
            await asyncio.wait([answering], timeout=GO_AHEAD_S)  # it may have said why
            if not answering.done():
                raise
            return False


async def _answer(
    reader: asyncio.StreamReader, go_ahead: asyncio.Event, is_head: bool
) -> tuple[Answer, bool]:
    """And whether the connection ends with it."""
    while True:
        try:
            head = parse_response_head((await reader.readuntil(b"\r\n\r\n"))[:-4])
        except asyncio.LimitOverrunError:
            raise WireError("the head of its answer is too long") from None
        if head.status >= 200:
            break
        go_ahead.set()
    if is_head or head.status in (204, 304):
        return Answer(head.status, head.headers, b""), head.closes
    body, is_framed = await _body(reader, head)
    return Answer(head.status, head.headers, body), head.closes or not is_framed


async def _body(reader: asyncio.StreamReader, head: ResponseHead) -> tuple[bytes, bool]:
    """And whether it had an end of its own."""
    if "content-length" not in head.headers and "transfer-encoding" not in head.headers:
        return await _until_its_end(reader), False
    length = head.content_length
    if length is not None:
        if length > ANSWER_BYTES_MAX:
            raise WireError(f"its answer is too long ({length} bytes)")
        return await reader.readexactly(length), True
    try:
        return await _chunks(reader), True
    except asyncio.LimitOverrunError:
        raise WireError("a line between the parts of its answer is too long") from None


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        if size < 0 or len(body) + size > ANSWER_BYTES_MAX:
            raise WireError("its answer is too long")
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise WireError("a part of its answer is not as long as it says")
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return bytes(body)


async def _until_its_end(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while part := await reader.read(_READ_BYTES):
        body += part
        if len(body) > ANSWER_BYTES_MAX:
            raise WireError("its answer is too long")
    return bytes(body)
