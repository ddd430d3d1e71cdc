"""GETs over kept connections, against servers that say what no good server says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from stoker.cache.origin import http_gets
from stoker.cache.origin.http_gets import HttpGets
from stoker.errors import OriginError

PART = 1000
BODY = random.Random(1).randbytes(4500)
Say = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each request by `say`, with the request's number; ends a connection where that returns after closing."""

    def __init__(self, say: Say) -> None:
        self.connections = 0
        self.requests = 0
        self.closed = 0
        self._say = say
        self._server: asyncio.Server | None = None

    async def start(self) -> HttpGets:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return HttpGets("http://origin", "127.0.0.1", port, PART)

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                await self._say(self.requests, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


def head(size_bytes: int, *fields: str) -> bytes:
    lines = ["HTTP/1.1 206 Partial Content", f"Content-Length: {size_bytes}", *fields]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def body(gets: HttpGets) -> list[bytes]:
    _, connection = await gets.ask(b"GET /k HTTP/1.1\r\n\r\n")
    async with aclosing(gets.parts(connection)) as parts:
        return [bytes(part) async for part in parts]


def run(say: Say, story: Callable[[Server, HttpGets], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        server = Server(say)
        gets = await server.start()
        try:
            await story(server, gets)
        finally:
            gets.close()
            server.stop()
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(whole(), 60))


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 4500])
@pytest.mark.parametrize("step", [1, 37, 999, 10_000])
def test_a_body_comes_in_parts_however_it_is_cut_up_on_the_way(size: int, step: int) -> None:
    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        said = head(size) + BODY[:size]
        for first in range(0, len(said), step):
            writer.write(said[first : first + step])
            if first % 8 == 0:
                await asyncio.sleep(0)

    async def story(server: Server, gets: HttpGets) -> None:
        for _ in range(3):
            parts = await body(gets)
            assert b"".join(parts) == BODY[:size]
            assert [len(part) for part in parts[:-1]] == [PART] * (len(parts) - 1)
        assert server.connections == 1

    run(say, story)


def test_what_is_asked_at_the_same_time_has_connections_of_its_own_which_are_kept() -> None:
    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(head(2) + b"%02d" % number)

    async def story(server: Server, gets: HttpGets) -> None:
        for _ in range(2):
            found = await asyncio.gather(*(body(gets) for _ in range(8)))
            assert len({b"".join(parts) for parts in found}) == 8
        assert (server.connections, server.requests) == (8, 16)

    run(say, story)


def test_a_connection_that_was_closed_while_it_was_kept_costs_nothing_but_another() -> None:
    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 2:
            writer.close()  # it ends just as it is asked again
            return
        writer.write(head(3) + b"%03d" % number)

    async def story(server: Server, gets: HttpGets) -> None:
        assert await body(gets) == [b"001"]
        assert await body(gets) == [b"003"]
        assert server.connections == 2

    run(say, story)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 206 Par", "closed"),
        (head(10) + b"123", "closed"),
        (head(4500) + BODY[:1500], "closed"),
        (b"nonsense\r\n\r\n", "not an HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "how long"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "how long"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, "too long"),
    ],
)
def test_what_ends_early_or_is_no_answer_is_an_origin_error(said: bytes, why: str) -> None:
    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async def story(server: Server, gets: HttpGets) -> None:
        for asked in (1, 2):
            with pytest.raises(OriginError, match=f"http://origin.*{why}"):
                await body(gets)
            assert server.connections == asked, "what was begun is not asked for again"

    run(say, story)


def test_what_comes_after_an_answer_is_nobodys() -> None:
    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(head(3) + b"abc" + (b"HTTP/1.1 206 injected" if number == 1 else b""))

    async def story(server: Server, gets: HttpGets) -> None:
        assert await body(gets) == [b"abc"]
        assert await body(gets) == [b"abc"]
        assert server.connections == 2

    run(say, story)


def test_an_answer_that_is_left_takes_its_connection_with_it() -> None:
    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(head(4500) + BODY[:1500])
        if number > 1:
            writer.write(BODY[1500:])

    async def story(server: Server, gets: HttpGets) -> None:
        _, connection = await gets.ask(b"GET /k HTTP/1.1\r\n\r\n")
        async with aclosing(gets.parts(connection)) as parts:
            assert await anext(parts) == BODY[:PART]
        waiting = asyncio.ensure_future(body(gets))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert b"".join(await body(gets)) == BODY

    run(say, story)


def test_who_takes_slowly_is_sent_no_more_than_a_few_parts() -> None:
    sent: list[int] = []

    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        size = 40_000_000
        writer.write(head(size))
        for _ in range(400):
            writer.write(bytes(size // 400))
            await writer.drain()
            sent.append(size // 400)

    async def story(server: Server, gets: HttpGets) -> None:
        _, connection = await gets.ask(b"GET /k HTTP/1.1\r\n\r\n")
        async with aclosing(gets.parts(connection)) as parts:
            await anext(parts)
            for _ in range(200):
                await asyncio.sleep(0.001)
            assert len(connection._parts) <= 64
            assert sum(sent) < 30_000_000, "what nobody takes stays where it is"

    run(say, story)


def test_silence_has_an_end_and_idle_connections_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gets, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(http_gets, "SILENCE_S", 0.05)
    monkeypatch.setattr(http_gets, "IDLE_S", 0.02)

    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(head(10) + (b"12345" if number == 1 else b"1234567890"))

    async def story(server: Server, gets: HttpGets) -> None:
        with pytest.raises(OriginError, match="silent"):
            await body(gets)
        monkeypatch.setattr(http_gets, "SILENCE_S", 60.0)
        assert await body(gets) == [b"1234567890"]
        while server.closed < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await body(gets) == [b"1234567890"]
        assert server.connections == 3

    run(say, story)


def test_an_answer_that_never_ends_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gets, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(http_gets, "WHOLE_S", 0.1)

    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(head(900))
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.005)

    async def story(server: Server, gets: HttpGets) -> None:
        with pytest.raises(OriginError, match="too little"):
            await body(gets)

    run(say, story)


def test_a_failure_is_told_whatever_its_answer_is_like_and_costs_no_connection() -> None:
    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 3:
            writer.write(b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nabc")

    async def story(server: Server, gets: HttpGets) -> None:
        for _ in range(4):
            answer, connection = await gets.ask(b"GET /k HTTP/1.1\r\n\r\n")
            assert answer.status == 404
            gets.leave(connection)
            gets.leave(connection)
        assert server.connections == 2, "only where it is not known where the answer ends"

    run(say, story)


def test_nobody_there_is_an_origin_error() -> None:
    async def story() -> None:
        gets = HttpGets("http://origin", "127.0.0.1", 1, PART)
        with pytest.raises(OriginError, match="http://origin: no connection"):
            await body(gets)

    asyncio.run(story())


def test_a_kept_connection_that_was_lost_is_given_up_with_those_that_went_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them would cost as long again."""
    monkeypatch.setattr(http_gets, "_LOST_S", 0.1)
    kept: list[asyncio.StreamWriter] = []
    are_all_there = asyncio.Event()

    async def say(number: int, writer: asyncio.StreamWriter) -> None:
        if number <= 4:
            kept.append(writer)
            if number == 4:
                are_all_there.set()
            await are_all_there.wait()
        elif writer in kept:
            await asyncio.sleep(0.3)
            writer.close()
            return
        writer.write(head(3) + b"yes")

    async def story(server: Server, gets: HttpGets) -> None:
        await asyncio.gather(*(body(gets) for _ in range(4)))
        assert await body(gets) == [b"yes"]
        assert server.connections == 5
        assert server.requests == 6, "one was lost, and one more made; the other kept ones were not tried"

    run(say, story)


def test_what_is_asked_of_connections_that_were_ended_makes_no_others() -> None:
    async def say(_: int, writer: asyncio.StreamWriter) -> None:
        writer.write(head(3) + b"yes")

    async def story(server: Server, gets: HttpGets) -> None:
        asked = asyncio.ensure_future(body(gets))
        await asyncio.sleep(0)  # it is about to connect
        gets.close()
        with pytest.raises(OriginError, match="not asked any more"):
            await asked
        assert server.requests == 0

    run(say, story)
