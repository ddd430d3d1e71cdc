"""Assemble a server and run it until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from stoker._native import Front, FrontSettings
from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cache.auth.tokens import TokenAuth, check_listen
from stoker.cache.fleet.open import open_membership
from stoker.cache.layout import DEFAULT_BLOCK_SIZE_BYTES
from stoker.cache.origin.open import open_origin
from stoker.cache.server.admin import Admin, FrontHits, check_bucket
from stoker.cache.server.back import CacheBack
from stoker.cache.server.connections import Connections
from stoker.cache.server.engine import Engine
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.keeping import Keeping
from stoker.cache.server.listening import (
    OWN_USER_MODE,
    connections_max,
    listen_tcp,
    listen_unix,
    passing_max,
    raise_file_limit,
)
from stoker.cache.server.peers import Peers
from stoker.cache.server.trim import Trim
from stoker.cache.store.store import Store
from stoker.errors import ConfigError
from stoker.wire.cache_api import BucketSpec, FleetMember

_TICK_S = 0.25
_DRAIN_S = 5.0
_ANY_ADDRESS = frozenset(("0.0.0.0", "::", "[::]", ""))
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

    unix_mode: int = OWN_USER_MODE
    """Who may connect to it: all whom its permissions let write. What they may read their tokens say."""

    buckets: Mapping[str, BucketSpec] = field(default_factory=dict)
    tokens: Sequence[str] = ()
    block_size_bytes: int = DEFAULT_BLOCK_SIZE_BYTES
    environment: Mapping[str, str] = field(default_factory=dict)
    """Where origins look up AWS_* variables."""

    fleet: str = ""
    """Where the members of the fleet meet, see `open_membership`; empty: this server is alone."""

    advertise: str = ""
    """The URL at which the others reach this server; empty: where it listens."""

    name: str = ""
    """This server's own in its fleet, the same after a restart; empty: its URL."""

    zone: str = ""
    weight: int = 1
    """Its share of the fleet's blocks, beside the others'."""


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
        self._clock = SystemClock()
        self._rng = Rng(int(self._clock.wall() * 1e6))
        self._started_at = self._clock.now()
        self._auth = TokenAuth(settings.tokens)
        self._engine: Engine | None = None
        self._front: Front | None = None
        self._connections: Connections | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._trim: Trim | None = None

    async def start(self) -> Listening:
        settings = self._settings
        check_listen(settings.host, self._auth)
        for name, spec in settings.buckets.items():
            check_bucket(name, spec)
        # Origins without an asynchronous interface wait in threads, one for each read.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "stoker-cache-io"))
        listeners = [listen_tcp(settings.host, settings.port)]
        host, port = listeners[0].getsockname()[:2]
        endpoint = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        try:
            if settings.unix_path is not None:
                listeners.append(listen_unix(settings.unix_path, settings.unix_mode))
            self._engine = engine = await self._open_engine(endpoint)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self._start_front(engine, listeners)
        self._trim = Trim(engine)
        self._trim.start()
        await engine.fleet.start()
        return Listening(endpoint, settings.unix_path, engine.store.notes)

    async def stop(self) -> None:
        """Take no more connections, finish what was asked, make all durable."""
        if self._engine is not None:
            await self._engine.fleet.retire()
        if self._front is not None and self._connections is not None:
            self._front.drain()
            deadline = self._clock.now() + _DRAIN_S
            while self._front.figures().connections and self._clock.now() < deadline:  # noqa: ASYNC110  at the very end
                await asyncio.sleep(0.02)
            await self._connections.stop()
            self._front.stop()
        if self._ticker is not None:
            self._ticker.cancel()
        if self._trim is not None:
            await self._trim.stop()
        if self._engine is not None:
            await self._engine.fleet.leave()
            await self._engine.close()
        if self._settings.unix_path is not None:
            Path(self._settings.unix_path).unlink(missing_ok=True)

    async def _open_engine(self, endpoint: str) -> Engine:
        """The engine, with its buckets, within its limit."""
        settings = self._settings
        # A large folder takes a while; whoever waits for the server may stop it meanwhile.
        store = await asyncio.to_thread(
            Store,
            settings.folder,
            settings.capacity_bytes,
            settings.block_size_bytes,
            self._clock,
            self._rng.fork(1),
        )
        try:
            engine = Engine(
                store,
                self._open_fleet(endpoint),
                lambda url: open_origin(url, settings.environment),
                self._clock,
                self._rng.fork(2),
            )
            for name, spec in settings.buckets.items():
                engine.add_bucket(name, spec)
            await store.start()
        except BaseException:
            await store.close()
            raise
        return engine

    def _open_fleet(self, endpoint: str) -> Fleet:
        """Raises ConfigError."""
        settings = self._settings
        url = settings.advertise or endpoint
        if settings.fleet and not settings.advertise and settings.host in _ANY_ADDRESS:
            raise ConfigError(
                f"a server of a fleet that listens on {settings.host} has to say where the others reach it: give "
                "--advertise http://HOST:PORT"
            )
        me = FleetMember(settings.name or url.removeprefix("http://"), url, settings.weight, settings.zone)
        membership = open_membership(settings.fleet, settings.environment) if settings.fleet else None
        return Fleet(me, membership, Peers(self._auth.fleet_token()), self._clock, self._rng.fork(3))

    def _start_front(self, engine: Engine, listeners: Sequence[socket.socket]) -> None:
        limits = FrontSettings()
        limits.connections_max = connections_max()
        limits.passing_max = passing_max()
        self._front = front = Front(engine.store.index, engine.store.files.sending, limits)
        for listener in listeners:
            listener.setblocking(False)
            front.listen(listener.detach())
        self._set_rules()
        hits = FrontHits(front.take_hits)
        keeping = Keeping(engine, self._settings.folder)
        keeping.restore()
        admin = Admin(
            engine,
            hits,
            keeping,
            SERVER_VERSION,
            lambda: self._clock.now() - self._started_at,
            lambda: engine.store.notes,
            self._set_rules,
        )
        back = CacheBack(engine, admin)
        self._connections = Connections(
            front, engine.store.files, self._auth, back.answer, engine.store.doubt
        )
        front.set_now(engine.store.now_s())
        self._connections.start()
        front.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick(front, engine))

    def _set_rules(self) -> None:
        """Tell the front who may read what, and for how long what is known of a bucket is good."""
        if self._front is None or self._engine is None:
            return
        rule = self._engine.metadata.rule
        buckets = {name: rule(bucket) for name, bucket in self._engine.buckets.items()}
        self._front.set_rules(self._auth.rules(), buckets)

    async def _tick(self, front: Front, engine: Engine) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            front.set_now(engine.store.now_s())


def serve(
    settings: ServerSettings, announce: Callable[[Listening], None], until: Callable[[asyncio.Event], None]
) -> None:
    """Serve until SIGTERM, SIGINT, or until whatever `until` arranged sets the event."""
    raise_file_limit()
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
