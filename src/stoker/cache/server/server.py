"""Assemble a server, start it and stop it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from stoker._native import Front, FrontSettings
from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cache.auth.access import check_listen
from stoker.cache.fleet.open import open_membership
from stoker.cache.fleet.static import StaticMembership, as_listed
from stoker.cache.origin.open import make_place, open_origin, open_writable_origin
from stoker.cache.server.added import AddedBuckets
from stoker.cache.server.admin import Admin
from stoker.cache.server.audit import Audit
from stoker.cache.server.back import CacheBack
from stoker.cache.server.begun import BegunUploads
from stoker.cache.server.blobs.part import Blobs
from stoker.cache.server.buckets import check_bucket
from stoker.cache.server.certificate import Certificate
from stoker.cache.server.cleaning import Cleaning
from stoker.cache.server.client_address import ClientAddresses
from stoker.cache.server.connections import Connections
from stoker.cache.server.doorkeeper import Doorkeeper
from stoker.cache.server.engine import Engine
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.front_fleet import FrontFleet
from stoker.cache.server.front_hits import FrontHits
from stoker.cache.server.keeping import Keeping
from stoker.cache.server.links import Links
from stoker.cache.server.listening import (
    UnixSocket,
    connections_max,
    listen_tcp,
    listen_unix,
    passing_max,
)
from stoker.cache.server.metrics import Metrics, ServerFigures
from stoker.cache.server.objects import Objects
from stoker.cache.server.observing import DRAINING, NOT_IN_FLEET, STARTING, Observed
from stoker.cache.server.orders import Orders
from stoker.cache.server.peers import Peers
from stoker.cache.server.s3.face import S3Face, S3Settings
from stoker.cache.server.settings import Listening, ServerSettings
from stoker.cache.server.statuses import Statuses
from stoker.cache.server.summaries import Summaries
from stoker.cache.server.tracing import OtelSpans
from stoker.cache.server.trim import Trim
from stoker.cache.server.watch import Watch
from stoker.cache.store.store import Store
from stoker.errors import ConfigError
from stoker.wire.cache_api import FleetMember, FleetStatus, host_of_url
from stoker.wire.tls import ClientTls

log = logging.getLogger(__name__)
_TICK_S = 0.25
_DRAIN_S = 5.0
_ANY_ADDRESS = frozenset(("0.0.0.0", "::", "[::]", ""))
_THREADS = 32
SERVER_VERSION = "0.1.0"


class CacheServer:
    """Start it on a running event loop. Raises ConfigError and EnvironmentProblem from `start`."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._clock = SystemClock()
        self._rng = Rng(int(self._clock.wall() * 1e6))
        self._started_at = self._clock.now()
        self._started_wall_s = self._clock.wall()
        self._is_stopping = False
        self._spans: OtelSpans | None = None
        self._audit: Audit | None = None
        self._doorkeeper = Doorkeeper(
            settings.tokens, settings.keys, settings.access_path, self._clock, self._access_changed
        )
        self._access = self._doorkeeper.access
        self._certificate = None if settings.tls is None else Certificate(settings.tls, self._clock)
        self._engine: Engine | None = None
        self._front: Front | None = None
        self._front_fleet: FrontFleet | None = None
        self._connections: Connections | None = None
        self._back: CacheBack | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._unix: UnixSocket | None = None
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None
        self._trim: Trim | None = None
        self._cleaning: Cleaning | None = None
        self._added: AddedBuckets | None = None
        self._keeping: Keeping | None = None
        self._summaries: Summaries | None = None
        self._orders: Orders | None = None
        self._blobs: Blobs | None = None

    async def start(self) -> Listening:
        """It may be cancelled; `stop` clears up in any case."""
        settings = self._settings
        check_listen(settings.host, self._access)
        for name, spec in settings.buckets.items():
            check_bucket(name, spec)
        if settings.s3_buckets_at:
            make_place(settings.s3_buckets_at)
            await open_writable_origin(settings.s3_buckets_at, settings.environment).close()
        # Origins without an asynchronous interface wait in threads, one for each read.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "stoker-cache-io"))
        listeners = [listen_tcp(settings.host, settings.port)]
        host, port = listeners[0].getsockname()[:2]
        scheme = "http" if self._certificate is None else "https"
        endpoint = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        try:
            if settings.observe.audit_path is not None:
                self._audit = Audit(settings.observe.audit_path)
            if settings.observe.otlp_url:
                self._spans = OtelSpans(
                    settings.observe.otlp_url, settings.name or settings.advertise or endpoint, SERVER_VERSION
                )
            self._engine = engine = await self._open_engine(endpoint)
            if settings.unix_path is not None:
                # Not before it has the folder: who has it may be serving at this path.
                self._unix = listen_unix(settings.unix_path, settings.unix_mode)
                listeners.append(self._unix.listener)
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
        assert self._front is not None
        assert self._blobs is not None
        self._blobs.start(self._front)
        if self._cleaning is not None:
            self._cleaning.start()
        return Listening(endpoint, settings.unix_path, self._notes())

    async def failure(self) -> BaseException:
        """Why this server cannot go on, as soon as that is so."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def stop(self) -> None:
        """Take no more connections, finish what was asked, make all durable."""
        self._is_stopping = True
        if self._engine is not None:
            await self._engine.fleet.retire()
        if self._front is not None and self._connections is not None:
            self._front.drain()
            deadline = self._clock.now() + _DRAIN_S
            while self._front.figures().connections and self._clock.now() < deadline:  # noqa: ASYNC110  at the very end
                await asyncio.sleep(0.02)
            await self._connections.stop()
            self._front.stop()
        if self._back is not None:
            await self._back.stop()
        if self._ticker is not None:
            self._ticker.cancel()
        for part in (
            self._front_fleet, self._trim, self._cleaning, self._keeping, self._summaries, self._orders, self._blobs,
        ):  # fmt: skip
            if part is not None:
                await part.stop()
        if self._engine is not None:
            await self._engine.fleet.leave()
            await self._engine.close()
        if self._unix is not None:
            self._unix.remove()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        if self._audit is not None:
            self._audit.close()

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
            self._blobs = Blobs(engine, settings.blob_buckets, self._clock, settings.folder)
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
        me = FleetMember(settings.name or host_of_url(url), url, weight, settings.zone)
        membership = open_membership(settings.fleet, settings.environment) if settings.fleet else None
        listed = membership.listed(me.name) if isinstance(membership, StaticMembership) else None
        if listed is not None:
            me = as_listed(me, settings.weight, listed)
        tls = ClientTls(settings.client_tls)
        if settings.client_tls.names:
            tls.context()  # what is wrong is said at once
        peers = Peers(self._access.fleet_token(), tls)
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
        limits.open_targets = self._settings.observe.open_targets
        limits.connection_bytes_per_s = self._settings.connection_bytes_per_s
        self._front = front = Front(engine.store.index, engine.store.files.sending, limits)
        if self._certificate is not None:
            front.set_tls(self._certificate.context)
        for listener in listeners:
            listener.setblocking(False)
            front.listen(listener.detach())

        async def meet(member: FleetMember, said: FleetStatus) -> None:
            summaries.met(member.name, said.instance)
            await added.meet(member, said)

        engine.fleet.vetting.on_meeting = meet
        tells_of_reads = self._settings.observe.tells_of_reads
        told = self._front_fleet = FrontFleet(front, engine, self._clock, tells_of_reads=tells_of_reads)
        self._set_rules()
        hits = FrontHits(front.take_hits)
        watch = Watch(
            self._clock.now,
            self._spans,
            logs_access=self._settings.observe.access_log,
            audit=None if self._audit is None else self._audit.take,
            clients=ClientAddresses(self._settings.observe.trusted_proxies),
        )
        server = ServerFigures(SERVER_VERSION, self._started_wall_s, self._unready, self._requests)
        metrics = Metrics(engine, front, hits, orders, watch, server, self._access.names)
        observed = Observed(metrics, self._settings.observe, self._unready, self._notes)
        assert self._blobs is not None
        blobs = self._blobs
        statuses = Statuses(
            engine,
            blobs,
            hits,
            observed,
            SERVER_VERSION,
            lambda: self._clock.now() - self._started_at,
            self._notes,
        )
        admin = Admin(engine, blobs, keeping, added, summaries, orders, observed, statuses)
        objects = Objects(engine)
        settings = S3Settings(self._settings.s3_domains, engine.fleet.me.name, self._settings.s3_buckets_at)
        begun = BegunUploads(self._settings.folder, self._clock, engine.store.notes)
        face = S3Face(engine, objects, self._access, self._clock, settings, added, begun)
        self._cleaning = Cleaning(engine, self._access, self._clock, begun)
        links = Links(self._access, self._clock, self._settings.link_age_max_s)
        self._back = back = CacheBack(engine, admin, objects, face, blobs.face, self._doorkeeper, links)
        self._connections = Connections(
            front, engine.store.files, self._access, back.answer, engine.store.doubt, watch
        )
        front.set_now(engine.store.now_s())
        self._connections.start()
        front.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick(front, engine, told))

    def _notes(self) -> list[str]:
        if self._engine is None or self._added is None:
            return []
        problems = [
            self._doorkeeper.problem,
            None if self._audit is None else self._audit.problem,
            None if self._certificate is None else self._certificate.problem,
        ]
        said = [problem for problem in problems if problem is not None]
        return [*self._engine.store.notes, *self._engine.fleet.notes, *self._added.notes, *said]

    def _unready(self) -> list[str]:
        """Why requests are to go elsewhere, in words that tell nothing of this server."""
        if self._engine is None or self._ticker is None:
            return [STARTING]
        fleet = self._engine.fleet
        return [
            *([DRAINING] if self._is_stopping else []),
            *([NOT_IN_FLEET] if not fleet.is_single and not fleet.has_joined else []),
        ]

    def _requests(self) -> int:
        return 0 if self._connections is None else len(self._connections)

    def _has_joined_late(self) -> None:
        if self._engine is not None:
            self._engine.metadata.confirm_all()
            self._set_rules()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._failed.set()

    def _access_changed(self) -> None:
        """Tell the front who else is known, or known no more: that is often, and of few among many."""
        changes = self._access.take_changes()
        if changes is None or self._front is None:
            self._set_rules()
        else:
            self._front.change_tokens(
                changes.added, changes.removed, self._access.tenants(), changes.certificates
            )

    def _set_rules(self) -> None:
        """Tell the front who may read what, and for how long what is known of a bucket is good."""
        if self._front is None or self._engine is None or self._front_fleet is None:
            return
        rule = self._engine.metadata.rule
        buckets = {name: rule(bucket) for name, bucket in self._engine.buckets.items()}
        access = self._access
        access.take_changes()  # they are among all
        self._engine.store.room.set_tenant_quotas(access.quotas)
        blobs = {} if self._blobs is None else self._blobs.rules()
        self._front.set_rules(
            access.rules(),
            buckets,
            access.tenants(),
            access.is_open,
            access.asks_back,
            blobs,
            access.certificates(),
        )
        self._front_fleet.tell()

    async def _tick(self, front: Front, engine: Engine, told: FrontFleet) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            front.set_now(engine.store.now_s())
            try:
                self._doorkeeper.look()
                if self._certificate is not None and self._certificate.look():
                    front.set_tls(self._certificate.context)
                told.look()
            except Exception:
                # A defect here must not stop the front's clock, by which what it holds grows stale.
                log.exception("looking at the fleet, or at the files of access and certificates, failed")
