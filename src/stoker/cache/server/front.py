"""The front: HTTP/1.1 on one connection. Answers hits itself and hands the rest to the back."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

import httptools

from stoker.cache.auth.tokens import Principal, TokenAuth
from stoker.cache.server.outbox import Outbox
from stoker.cache.server.port import Back, Request
from stoker.cache.store.port import OpenFile
from stoker.errors import ConfigError
from stoker.wire.cache_api import JSON
from stoker.wire.http import BODY_BYTES_MAX, HEAD_BYTES_MAX, response_head, split_target

_LINGER_S = 1.0
_PIPELINED_MAX = 64
_PIPELINED_BYTES_MAX = 2 * BODY_BYTES_MAX
_UNIX_BUFFER_BYTES = 2 * 1024 * 1024
_PEER = struct.Struct("iII")
_NOT_FAST = frozenset({b"range", b"if-match", b"if-none-match", b"if-range", b"expect"})


class Front(asyncio.Protocol):
    """One connection. `connections` is the server's set of all of them."""

    def __init__(self, back: Back, auth: TokenAuth, connections: set[Front]) -> None:
        self._back = back
        self._auth = auth
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._principal: Principal | None = None
        self._authorization: bytes | None = None
        self._queue: deque[Request] = deque()
        self._queued_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_paused = False
        self._last_pending_bytes = 0
        self._is_in_body = False
        self._size_bytes = 0
        self.idle_ticks = 0
        self._begin_message()

    def _begin_message(self) -> None:
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._is_fast = True

    @property
    def is_idle(self) -> bool:
        """Whether nothing was asked that is not answered."""
        return self._task is None and not self._queue and self._outbox.pending_bytes == 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        original = transport.get_extra_info("socket")
        own = socket.socket(fileno=socket.dup(original.fileno()))
        own.setblocking(False)
        tune(own)
        self._is_own_user = is_own_user(own)
        self._outbox = Outbox(loop, own, self.drop)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._is_closing = True
        self._queue.clear()
        self._outbox.close()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        if not self.is_idle:
            self._is_closing = True
            return True
        return False

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._size_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "protocol", "this server does not upgrade connections")
        except httptools.HttpParserCallbackError as error:
            if not self._is_closing:
                raise error
        except httptools.HttpParserError:
            self._refuse(400, "protocol", "this is not HTTP/1.1")
        else:
            if not self._is_in_body and self._size_bytes > HEAD_BYTES_MAX:
                self._refuse(431, "header_too_large", f"a request head has at most {HEAD_BYTES_MAX} bytes")

    def on_message_begin(self) -> None:
        self._begin_message()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers[name] = value
        self._head_bytes += len(name) + len(value)
        if name in _NOT_FAST:
            self._is_fast = False

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        if self._head_bytes + len(self._target) > HEAD_BYTES_MAX:
            self._refuse(431, "header_too_large", f"a request head has at most {HEAD_BYTES_MAX} bytes")
            return
        authorization = self._headers.get(b"authorization", b"")
        known = self._authorization
        if known is None or not hmac.compare_digest(known, authorization):
            self._principal = self._auth.check(authorization.decode("latin-1"))
            self._authorization = authorization
        if b"content-length" in self._headers or b"transfer-encoding" in self._headers:
            self._is_fast = False
            if self._principal is None:
                self._refuse(401, "no_token", "a bearer token is needed")
                return
            length = self._headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > BODY_BYTES_MAX:
                self._refuse(413, "too_large", f"a request body has at most {BODY_BYTES_MAX} bytes")
            elif self._headers.get(b"expect", b"").lower() == b"100-continue":
                self._outbox.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._is_closing:
            return
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > BODY_BYTES_MAX:
            self._refuse(413, "too_large", f"a request body has at most {BODY_BYTES_MAX} bytes")

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._size_bytes = 0
        if self._is_closing:
            return
        self.idle_ticks = 0
        keep_alive = self._parser.should_keep_alive()
        if self._principal is None:
            self._refuse(401, "no_token", "a bearer token is needed")
            return
        method = self._parser.get_method()
        if self._task is None and method == b"GET" and self._is_fast and self._hit(self._principal):
            if not keep_alive:
                self._finish_and_close()
            return
        request = Request(
            method.decode("latin-1"),
            self._target,
            self._headers,
            b"".join(self._body),
            self._principal,
            self._is_own_user,
        )
        self._queue.append(request)
        self._queued_bytes += len(request.body)
        if not keep_alive:
            self._is_closing = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._answer_queue())
        elif len(self._queue) >= _PIPELINED_MAX or self._queued_bytes > _PIPELINED_BYTES_MAX:
            self._is_paused = True
            self._transport.pause_reading()

    def drop(self) -> None:
        """Close at once."""
        self._is_closing = True
        self._transport.abort()

    def stop(self) -> None:
        """Close once what was asked is answered."""
        if self.is_idle:
            self._finish_and_close()
        else:
            self._is_closing = True

    def tick(self, ticks_max: int) -> None:
        """Called now and then: closes the connection when nothing came or went since `ticks_max` calls."""
        sent_so_far = self._outbox.pending_bytes
        if self._task is not None and sent_so_far == self._last_pending_bytes == 0:
            # The back is at work and the reader keeps up.
            self.idle_ticks = 0
        if sent_so_far != self._last_pending_bytes:
            self.idle_ticks = 0
        self._last_pending_bytes = sent_so_far
        self.idle_ticks += 1
        if self.idle_ticks > ticks_max:
            self.drop()

    def _hit(self, principal: Principal) -> bool:
        target = self._target
        if b"%" in target or b"?" in target:
            try:
                bucket, key, _ = split_target(target)
            except ConfigError:
                return False
        else:
            parts = target.decode("latin-1").split("/", 2) if target.isascii() else ()
            if len(parts) != 3 or parts[0]:
                return False
            _, bucket, key = parts
        if not principal.may_read(bucket):
            return False
        hit = self._back.look_up(bucket, key)
        if hit is None:
            return False
        if hit.file is None:
            self._outbox.send(hit.head + hit.data)
        else:
            self._outbox.send(hit.head, more=True)
            self._outbox.send_file(hit.file, 0, hit.size_bytes, self._back.pin(hit))
        return True

    async def _answer_queue(self) -> None:
        try:
            while self._queue:
                request = self._queue.popleft()
                self._queued_bytes -= len(request.body)
                answer = FrontAnswer(self._outbox, request.method == "HEAD")
                await self._back.answer(request, answer)
                await self._outbox.drain()
                self.idle_ticks = 0
                if self._is_paused and not self._queue:
                    self._is_paused = False
                    self._transport.resume_reading()
        except ConnectionError:
            # The reader is gone, or half an answer is out and the rest cannot be had.
            self.drop()
            return
        except BaseException:
            # Half an answer may be out: the reader must see a broken connection, not a short object.
            self.drop()
            raise
        finally:
            self._task = None
        if self._is_closing:
            self._finish_and_close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self._task is not None:
            return
        self._outbox.send(error_response(status, code, message))
        # Closing now, with input unread, would reset the connection and take the answer back.
        self._outbox.end()
        asyncio.get_running_loop().call_later(_LINGER_S, self.drop)

    def _finish_and_close(self) -> None:
        self._is_closing = True
        if self._outbox.pending_bytes == 0:
            self._transport.close()
            return
        asyncio.get_running_loop().call_later(0.05, self._finish_and_close)


class FrontAnswer:
    """Writes one response of the back to the connection's outbox."""

    def __init__(self, outbox: Outbox, is_head: bool) -> None:
        self._outbox = outbox
        self._is_head = is_head
        self._is_chunked = False
        self.has_started = False

    def start(self, status: int, headers: Iterable[tuple[str, str]], length_bytes: int | None) -> None:
        self.has_started = True
        self._is_chunked = length_bytes is None
        framing = (
            ("Transfer-Encoding", "chunked")
            if length_bytes is None
            else ("Content-Length", str(length_bytes))
        )
        self._outbox.send(
            response_head(status, (framing, *headers)), more=bool(length_bytes) and not self._is_head
        )

    def data(self, data: bytes) -> None:
        if self._is_head or not data:
            return
        self._outbox.send(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def file(self, file: OpenFile, offset: int, size_bytes: int, done: Callable[[], None]) -> None:
        if self._is_head:
            done()
            return
        if self._is_chunked:
            self._outbox.send(b"%x\r\n" % size_bytes, more=True)
        self._outbox.send_file(file, offset, size_bytes, done)
        if self._is_chunked:
            self._outbox.send(b"\r\n")

    async def drain(self) -> None:
        await self._outbox.drain()

    def finish(self) -> None:
        if self._is_chunked and not self._is_head:
            self._outbox.send(b"0\r\n\r\n")


def error_response(status: int, code: str, message: str) -> bytes:
    """A complete response that ends the connection."""
    body = b'{"code":"%b","message":"%b"}' % (code.encode(), message.encode())
    headers = [("Content-Type", JSON), ("Content-Length", str(len(body))), ("Connection", "close")]
    if status == 401:
        headers.append(("WWW-Authenticate", 'Bearer realm="stoker"'))
    return response_head(status, headers) + body


def is_own_user(sock: socket.socket) -> bool:
    """Whether the peer is a process of this machine that ran as our user when it connected."""
    if sock.family != socket.AF_UNIX:
        return False
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(credentials)
    return bool(uid == os.geteuid())


def tune(sock: socket.socket) -> None:
    """Send at once; and on loopback use a congestion control that does not pace, if the kernel has it.

    The kernel sizes the buffers of TCP by itself. Those of Unix sockets stay at 208 KiB, two long records, and
    then each one costs a round of waking up.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sock.getpeername()[0] in ("127.0.0.1", "::1"):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        except OSError:
            pass
