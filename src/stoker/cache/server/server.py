"""Assemble a server and run it until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from stoker.base.clock import SystemClock
from stoker.cache.auth.tokens import TokenAuth, check_listen
from stoker.cache.layout import DEFAULT_BLOCK_SIZE_BYTES
from stoker.cache.origin.open import open_origin
from stoker.cache.server.admin import Admin, check_bucket
from stoker.cache.server.back import CacheBack
from stoker.cache.server.engine import HOT_BYTES_MAX, Engine, EngineSettings
from stoker.cache.server.front import Front
from stoker.cache.store.disk import DiskStore
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.wire.cache_api import BucketSpec

_TICK_S = 5.0
_IDLE_TICKS_MAX = 24
_DRAIN_S = 5.0
_BACKLOG = 1024
_THREADS = 32
SERVER_VERSION = "0.1.0"


@dataclass(frozen=True)
class ServerSettings:
    """One cache server."""

    folder: Path
    """Where blocks and index live; one server at a time."""

    capacity_bytes: int
    """The hard limit for blocks on disk."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""

    unix_path: str | None = None
    """A Unix socket to listen on as well."""

    buckets: Mapping[str, BucketSpec] = field(default_factory=dict)
    tokens: Sequence[str] = ()
    block_size_bytes: int = DEFAULT_BLOCK_SIZE_BYTES
    hot_bytes_max: int = HOT_BYTES_MAX
    """Memory for copies of small blocks."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Where origins look up AWS_* variables."""


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and what its operator should know."""

    endpoint: str
    unix_path: str | None
    notes: list[str]


class CacheServer:
    """Start it on a running event loop. Raises ConfigError and EnvironmentProblem from `start`."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._connections: set[Front] = set()
        self._servers: list[asyncio.AbstractServer] = []
        self._clock = SystemClock()
        self._started_at = self._clock.now()
        self._notes: list[str] = []
        self._engine: Engine | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> Listening:
        settings = self._settings
        auth = TokenAuth(settings.tokens)
        check_listen(settings.host, auth)
        for name, spec in settings.buckets.items():
            check_bucket(name, spec)
        listener = _listen_tcp(settings.host, settings.port)
        try:
            store = DiskStore(settings.folder)
            try:
                engine = self._make_engine(store)
                self._notes = engine.load(dict(settings.buckets))
            except BaseException:
                store.close()
                raise
            self._engine = engine
            admin = Admin(
                engine, SERVER_VERSION, lambda: self._clock.now() - self._started_at, lambda: self._notes
            )
            back = CacheBack(engine, admin)
            loop = asyncio.get_running_loop()
            # Origins without an asynchronous interface wait in threads, one for each read.
            loop.set_default_executor(ThreadPoolExecutor(_THREADS, "stoker-cache-io"))

            def connect() -> Front:
                return Front(back, auth, self._connections)

            self._servers.append(await loop.create_server(connect, sock=listener, backlog=_BACKLOG))
            if settings.unix_path is not None:
                path = _listen_unix(settings.unix_path)
                self._servers.append(await loop.create_unix_server(connect, sock=path, backlog=_BACKLOG))
        except BaseException:
            listener.close()
            raise
        self._ticker = loop.create_task(self._tick())
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return Listening(f"http://{shown}:{port}", settings.unix_path, self._notes)

    async def stop(self) -> None:
        """Take no more connections, finish what was asked, make the index durable."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.stop()
        deadline = self._clock.now() + _DRAIN_S
        while self._connections and self._clock.now() < deadline:  # noqa: ASYNC110  at the very end only
            await asyncio.sleep(0.02)
        for connection in list(self._connections):
            connection.drop()
        await asyncio.sleep(0)
        if self._ticker is not None:
            self._ticker.cancel()
        if self._engine is not None:
            await self._engine.close()
        if self._settings.unix_path is not None:
            Path(self._settings.unix_path).unlink(missing_ok=True)

    def _make_engine(self, store: DiskStore) -> Engine:
        settings = self._settings
        limits = EngineSettings(settings.capacity_bytes, settings.block_size_bytes, settings.hot_bytes_max)
        return Engine(store, limits, lambda url: open_origin(url, settings.environment), self._clock)

    async def _tick(self) -> None:
        """Close connections on which nothing happens: idle ones, and heads that never end."""
        while True:
            await asyncio.sleep(_TICK_S)
            for connection in list(self._connections):
                connection.tick(_IDLE_TICKS_MAX)


def serve(
    settings: ServerSettings, announce: Callable[[Listening], None], until: Callable[[asyncio.Event], None]
) -> None:
    """Serve until SIGTERM, SIGINT, or until whatever `until` arranged sets the event."""
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, announce, until))


async def _serve(
    settings: ServerSettings, announce: Callable[[Listening], None], until: Callable[[asyncio.Event], None]
) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = CacheServer(settings)
    listening = await server.start()
    try:
        until(stopping)
        announce(listening)
        await stopping.wait()
    finally:
        await server.stop()


def _listen_tcp(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error}") from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise EnvironmentProblem(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --listen"
        ) from error
    return sock


def _listen_unix(path: str) -> socket.socket:
    if len(os.fsencode(path)) > 100:
        raise ConfigError(f"the path of a Unix socket has at most 100 bytes: {path}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
        previous = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(previous)
    except OSError as error:
        sock.close()
        raise EnvironmentProblem(f"cannot listen on {path}: {error.strerror}") from error
    return sock


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
