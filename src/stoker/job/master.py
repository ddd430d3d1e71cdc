"""The shell around `JobMachine`: reads sockets and clocks, feeds events, keeps what must last, carries effects out."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.errors import EXIT_FAILED, EnvironmentProblem, StokerError, WireError
from stoker.job.control.connection import serve_connection
from stoker.job.control.port import JobControl
from stoker.job.control.router import ControlRouter
from stoker.job.events import (
    Effect,
    End,
    Event,
    Keep,
    NodeBeat,
    NodeChecked,
    NodeCut,
    NodeJoined,
    NodeLost,
    NodeReported,
    Record,
    Refuse,
    Send,
    StacksTaken,
    StopRequested,
    Tell,
    Tick,
)
from stoker.job.journal.durable import Journal
from stoker.job.journal.keeper import Keeper
from stoker.job.machine import JobMachine
from stoker.job.news import News
from stoker.job.services import Desk, Service
from stoker.job.state import JobConfig
from stoker.job.words import sentence
from stoker.wire.frame_stream import FrameStream
from stoker.wire.frames import FrameCodec
from stoker.wire.health import CheckReply, NodeUse, StackReply
from stoker.wire.job import Beat, Join, NodeReport, Outcome, Refused, ToMaster, WorkerCall
from stoker.wire.stream import SWITCHING, Head

log = logging.getLogger("stoker.master")
QUIET = frozenset(
    {"worker-started", "node-joined", "waiting", "node-back", "node-cut", "shard-returned", "time-spent"}
)
BACKLOG = 4096
"""Connections that may wait to be taken: all nodes of a job come at once."""


@dataclass(frozen=True)
class MasterConfig:
    """What a master needs to know."""

    job: JobConfig
    token: str
    endpoint: str
    """`host:port` under which agents reach it."""
    tick_s: float = 0.5
    lease_s: float = 5.0
    """How long a journal with several candidates waits for a master that is silent."""
    continues: bool = False
    """A master of this job has died just now: no other job is begun."""
    patience_s: float = 0.0
    """How long to wait for a journal that cannot be reached to begin with."""


class Master:
    """One job's coordinator. It holds decisions, never data.

    `start` becomes the job's only master and listens, `wait` returns the job's outcome, `close` ends the streams.
    """

    def __init__(
        self,
        config: MasterConfig,
        *,
        clock: Clock,
        journal: Journal,
        services: Callable[[Mapping[str, bytes]], Mapping[str, Service]],
        control: Callable[[Master], JobControl],
    ) -> None:
        self.config = config
        self.clock = clock
        self.keeper = Keeper(journal, clock)
        self.machine = JobMachine(config.job)
        self.desk = Desk({})
        self.started_wall_s = clock.wall()
        self.uses: dict[str, NodeUse] = {}
        """What each node last said to be in use."""
        self.stack_listeners: list[Callable[[StackReply], None]] = []
        """Who wants to hear of every worker's stacks."""
        self._services = services
        self._codec: FrameCodec[ToMaster] = FrameCodec(ToMaster)
        self._streams: dict[str, asyncio.StreamWriter] = {}
        self._ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._deserted = asyncio.Event()
        """Every node has heard of the end and hung up, or is given up."""
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._connections: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self._news_for_services = News(self.machine, self.desk)
        self._router = ControlRouter(control(self), config.token)

    async def start(self, listener: socket.socket) -> None:
        """Become the job's master, take up what the one before has kept, and serve on a listening socket.

        Raises ConfigError for the journal of another job, JournalHeld, JournalUnavailable, JournalDamaged,
        LeadershipLost, WireError.
        """
        config = self.config
        records = await self.keeper.lead(
            config.endpoint, ttl_s=config.lease_s, continues=config.continues, patience_s=config.patience_s
        )
        self.keeper.begin(records, config.job.job)
        now = self.clock.now()
        self.machine = JobMachine.restore(
            config.job, records, now, rng=Rng(int(self.clock.wall() * 1e6)), epoch=self.keeper.epoch
        )
        self.desk = Desk(self._services(records))
        self._news_for_services = News(self.machine, self.desk)
        allow_many_streams()
        self._server = await asyncio.start_server(self._serve, sock=listener, backlog=BACKLOG)
        self._tasks = [
            asyncio.create_task(self._tick_forever(), name="master-tick"),
            asyncio.create_task(self._decide_forever(), name="master-decide"),
        ]
        self._news.set()

    async def wait(self) -> Outcome:
        """The outcome, once there is one. Raises LeadershipLost when another master has taken over."""
        lost = asyncio.create_task(self.keeper.wait_lost())
        failed = [*self._tasks]
        try:
            ends: list[asyncio.Future[Any]] = [self._ended, lost, *failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in failed:
                if task.done():
                    task.result()
            if not self._ended.done():
                lost.result()
            return self._ended.result()
        finally:
            lost.cancel()

    def stop(self, why: str, exit_code: int) -> None:
        """End the job now."""
        self.feed(StopRequested(why, exit_code))

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Wait up to `grace_s` for every node to hear of the end and hang up, then close everything."""
        has_ended = self._ended.done() and not self._ended.cancelled()
        with contextlib.suppress(TimeoutError):
            if has_ended:
                async with asyncio.timeout(grace_s):
                    await self._deserted.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        if has_ended and not self._streams:
            await self.keeper.close_job()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self.keeper.close()

    def tell(self, node: str, message: msgspec.Struct) -> None:
        """Send a node something that the machine need not know of."""
        self._send(node, message)

    def feed(self, event: Event) -> None:
        """Give the machine one event; what follows from it is decided in the next turn of the loop."""
        self.machine.apply(event, self.clock.now())
        if self.machine.needs_decision:
            self._news.set()

    # -- decisions ----------------------------------------------------------------------------------------

    async def _decide_forever(self) -> None:
        """One decision for all events that came together: written down first, then carried out."""
        while True:
            await self._news.wait()
            self._news.clear()
            now = self.clock.now()
            effects = self.machine.decide(now)
            self._news_for_services.on_decision(now)
            served = self.desk.take()
            self.machine.note_work(self.desk.work_done, now)
            if self.desk.failure and self.machine.outcome is None:
                self.machine.apply(StopRequested(self.desk.failure, EXIT_FAILED), now)
                effects += self.machine.decide(now)
            for event in served.events:
                self._record(replace(event, details={"generation": self.machine.generation, **event.details}))
            for effect in effects:
                if isinstance(effect, Keep):
                    self.keeper.keep(effect.key, effect.record)
                elif isinstance(effect, Record):
                    self._record(effect)
            for key, value in served.records.items():
                self.keeper.keep_bytes(key, value)
            await self.keeper.flush()
            for effect in effects:
                self._perform(effect)
            for answer in served.answers:
                worker = self.machine.roster.workers.get(answer.worker)
                if worker is not None:
                    self._send(worker.node, answer)
            self._hang_up_on_lost()
            away = (node.cut_since is not None for node in self.machine.roster.nodes.values())
            if self._ended.done() and not self._streams and not any(away):
                self._deserted.set()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(node, directive):
                self._send(node, directive)
            case Tell(node, message):
                self._send(node, message)
            case Refuse(node, why, is_stranger, outcome):
                self._send(node, Refused(why, is_stranger, outcome))
                writer = self._streams.get(node)
                if writer is not None:
                    writer.close()
            case End(outcome):
                if not self._ended.done():
                    self._ended.set_result(outcome)
            case _:
                pass

    def _hang_up_on_lost(self) -> None:
        """Who was given up as silent has to come back as a new node, should it still be there."""
        if len(self._streams) > len(self.machine.roster.nodes):
            for node, writer in list(self._streams.items()):
                if node not in self.machine.roster.nodes and not writer.is_closing():
                    writer.transport.abort()

    def _send(self, node: str, message: msgspec.Struct) -> None:
        writer = self._streams.get(node)
        if writer is not None and not writer.is_closing():
            writer.write(self._codec.encode(message))

    def _record(self, record: Record) -> None:
        """A line of the event log, for people too."""
        kind, why = record.kind, record.why
        quiet = kind in QUIET or (kind == "node-lost" and self.machine.phase == "ended")
        log.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s",
            sentence(kind, why, record.details),
        )
        self.keeper.tell(kind, why, record.details)

    async def _tick_forever(self) -> None:
        """A late tick is left out: this process itself was stopped (Ctrl-Z) or stuck, and what the nodes said
        meanwhile is still to be read. The next one comes in any case."""
        left_out = False
        tick_s = self.config.tick_s
        while True:
            before = self.clock.now()
            await asyncio.sleep(tick_s)
            was_stopped = left_out
            left_out = not left_out and self.clock.now() - before >= 2 * tick_s
            if not left_out:
                self.desk.on_tick(self.clock.now())
                self.feed(Tick(was_stopped))

    # -- streams ------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await serve_connection(reader, writer, self._router, on_upgrade=self._on_upgrade)
        except WireError as error:
            log.warning("closing a connection: %s", error)
            writer.close()
        except asyncio.CancelledError:
            writer.transport.abort()  # `close` ends it; nobody waits for this task
        finally:
            self._connections.discard(task)

    async def _on_upgrade(self, _: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An agent's stream, until it ends."""
        writer.write(SWITCHING)  # the agent says nothing before it has that: nothing waits in `reader`
        stream = FrameStream(self._codec, writer.transport)
        try:
            async with asyncio.timeout(10.0):
                join = await stream.first()
        except TimeoutError:
            raise WireError("an agent's stream began with silence") from None
        if not isinstance(join, Join):
            raise WireError("the first message of a stream must be a join")
        before = self._streams.get(join.node)
        if before is not None:
            before.transport.abort()  # the node came back before the end of its old stream was seen
        self._streams[join.node] = writer
        self.feed(NodeJoined(join))
        end: Event = NodeCut(join.node, "its stream was closed")
        try:
            await stream.listen(functools.partial(self._take, join.node))
            end = NodeLost(join.node, "its agent has ended")
        except OSError as error:
            end = NodeCut(join.node, f"its stream broke: {error}")
        except WireError as error:
            end = NodeLost(join.node, f"it does not keep to the protocol: {error}")
            raise
        finally:
            if self._streams.get(join.node) is writer:
                del self._streams[join.node]
                self.uses.pop(join.node, None)
                self.feed(end)

    def _take(self, node: str, message: ToMaster) -> None:
        match message:
            case Beat() if message.node == node:
                self.feed(NodeBeat(message))
            case NodeReport() if message.node == node:
                self._on_report(message)
            case StackReply():
                self.feed(StacksTaken(message))
                for listener in list(self.stack_listeners):
                    listener(message)
            case NodeUse():
                self.uses[node] = message
            case CheckReply():
                self.feed(NodeChecked(node, message))
            case WorkerCall():
                self._on_call(node, message)
            case _:
                raise WireError(f"{node} may only speak for itself")

    def _on_report(self, report: NodeReport) -> None:
        if self._news_for_services.on_report(report, self.clock.now()):
            self._news.set()
        if self.desk.failure and self.machine.outcome is None:
            self.feed(StopRequested(self.desk.failure, EXIT_FAILED))
        self.feed(NodeReported(report))

    def _on_call(self, node: str, call: WorkerCall) -> None:
        worker = self.machine.roster.workers.get(call.worker)
        is_own = call.worker == node and call.call.service == "remarks"  # a node speaks for itself
        if not is_own and (worker is None or worker.node != node or worker.ended):
            return
        try:
            self.desk.call(call.worker, call.call, self.clock.now())
        except StokerError as error:
            self.desk.refuse(call.worker, call.call.number, str(error))
        self._news.set()


def allow_many_streams() -> None:
    """Let this process have as many open files as it may: each node's stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int, *, flag: str = "--rdzv-endpoint") -> socket.socket:
    """Bind and listen, on IPv4 where a name has both. Raises EnvironmentProblem, naming the address and the mend, when
    that fails."""
    listener = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        why = error.strerror if isinstance(error, OSError) else "that is no name of a host"
        raise EnvironmentProblem(
            f"cannot listen on {host}:{port}: {why}; choose another port with {flag}"
        ) from None
    return listener
