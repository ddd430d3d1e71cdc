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
from stoker.cache.fleet.static import StaticMembership, as_listed
from stoker.cache.layout import DEFAULT_BLOCK_SIZE_BYTES
from stoker.cache.origin.open import open_origin, open_writable_origin
from stoker.cache.server.added import AddedBuckets
from stoker.cache.server.admin import Admin, FrontHits
from stoker.cache.server.back import CacheBack
from stoker.cache.server.buckets import check_bucket
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
from stoker.cache.server.objects import Objects
from stoker.cache.server.orders import Orders
from stoker.cache.server.peers import Peers
from stoker.cache.server.s3.face import S3Face, S3Settings
from stoker.cache.server.summaries import EVERY_S, Summaries
from stoker.cache.server.trim import Trim
from stoker.cache.store.store import Store
from stoker.errors import ConfigError
from stoker.wire.cache_api import BucketSpec, FleetMember, FleetStatus

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
    egress_bytes_per_s: float = 0.0
    """How much content may go out, to all readers together; 0: no limit."""
    connection_bytes_per_s: float = 0.0
    """How much content may go out on one connection; 0: no limit."""
    """Who may connect to it: all whom its permissions let write. What they may read their tokens say."""

    buckets: Mapping[str, BucketSpec] = field(default_factory=dict)
    tokens: Sequence[str] = ()
    keys: Sequence[str] = ()
    """ACCESS:SECRET or ACCESS:SECRET:BUCKET,… for S3 clients."""
    s3_domains: Sequence[str] = ()
    """In lower case; S3 clients may name a bucket by their host, `BUCKET.DOMAIN`."""
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
    weight: int | None = None
    """Its share of the fleet's blocks, beside the others'; None: 1, or what a fixed list of the members says."""

    summary_every_s: float = EVERY_S
    """How often it tells the others what it holds, for `replica-aware` buckets."""


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
        self._auth = TokenAuth(settings.tokens, settings.keys)
        self._engine: Engine | None = None
        self._front: Front | None = None
        self._connections: Connections | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._unix_path: Path | None = None
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None
        self._trim: Trim | None = None
        self._added: AddedBuckets | None = None
        self._keeping: Keeping | None = None
        self._summaries: Summaries | None = None
        self._orders: Orders | None = None

    async def start(self) -> Listening:
        """It may be cancelled; `stop` clears up in any case."""
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
                self._unix_path = Path(settings.unix_path)
            self._engine = engine = await self._open_engine(endpoint)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self._summaries = Summaries(engine, self._clock, self._rng.fork(4), settings.summary_every_s)
        engine.store.clearing.copies_of = self._summaries.copies
        assert self._added is not None
        assert self._keeping is not None
        self._orders = Orders(engine, self._clock.now)
        self._start_front(engine, self._added, self._keeping, self._summaries, self._orders, listeners)
        self._trim = Trim(engine, self._rng.fork(5))
        self._trim.start()
        engine.fleet.on_late_join = self._has_joined_late
        engine.fleet.on_failure = self._fail
        self._summaries.start()
        self._orders.start()
        await engine.fleet.start()
        return Listening(endpoint, settings.unix_path, self._notes())

    async def failure(self) -> BaseException:
        """Why this server cannot go on, as soon as that is so."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

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
        if self._summaries is not None:
            await self._summaries.stop()
        if self._orders is not None:
            await self._orders.stop()
        if self._engine is not None:
            await self._engine.fleet.leave()
            await self._engine.close()
        if self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)

    async def _open_engine(self, endpoint: str) -> Engine:
        """The engine, with its buckets, within its limit."""
        settings = self._settings
        # A large folder takes a while; whoever waits for the server may stop it meanwhile.
        opening = asyncio.ensure_future(
            asyncio.to_thread(
                Store,
                settings.folder,
                settings.capacity_bytes,
                settings.block_size_bytes,
                self._clock,
                self._rng.fork(1),
            )
        )
        try:
            store = await asyncio.shield(opening)
        except asyncio.CancelledError:
            for opened in await asyncio.gather(opening, return_exceptions=True):
                if isinstance(opened, Store):
                    await opened.close()
            raise
        try:
            engine = Engine(
                store,
                self._open_fleet(endpoint),
                lambda url: open_origin(url, settings.environment),
                self._clock,
                self._rng.fork(2),
                lambda url: open_writable_origin(url, settings.environment),
            )
            for name, spec in settings.buckets.items():
                engine.add_bucket(name, spec)
            # What is kept by which rules must be known before anything leaves for a lower limit.
            self._added = AddedBuckets(engine, settings.folder, self._set_rules)
            self._added.restore()
            self._keeping = Keeping(engine, settings.folder)
            self._keeping.restore()
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
        weight = 1 if settings.weight is None else settings.weight
        me = FleetMember(settings.name or url.removeprefix("http://"), url, weight, settings.zone)
        membership = open_membership(settings.fleet, settings.environment) if settings.fleet else None
        listed = membership.listed(me.name) if isinstance(membership, StaticMembership) else None
        if listed is not None:
            me = as_listed(me, settings.weight, listed)
        peers = Peers(self._auth.fleet_token())
        rng = self._rng.fork(3)
        return Fleet(me, membership, peers, self._clock, rng, settings.block_size_bytes)

    def _start_front(
        self,
        engine: Engine,
        added: AddedBuckets,
        keeping: Keeping,
        summaries: Summaries,
        orders: Orders,
        listeners: Sequence[socket.socket],
    ) -> None:
        limits = FrontSettings()
        limits.connections_max = connections_max()
        limits.passing_max = passing_max()
        limits.egress_bytes_per_s = self._settings.egress_bytes_per_s
        limits.domains = list(self._settings.s3_domains)
        limits.connection_bytes_per_s = self._settings.connection_bytes_per_s
        self._front = front = Front(engine.store.index, engine.store.files.sending, limits)
        for listener in listeners:
            listener.setblocking(False)
            front.listen(listener.detach())

        async def meet(member: FleetMember, said: FleetStatus) -> None:
            summaries.met(member.name, said.instance)
            await added.meet(member, said)

        engine.fleet.vetting.on_meeting = meet
        self._set_rules()
        hits = FrontHits(front.take_hits)
        admin = Admin(
            engine,
            hits,
            keeping,
            added,
            summaries,
            orders,
            SERVER_VERSION,
            lambda: self._clock.now() - self._started_at,
            self._notes,
        )
        objects = Objects(engine)
        settings = S3Settings(self._settings.s3_domains, engine.fleet.me.name)
        back = CacheBack(engine, admin, objects, S3Face(engine, objects, self._auth, self._clock, settings))
        self._connections = Connections(
            front, engine.store.files, self._auth, back.answer, engine.store.doubt
        )
        front.set_now(engine.store.now_s())
        self._connections.start()
        front.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick(front, engine))

    def _notes(self) -> list[str]:
        if self._engine is None or self._added is None:
            return []
        return [*self._engine.store.notes, *self._engine.fleet.notes, *self._added.notes]

    def _has_joined_late(self) -> None:
        if self._engine is not None:
            self._engine.metadata.confirm_all()
            self._set_rules()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._failed.set()

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
    """Serve until SIGTERM, SIGINT, or until whatever `until` arranged sets the event, which may be while it starts.

    Raises ConfigError and EnvironmentProblem.
    """
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
    until(stopping)
    server = CacheServer(settings)
    stop = loop.create_task(stopping.wait())
    start = loop.create_task(server.start())
    failure = loop.create_task(server.failure())
    try:
        await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            announce(start.result())
            await asyncio.wait((stop, failure), return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                raise failure.result()
    finally:
        for task in (start, stop, failure):
            task.cancel()
        await asyncio.gather(start, stop, failure, return_exceptions=True)
        await server.stop()
