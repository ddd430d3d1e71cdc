"""Asking the servers of another fleet: one after the other, each for as long as it shows that it lives, and all for no
longer than the URL's timeout."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from stoker.base.marks import file_mark
from stoker.cache.origin.fleet_url import FleetPlace
from stoker.cache.origin.http_calls import Answer, HttpCalls
from stoker.cache.origin.http_gets import Connection, HttpGets
from stoker.errors import ConfigError, OriginError
from stoker.wire.cache_api import MSGPACK
from stoker.wire.http import ResponseHead

T = TypeVar("T")
log = logging.getLogger("stoker.cache")
SILENCE_S = 2.0
"""After so long a server is asked whether it lives; while it does, it is waited for: its origin may be slow."""
DOWN_S = 3.0
"""So long one that did not answer is asked last."""
_PART_BYTES = 256 * 1024
_TOKEN_BYTES_MAX = 64 * 1024
_LOOK_S = 1.0
"""So often it is looked whether the file of authorities has changed."""


class FleetUnreachable(OriginError):
    """None of its servers answers, or takes our token."""


class _Unreachable(Exception):
    """Another server may answer."""


class FleetServer:
    """One of them."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        url = f"{'https' if tls else 'http'}://{host}:{port}"
        self.url = url
        self.host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.gets = HttpGets(url, host, port, _PART_BYTES, tls)
        self.calls = HttpCalls(url, host, port, tls)
        self.down_until = 0.0

    def trust(self, tls: ssl.SSLContext) -> None:
        """On connections that are still to be made."""
        self.gets.tls = self.calls.tls = tls

    async def is_alive(self) -> bool:
        """Whether it answers at all, on a connection of its own: others may have been lost."""
        request = f"GET /-/health HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n\r\n".encode()
        with contextlib.suppress(OriginError, TimeoutError):
            async with asyncio.timeout(SILENCE_S):
                await self.calls.call(request, is_apart=True)
                return True
        return False

    async def patiently(
        self, asked: Awaitable[T], timeout_s: float, leave: Callable[[T], None] = lambda _: None
    ) -> T:
        """Wait as long as it lives, and `timeout_s` at most: that it lives does not say that our connection does.
        `leave`: what came when nobody waited any more. Raises OriginError."""
        task = asyncio.ensure_future(asked)
        clock = asyncio.get_running_loop().time
        until = clock() + timeout_s
        try:
            while not (await asyncio.wait((task,), timeout=min(SILENCE_S, max(0.0, until - clock()))))[0]:
                if clock() >= until:
                    raise OriginError(f"{self.url} lives, and has not answered for {timeout_s:.1f} s")
                if not await self.is_alive():
                    raise OriginError(f"{self.url} is silent")
        except BaseException:
            task.cancel()
            for came in await asyncio.gather(task, return_exceptions=True):
                if not isinstance(came, BaseException):
                    leave(came)
            raise
        return task.result()


class FleetServers:
    """Lives on one event loop. Raises ConfigError where the token or certificates cannot be read."""

    def __init__(self, place: FleetPlace) -> None:
        self._place = place
        tls = _tls(place) if place.is_tls else None
        self._authorities = self._authorities_mark()
        self._looked_at = 0.0
        self._servers = [FleetServer(host, port, tls) for host, port in place.servers]
        self._token = self._read_token()

    async def call(self, target: str, fields: str, on_request: Callable[[], None]) -> Answer:
        """A GET with a short answer, from the first server that has one. Raises OriginError."""

        async def ask(server: FleetServer, timeout_s: float) -> Answer:
            on_request()
            request = self._request(server, target, f"Accept: {MSGPACK}\r\n{fields}")
            answer = await server.patiently(server.calls.call(request, may_repeat=True), timeout_s)
            return self._taken(answer, answer.status)

        return await self._first(target, ask)

    async def get(
        self, target: str, fields: str, on_request: Callable[[], None]
    ) -> tuple[ResponseHead, FleetServer, Connection]:
        """A GET whose body is still to come, and is given to `parts` or `leave`. Raises OriginError."""

        async def ask(server: FleetServer, timeout_s: float) -> tuple[ResponseHead, FleetServer, Connection]:
            on_request()
            asked = server.gets.ask(self._request(server, target, fields))
            head, connection = await server.patiently(
                asked, timeout_s, lambda came: server.gets.leave(came[1])
            )
            try:
                return self._taken((head, server, connection), head.status)
            except BaseException:
                server.gets.leave(connection)
                raise

        return await self._first(target, ask)

    async def parts(self, server: FleetServer, connection: Connection) -> AsyncGenerator[bytearray, None]:
        """A body, as it comes. Raises OriginError; the server is asked last for a while then."""
        try:
            async with aclosing(server.gets.parts(connection)) as parts:
                while (part := await server.patiently(_next(parts), self._place.timeout_s)) is not None:
                    yield part
        except OriginError:
            self._lost(server)
            raise

    async def write(
        self,
        method: str,
        target: str,
        fields: str,
        on_request: Callable[[], None],
        body: AsyncIterable[bytes | bytearray] | None = None,
    ) -> Answer:
        """What changes something there, by the first server that answers; by no other once one was sent any of the
        body. No server is hurried: its origin takes its time. Raises OriginError, and what the body does."""
        why: list[str] = []
        for server in list(self._order(target)):
            coming = None if body is None else _Coming(body)
            on_request()
            try:
                if coming is None:
                    asked = server.calls.call(
                        self._request(server, target, f"Accept: {MSGPACK}\r\n{fields}", method)
                    )
                else:
                    head = f"Accept: {MSGPACK}\r\nExpect: 100-continue\r\n{fields}"
                    asked = server.calls.send(self._request(server, target, head, method), coming.parts())
                answer = await asked
                return self._taken(answer, answer.status)
            except _Unreachable as error:
                why.append(f"{server.url}: {error}")
            except OriginError as error:
                if coming is None:
                    raise
                why.append(str(error))
            self._lost(server)
            if coming is not None and coming.is_begun:
                break
        raise FleetUnreachable(f"{self._place.url}: {'; '.join(why)}")

    def close(self) -> None:
        """End all connections."""
        for server in self._servers:
            server.gets.close()
            server.calls.close()

    async def _first(self, target: str, ask: Callable[[FleetServer, float], Awaitable[T]]) -> T:
        self._look()
        why: list[str] = []
        clock = asyncio.get_running_loop().time
        until = clock() + self._place.timeout_s
        servers = list(self._order(target))
        for server in servers:
            left_s = until - clock()
            if left_s <= 0:
                break
            try:
                # Who is not the last leaves time for those behind.
                return await ask(server, left_s if server is servers[-1] else left_s / 2)
            except _Unreachable as error:
                why.append(f"{server.url}: {error}")
            except OriginError as error:
                why.append(str(error))
            self._lost(server)
        raise FleetUnreachable(f"{self._place.url}: {'; '.join(why)}")

    def _taken(self, answer: T, status: int) -> T:
        """Raises _Unreachable if another server should be asked."""
        if status == 503:
            raise _Unreachable("it is leaving, or has no room for more connections")
        if status in (401, 403):
            with contextlib.suppress(ConfigError):
                # It may be a new one by now, for the next attempt.
                self._token = self._read_token()
        if status == 401:
            raise _Unreachable(f"it refuses {self.shown} (401)")
        return answer

    @property
    def shown(self) -> str:
        """What it sees of us, in words."""
        return f"the token of {self._place.token_file}" if self._token else "who shows no token"

    def _look(self) -> None:
        """Once in a while: whom to trust from now on."""
        now = asyncio.get_running_loop().time()
        if not self._place.ca_file or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        mark = self._authorities_mark()
        if mark == self._authorities:
            return
        # What is wrong is not looked at again before it has changed.
        self._authorities = mark
        try:
            tls = _tls(self._place)
        except ConfigError as error:
            log.warning("the new file is not taken, and what it held before is used: %s", error)
            return
        for server in self._servers:
            server.trust(tls)

    def _authorities_mark(self) -> tuple[int, ...]:
        return file_mark(Path(self._place.ca_file)) if self._place.ca_file else ()

    def _order(self, target: str) -> Iterator[FleetServer]:
        """Each target has its first server, so that all of them have as much to do; who was down comes last."""
        now, first = asyncio.get_running_loop().time(), zlib.crc32(target.encode()) % len(self._servers)
        turned = [*self._servers[first:], *self._servers[:first]]
        yield from sorted(turned, key=lambda server: server.down_until > now)

    def _lost(self, server: FleetServer) -> None:
        server.down_until = asyncio.get_running_loop().time() + DOWN_S
        server.gets.forget_kept()
        server.calls.forget_kept()

    def _request(self, server: FleetServer, target: str, fields: str, method: str = "GET") -> bytes:
        token = f"Authorization: Bearer {self._token}\r\n" if self._token else ""
        return f"{method} {target} HTTP/1.1\r\nHost: {server.host}\r\n{token}{fields}\r\n".encode("latin-1")

    def _read_token(self) -> str:
        """Raises ConfigError."""
        path = self._place.token_file
        if not path:
            return ""
        try:
            with Path(path).open("rb") as file:
                token = file.read(_TOKEN_BYTES_MAX).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._place.url}: token_file {path} cannot be read: {error}") from error
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"{self._place.url}: token_file {path} does not hold one token")
        return token


class _Coming:
    """A body, of which it is known whether any of it was asked for."""

    def __init__(self, body: AsyncIterable[bytes | bytearray]) -> None:
        self._body = body
        self.is_begun = False

    async def parts(self) -> AsyncGenerator[bytes, None]:
        self.is_begun = True
        async for part in self._body:
            yield bytes(part)


async def _next(parts: AsyncGenerator[bytearray, None]) -> bytearray | None:
    return await anext(parts, None)


def _tls(place: FleetPlace) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=place.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{place.url}: ca_file {place.ca_file} cannot be read: {error}") from error
