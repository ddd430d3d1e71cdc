"""HTTP requests of any kind over kept connections, against servers that say what no good server says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from stoker.cache.origin import http_calls
from stoker.cache.origin.http_calls import HttpCalls
from stoker.cache.origin.http_gets import HttpGets
from stoker.errors import OriginError, WireError

GET = b"GET /k HTTP/1.1\r\n\r\n"
PUT = b"PUT /k HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 20\r\n\r\n"
GO_AHEAD = b"HTTP/1.1 100 Continue\r\n\r\n"
Say = Callable[["Server", asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each head of a request by `say`; then the connection is kept, unless that has closed it."""

    def __init__(self, say: Say) -> None:
        self.connections = 0
        self.requests = 0
        self.closed: asyncio.Queue[int] = asyncio.Queue()
        self._say = say

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                await self._say(self, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.put_nowait(self.connections)
            writer.close()


def run(say: Say, story: Callable[[Server, HttpCalls], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        server = Server(say)
        listening = await asyncio.start_server(server.connected, "127.0.0.1", 0)
        calls = HttpCalls("http://origin", "127.0.0.1", listening.sockets[0].getsockname()[1], None)
        try:
            await story(server, calls)
        finally:
            calls.close()
            listening.close()
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(whole(), 60))


def says(*parts: bytes, closes: bool = False) -> Say:
    async def say(_: Server, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        if closes:
            writer.close()

    return say


def test_a_body_that_ends_with_its_connection_is_had_whole() -> None:
    async def story(_: Server, calls: HttpCalls) -> None:
        assert (await calls.call(GET)).body == b"in three parts"

    run(says(b"HTTP/1.1 200 OK\r\n\r\nin ", b"three ", b"parts", closes=True), story)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (CHUNKED + b"1;" + b"x" * 100_000, "a line between the parts"),
        (CHUNKED + b"3\r\nabcdef\r\n0\r\n\r\n", "not as long as it says"),
        (CHUNKED + b"-1\r\n", "too long"),
        (CHUNKED + b"nonsense\r\n", "invalid literal"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, "the head of its answer is too long"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", "its answer is too long"),
    ],
)
def test_nonsense_is_an_error_of_the_origin(said: bytes, why: str) -> None:
    async def story(_: Server, calls: HttpCalls) -> None:
        with pytest.raises(OriginError, match=why):
            await calls.call(GET, may_repeat=True)

    run(says(said), story)


@pytest.mark.parametrize("error", [WireError("theirs"), ConnectionError("theirs"), ValueError("theirs")])
def test_what_a_body_raises_is_raised_and_the_connection_is_not_kept(error: Exception) -> None:
    """It is not the origin that failed."""

    async def body() -> AsyncGenerator[bytes, None]:
        yield b"ten bytes."
        raise error

    async def story(server: Server, calls: HttpCalls) -> None:
        with pytest.raises(type(error), match="theirs"):
            await calls.send(PUT, body())
        await asyncio.wait_for(server.closed.get(), 20)

    run(says(GO_AHEAD), story)


def test_connections_that_nobody_wants_any_more_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_calls, "IDLE_S", 0.3)

    async def story(server: Server, calls: HttpCalls) -> None:
        await asyncio.gather(*(calls.call(GET) for _ in range(4)))
        assert server.connections == 4
        for _ in range(4):
            await asyncio.wait_for(server.closed.get(), 20)

    run(says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), story)


def test_nothing_is_kept_once_it_is_closed() -> None:
    is_asked, goes_on = asyncio.Event(), asyncio.Event()

    async def story(server: Server, calls: HttpCalls) -> None:
        asked = asyncio.ensure_future(calls.call(GET))
        await is_asked.wait()
        calls.close()
        goes_on.set()
        assert (await asked).status == 200
        await asyncio.wait_for(server.closed.get(), 20)

    async def late(_: Server, writer: asyncio.StreamWriter) -> None:
        is_asked.set()
        await goes_on.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    run(late, story)


def test_a_question_apart_is_on_a_connection_of_its_own() -> None:
    async def story(server: Server, calls: HttpCalls) -> None:
        await calls.call(GET)
        await calls.call(GET)
        assert server.connections == 1
        await calls.call(GET, is_apart=True)
        assert server.connections == 2
        calls.forget_kept()
        await calls.call(GET)
        assert server.connections == 3

    run(says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), story)


def test_the_kernel_looks_after_connections_whose_other_side_is_lost() -> None:
    """Nobody here could tell one from a slow answer."""

    async def story(server: Server, calls: HttpCalls) -> None:
        assert not server.connections
        gets = HttpGets("http://origin", "127.0.0.1", calls._port, 1000)
        await calls.call(GET)
        _, connection = await gets.ask(GET)
        transports = [calls._idle[0].writer.transport, connection._transport]
        for transport, unheard_ms in zip(transports, (60_000, 10_000), strict=True):
            assert transport is not None
            found = transport.get_extra_info("socket")
            assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 4
            assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == unheard_ms
        gets.close()

    run(says(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), story)
