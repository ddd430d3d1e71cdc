"""HTTP/1.1 on one connection of the master's port, or of another small one: keep-alive, requests one after the other,
bounded in size and time.

Heads are parsed by httptools (llhttp). A request's body needs a Content-Length: who sends chunks is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import httptools

from stoker.job.control.response import Refusal, Response
from stoker.job.control.router import too_large
from stoker.wire.control import BODY_BYTES_MAX
from stoker.wire.stream import MAX_HEAD_BYTES, STREAM_PATH, UPGRADE, Head

OnUpgrade = Callable[[Head, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_LINGER_S = 1.0
_LINGER_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """Waiting times of one connection, in seconds."""

    first_s: float = 10.0
    """For the first byte of the first request."""
    idle_s: float = 75.0
    """For the first byte of a later one: how long a connection is kept for nothing."""
    request_s: float = 10.0
    """From a request's first byte to its last."""
    send_s: float = 30.0
    """For a reader to take what was written."""
    body_bytes_max: int = BODY_BYTES_MAX


class Router(Protocol):
    """Answers the requests of a port; header names are in lower case."""

    def is_authorized(self, headers: Mapping[str, str]) -> bool:
        """Whether bodies are read from who sends these."""
        ...

    def unauthorized(self) -> Refusal:
        """What others are told."""
        ...

    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Answer one request. Never raises."""
        ...


class _Request:
    """What httptools says about a head."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.wants_upgrade = False
        self.method = ""
        self.version = ""
        self.keep_alive = False
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, raw: bytes) -> None:
        """Take a whole head. Raises HttpParserError."""
        try:
            self._parser.feed_data(raw)
        except httptools.HttpParserUpgrade:
            self.wants_upgrade = True

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        self.is_complete = True
        self.method = self._parser.get_method().decode("latin-1")
        self.version = self._parser.get_http_version()
        self.keep_alive = self._parser.should_keep_alive()  # only now: the parser forgets it with the message

    @property
    def path(self) -> str:
        return self.target.decode("latin-1").partition("?")[0]


async def serve_connection(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    router: Router,
    *,
    on_upgrade: OnUpgrade | None = None,
    limits: Limits | None = None,
) -> None:
    """Answer requests until the peer hangs up, is too slow or sends nonsense; then close.

    `GET /v1/stream` with the job's token and `Upgrade: stoker-frames/1` is handed to `on_upgrade`, if there is one,
    which writes the 101 itself and owns both streams until it returns.
    """
    limits = limits or Limits()
    try:
        await _serve(reader, writer, router, on_upgrade, limits)
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
        writer.transport.abort()
    finally:
        await _close(writer)


async def _serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    router: Router,
    on_upgrade: OnUpgrade | None,
    limits: Limits,
) -> None:
    wait_s = limits.first_s
    while True:
        try:
            request = await _read_head(reader, wait_s, limits.request_s)
            if request is None:
                return
            if on_upgrade is not None and request.method == "GET" and request.path == STREAM_PATH:
                await on_upgrade(_upgrade_head(request, router), reader, writer)
                return
            body = await _read_body(reader, writer, request, router, limits)
        except Refusal as refusal:
            await _refuse(reader, writer, refusal.response, limits.send_s)
            return
        response = await router.handle(
            request.method, request.target.decode("latin-1"), request.headers, body
        )
        await _send(writer, response, request, limits.send_s)
        if not request.keep_alive:
            return
        wait_s = limits.idle_s


async def _read_head(reader: asyncio.StreamReader, wait_s: float, request_s: float) -> _Request | None:
    """The next request's head; None where the peer has no more to say. Raises Refusal, TimeoutError."""
    try:
        async with asyncio.timeout(wait_s):
            first = await reader.read(1)
    except TimeoutError:
        return None
    if not first:
        return None
    try:
        async with asyncio.timeout(request_s):
            raw = first + await reader.readuntil(b"\r\n\r\n")
    except TimeoutError:
        raise Refusal(
            "slow_request", f"no whole request came within {request_s:g} s", "send it at once"
        ) from None
    except asyncio.LimitOverrunError:
        raise _head_too_large() from None
    if len(raw) > MAX_HEAD_BYTES:
        raise _head_too_large()
    return _parse_head(raw)


def _parse_head(raw: bytes) -> _Request:
    request = _Request()
    try:
        request.feed(raw)
    except httptools.HttpParserError as error:
        raise Refusal("bad_request", f"this is not HTTP/1.1: {error}", "speak HTTP/1.1") from None
    if not request.is_complete or not request.target.startswith(b"/"):
        raise Refusal("bad_request", "this is not a request of HTTP/1.1 for a path", "speak HTTP/1.1")
    return request


def _upgrade_head(request: _Request, router: Router) -> Head:
    """The head for the stream of frames. Raises Refusal."""
    if not router.is_authorized(request.headers):
        raise router.unauthorized()
    if not request.wants_upgrade or request.headers.get("upgrade", "").lower() != UPGRADE:
        raise Refusal(
            "upgrade_required",
            f"{STREAM_PATH} is for agents",
            f"ask for 'Upgrade: {UPGRADE}'",
            headers=(("Upgrade", UPGRADE),),
        )
    return Head(f"GET {request.target.decode('latin-1')} HTTP/{request.version}", request.headers)


async def _read_body(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: _Request,
    router: Router,
    limits: Limits,
) -> bytes:
    """The body, read only for those who may ask. Raises Refusal, IncompleteReadError."""
    if "transfer-encoding" in request.headers:
        raise Refusal("length_required", "a body in chunks is not read", "send Content-Length")
    length = int(request.headers.get("content-length", "0"))  # checked by the parser: digits only, and once
    if length == 0:
        return b""
    if not router.is_authorized(request.headers):
        raise router.unauthorized()
    if length > limits.body_bytes_max:
        raise too_large(limits.body_bytes_max)
    if request.headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        async with asyncio.timeout(limits.request_s):
            return await reader.readexactly(length)
    except TimeoutError:
        raise Refusal(
            "slow_request", f"no whole body came within {limits.request_s:g} s", "send it at once"
        ) from None


def _head_too_large() -> Refusal:
    return Refusal(
        "head_too_large", f"a request head has at most {MAX_HEAD_BYTES} bytes", "send fewer headers"
    )


def _head(response: Response, framing: tuple[str, str] | None, *, closes: bool) -> bytes:
    headers = [("Content-Type", response.content_type), ("Cache-Control", "no-store"), *response.headers]
    if framing is not None:
        headers.append(framing)
    if closes:
        headers.append(("Connection", "close"))
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


async def _send(writer: asyncio.StreamWriter, response: Response, request: _Request, send_s: float) -> None:
    """Write a response. Raises TimeoutError where the reader does not take it."""
    if response.stream is None:
        framing = ("Content-Length", str(len(response.body)))
        writer.write(_head(response, framing, closes=not request.keep_alive) + response.body)
        await _drain(writer, send_s)
        return
    is_chunked = request.version == "1.1"
    if not is_chunked:
        request.keep_alive = False
    framing_or_none = ("Transfer-Encoding", "chunked") if is_chunked else None
    writer.write(_head(response, framing_or_none, closes=not request.keep_alive))
    async with contextlib.aclosing(response.stream) as parts:
        async for part in parts:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
            await _drain(writer, send_s)
    if is_chunked:
        writer.write(b"0\r\n\r\n")
        await _drain(writer, send_s)


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close; a peer that takes nothing more is cut off."""
    writer.close()
    try:
        async with asyncio.timeout(_LINGER_S):
            await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
    except OSError:
        pass


async def _drain(writer: asyncio.StreamWriter, send_s: float) -> None:
    async with asyncio.timeout(send_s):
        await writer.drain()


async def _refuse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, response: Response, send_s: float
) -> None:
    """Answer, then read on for a moment: closing with input unread would reset the connection and take the answer
    back."""
    framing = ("Content-Length", str(len(response.body)))
    writer.write(_head(response, framing, closes=True) + response.body)
    await _drain(writer, send_s)
    if writer.can_write_eof():
        writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            left = _LINGER_BYTES_MAX
            while left > 0 and (data := await reader.read(64 * 1024)):
                left -= len(data)
