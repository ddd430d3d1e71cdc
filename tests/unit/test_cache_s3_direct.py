"""Reads of S3 by GETs of our own, and what they leave to obstore."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cache.limits import OriginLimits
from stoker.cache.origin.guarded import GuardedOrigin
from stoker.cache.origin.obstore_origin import ObstoreOrigin
from stoker.cache.origin.s3_origin import open_s3
from stoker.errors import ObjectChanged, ObjectNotFound, StokerError

BODY = bytes(range(256)) * 8192
Say = Callable[[int, str, asyncio.StreamWriter], Awaitable[None]]


def whole(request: str, *, etag: str = '"v"', stop: int | None = None) -> bytes:
    """The range that was asked for; its body ends at `stop`."""
    asked = next(line for line in request.split("\r\n") if line.lower().startswith("range:"))
    first, last = (int(part) for part in asked.partition("=")[2].split("-"))
    body = BODY[first : last + 1]
    head = (
        f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(body)}\r\nETag: {etag}\r\n"
        f"Content-Range: bytes {first}-{first + len(body) - 1}/{len(BODY)}\r\n"
        "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n"
    )
    return head.encode("latin-1") + body[:stop]


def run(say: Say, story: Callable[[ObstoreOrigin], Coroutine[Any, Any, None]], **environment: str) -> None:
    """An origin at a server that answers each request by `say`, with its number and head."""
    requests = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                requests += 1
                await say(requests, head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def all_of_it() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        origin = open_s3("s3://b/p", {"endpoint": f"http://127.0.0.1:{port}"}, environment)
        try:
            await story(origin)
        finally:
            await origin.close()
            server.close()

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


def guarded(origin: ObstoreOrigin) -> GuardedOrigin:
    return GuardedOrigin(origin, OriginLimits(), SystemClock(), Rng(1))


def test_a_server_that_is_busy_for_a_moment_fails_nobody() -> None:
    async def say(number: int, head: str, writer: asyncio.StreamWriter) -> None:
        busy = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
        writer.write(busy if number <= 32 else whole(head))

    async def story(origin: ObstoreOrigin) -> None:
        reads = await asyncio.gather(*(guarded(origin).read(f"k{n}", 0, 100, '"v"') for n in range(32)))
        assert reads == [BODY[:100]] * 32

    run(say, story)


def test_what_is_missing_of_an_answer_is_asked_for_once_more() -> None:
    async def say(number: int, head: str, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            writer.write(whole(head, stop=1_100_000))
            writer.close()
        else:
            writer.write(whole(head))

    async def story(origin: ObstoreOrigin) -> None:
        assert await origin.read("k", 10, 2_000_000, '"v"') == BODY[10:2_000_000]

    run(say, story)


@pytest.mark.parametrize(
    ("status", "error"), [("404 Not Found", ObjectNotFound), ("412 Precondition Failed", ObjectChanged)]
)
def test_errors_in_chunks_are_what_they_are(status: str, error: type[StokerError]) -> None:
    async def say(number: int, head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n".encode())

    async def story(origin: ObstoreOrigin) -> None:
        with pytest.raises(error):
            await origin.read("k", 0, 10, '"v"')

    run(say, story)


@pytest.mark.parametrize("wrap", [lambda origin: origin, guarded])
def test_what_was_opened_and_is_not_wanted_is_given_up(wrap: Callable[[ObstoreOrigin], Any]) -> None:
    async def say(number: int, head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(head))

    async def story(origin: ObstoreOrigin) -> None:
        assert origin._direct is not None
        for number in range(5):
            opened = await wrap(origin).open(f"k{number}", len(BODY))
            await opened.parts.aclose()
        assert not origin._direct._gets._busy
        assert await origin.read("k", 0, 10, '"v"') == BODY[:10]

    run(say, story)


@pytest.mark.parametrize("etag", ["", '"\xe9"'])
def test_what_names_no_version_is_left_to_obstore(etag: str) -> None:
    async def say(number: int, head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(head, etag=etag))

    async def story(origin: ObstoreOrigin) -> None:
        try:
            opened = await origin.open("k", 10)
        except StokerError:
            return
        await opened.parts.aclose()
        assert opened.info.version.isascii()
        assert opened.info.version

    run(say, story)


@pytest.mark.parametrize("name", ["HTTP_PROXY", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"])
def test_settings_that_only_obstore_knows_are_its(name: str) -> None:
    assert open_s3("s3://b", {"endpoint": "http://h"}, {})._direct is not None
    assert open_s3("s3://b", {"endpoint": "http://h"}, {name: "true"})._direct is None
    assert open_s3("s3://b", {"endpoint": "https://h"}, {})._direct is None


@pytest.mark.parametrize(("etag", "version"), [('"abc-2"', "abc-2"), ('W/"abc"', 'W/"abc"')])
def test_a_version_is_the_tag_without_quotes_and_asked_for_with_them(etag: str, version: str) -> None:
    heads: list[str] = []

    async def say(number: int, head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.write(whole(head, etag=etag))

    async def story(origin: ObstoreOrigin) -> None:
        opened = await origin.open("k", 10)
        await opened.parts.aclose()
        assert opened.info.version == version
        assert await origin.read("k", 0, 10, version) == BODY[:10]
        assert f"if-match: {etag}\r\n" in heads[-1]
        # As an index of another time has it.
        assert await origin.read("k", 0, 10, etag) == BODY[:10]
        assert f"if-match: {etag}\r\n" in heads[-1]

    run(say, story)


def test_what_is_opened_tells_its_headers() -> None:
    told = "Content-Type: text/x\r\nCache-Control: no-store\r\nx-amz-meta-who: me\r\nx-amz-request-id: 1\r\n"

    async def say(number: int, head: str, writer: asyncio.StreamWriter) -> None:
        first, _, rest = whole(head).partition(b"\r\n")
        writer.write(first + b"\r\n" + told.encode() + rest)

    async def story(origin: ObstoreOrigin) -> None:
        opened = await origin.open("k", 10)
        await opened.parts.aclose()
        headers = (("cache-control", "no-store"), ("content-type", "text/x"), ("x-amz-meta-who", "me"))
        assert opened.info.headers == headers

    run(say, story)
