"""An agent's one stream to the master: reached again when it breaks, reports and beats on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stoker.agent import core as decisions
from stoker.agent.core import NodeCore
from stoker.agent.environment import free_port
from stoker.agent.output import StreamChoice
from stoker.agent.writers import Outlet
from stoker.base.backoff import backoff_s
from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.errors import MasterUnreachable, StokerError
from stoker.settings import Timeouts
from stoker.wire.frames import FrameCodec
from stoker.wire.health import CheckTask, StackRequest
from stoker.wire.job import Directive, Join, Outcome, Refused, ToAgent, WorkerAnswer
from stoker.wire.stream import open_stream

log = logging.getLogger("stoker.agent")
COALESCE_S = 0.05
"""Seconds in which several changes go into one report."""
CONNECT_EVERY_S = 1.0
"""Longest pause between two tries to reach the master, seconds: a restarted one gives its nodes the beat timeout."""
LEAST_TRY_S = 0.5
"""What a try gets that begins as the time runs out."""
BEGINS_WITHIN_S = 60.0
"""What a master's process gets that this command has started: most of that goes into imports."""
HANG_UP_S = 1.0
"""How long a master may take to hang up on an agent that has hung up."""


def reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection off so that its peer gets an error instead of an orderly end."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    writer.transport.abort()


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel them; one that has failed raises why."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _never(_host: str, _port: int) -> None:
    await asyncio.Event().wait()


@dataclass(frozen=True)
class AgentConfig:
    """What an agent needs to know."""

    locate: Callable[[], Awaitable[tuple[str, int]]]
    """Host and port of the master; asked again for every stream. Raises MasterUnreachable where there is none."""
    token: str
    command: Sequence[str]
    """argv of a worker."""
    slots: int
    host: str
    address: str
    """Where other nodes reach this one."""
    run_id: str
    log_dir: Path
    runtime_dir: Path
    environment: Mapping[str, str]
    """Base environment of the workers."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Variables that override it."""
    slot_environments: Sequence[Mapping[str, str]] = ()
    """Variables for the worker of each slot, which override these; empty: none has its own."""
    moved: Callable[[str, int], Awaitable[object]] = _never
    """`moved(host, port)` returns once the master is known to be elsewhere: nobody waits for the old one's silence."""
    is_hosted: Callable[[], bool] = lambda: False
    """Whether the master's process is one that this command has started, and lives."""
    snapshot_dir: Path | None = None
    """Folder in shared memory where workers leave snapshots; None: there is none."""
    rank_hint: int = -1
    device: str = ""
    """What the node check runs on; empty: what there is."""
    timeouts: Timeouts = Timeouts()
    redirects: StreamChoice = StreamChoice("--redirects", "0")
    tee: StreamChoice = StreamChoice("--tee", "0")
    show: Callable[[int, str, Sequence[bytes]], None] | None = None
    """`show(rank, stream, lines)`: lines for the console, without their ends."""
    shown: Sequence[Outlet] = ()
    """Where shown lines go on to: while one is full, who prints waits."""


class MasterLink:
    """Speaks with the master for a `NodeCore`, which changes when this node has to come as a new one.

    `apply` carries out what the core decides; `is_idle` says whether no worker runs.
    """

    def __init__(
        self,
        config: AgentConfig,
        clock: Clock,
        core: NodeCore,
        *,
        apply: Callable[[list[decisions.Effect]], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self.config = config
        self.clock = clock
        self.core = core
        self._apply = apply
        self._is_idle = is_idle
        self.on_beat: Callable[[], None] = lambda: None
        """Called with each beat."""
        self.on_task: Callable[[StackRequest | CheckTask], None] = lambda _: None
        """Called with what the master asks for besides."""
        self._codec: FrameCodec[ToAgent] = FrameCodec(ToAgent)
        self._opened: asyncio.StreamWriter | None = None
        """A stream on which nothing has been said."""
        self._writer: asyncio.StreamWriter | None = None
        self._where = ("", 0)
        """Host and port at the other end of the stream."""
        self._flush: asyncio.TimerHandle | None = None
        self._flush_at = 0.0
        self._spare_port = 0
        self._heard_at = clock.now()
        """When a master was last heard of, or this agent began to look for one."""
        self._told = ""
        self._rng = Rng(os.getpid() ^ int(clock.wall() * 1e6))

    async def connect(self, done: asyncio.Future[Outcome | None]) -> asyncio.StreamReader | None:
        """Reach the master; None when this node is to leave before it did, or knows how the job has ended.

        Whoever has heard of no master for the whole timeout gives up: by then a master on the other side of a
        partition takes this node's workers for dead, and may have started others in their place. Once the training has
        ended no master has anything to add, and only the workers are waited for.
        """
        if self.core.directive.outcome is not None:
            await self._wait_for_workers(done)
            return None
        attempt = 0
        while not (done.done() or (self.core.leaving and self._may_leave_now())):
            patience_s = self._patience_s()
            deadline = self._heard_at + patience_s
            attempt += 1
            try:
                return await self._try(max(LEAST_TRY_S, deadline - self.clock.now()))
            except StokerError as error:
                # Who has had a master bears with whatever is at its address now: workers train on without it.
                if not (isinstance(error, MasterUnreachable) or self.core.was_taken):
                    raise
                if self.clock.now() >= deadline:
                    raise MasterUnreachable(
                        f"{error}, for {patience_s:.0f} s: start the job with node rank 0 first, and check "
                        "--rdzv-endpoint"
                    ) from None
                if attempt == 1 and not (self.core.was_taken and isinstance(error, MasterUnreachable)):
                    log.info("waiting for the master: %s", error)
            pause_s = backoff_s(attempt, self._rng, first_s=0.05, limit_s=CONNECT_EVERY_S)
            await asyncio.sleep(min(pause_s, max(0.0, deadline - self.clock.now())))
        return None

    def _patience_s(self) -> float:
        """How long no master may be heard of. One that this command itself starts, on a machine that is busy, takes as
        long as it takes to begin; as nobody has been told of this node yet, nobody counts the time."""
        user_s = self.config.timeouts.user_s
        is_beginning = self.config.is_hosted() and not self.core.was_taken
        return max(user_s, BEGINS_WITHIN_S) if is_beginning else user_s

    async def _try(self, within_s: float) -> asyncio.StreamReader:
        """Find the master and open a stream to it. Raises MasterUnreachable, also when that takes longer, and what
        `open_stream` does."""
        what = "nobody says where the master is"
        try:
            async with asyncio.timeout(within_s):
                host, port = self._where = await self.config.locate()
                what = f"the master at {host}:{port} does not answer"
                return await self._open(min(within_s, self.config.timeouts.beat_timeout_s))
        except TimeoutError:
            raise MasterUnreachable(what) from None

    async def _wait_for_workers(self, done: asyncio.Future[Outcome | None]) -> None:
        """Until all have ended, whose scripts may go on for as long as they like after the training."""
        beating = asyncio.create_task(self._beat(), name="agent-beat")
        try:
            waited: set[asyncio.Future[Any]] = {done, beating}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(beating)

    async def bear_with_a_stranger(self, why: str) -> None:
        """Another job's master is where this node's was: wait a moment before the next look.

        Raises MasterUnreachable when no master of its own was heard of for the whole timeout.
        """
        patience_s = self.config.timeouts.user_s
        if self.clock.now() - self._heard_at > patience_s:
            raise MasterUnreachable(
                f"no master of this job for {patience_s:.0f} s; the one there says: {why}"
            )
        await asyncio.sleep(CONNECT_EVERY_S)

    async def _open(self, timeout_s: float) -> asyncio.StreamReader:
        """Raises MasterUnreachable, also as soon as the master is known to be elsewhere: a dead one's listening socket
        may live on with its parent and keep whoever calls waiting."""
        host, port = self._where
        opening = asyncio.ensure_future(open_stream(host, port, self.config.token, timeout_s=timeout_s))
        looking_on = asyncio.ensure_future(self.config.moved(host, port))
        try:
            both: set[asyncio.Future[Any]] = {opening, looking_on}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise MasterUnreachable(f"the master is not at {host}:{port} any more")
            reader, self._opened = await opening
            return reader
        finally:
            for task in (opening, looking_on):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, StokerError):
                    await task

    def _may_leave_now(self) -> bool:
        """Whether there is nothing to hand over, or nobody came to take it."""
        silent_s = self.clock.now() - self._heard_at
        return self._is_idle() or silent_s > self.config.timeouts.beat_timeout_s

    async def session(
        self, reader: asyncio.StreamReader, done: asyncio.Future[Outcome | None]
    ) -> Refused | None:
        """Speak with the master until the job ends or the stream breaks; returns how it refused this node."""
        config, core = self.config, self.core
        self._writer, self._opened = self._opened, None
        self.renew_port()
        self.send(
            Join(
                node=core.node,
                job=config.run_id,
                host=config.host,
                address=config.address,
                slots=config.slots,
                rank_hint=config.rank_hint,
                resumes=core.was_taken,
                report_seq=core.report_seq,
                directive_seq=core.directive.seq,
                generation=core.directive.generation,
                world=core.world,
            )
        )
        self._report()
        for call in core.open_calls():
            self.send(call)
        beating = asyncio.create_task(self._beat(), name="agent-beat")
        reading = asyncio.create_task(self._read(reader), name="agent-read")
        looking_on = asyncio.ensure_future(config.moved(*self._where))
        try:
            waited: set[asyncio.Future[Any]] = {reading, looking_on, beating, done}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return await reading if reading.done() else None
        finally:
            try:
                await _end(beating, reading, looking_on)
            finally:
                await self._hang_up(reader, in_order=done.done())

    async def _hang_up(self, reader: asyncio.StreamReader, *, in_order: bool) -> None:
        """End the stream: `in_order` tells the master that this agent has ended, otherwise it is to come back.

        A socket that is closed while something in it is unread resets the connection, and the master might miss this
        node's last words: in order, it hangs up first. A reset on purpose is how the other case looks.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if not in_order:
            reset(writer)
            return
        with contextlib.suppress(OSError, TimeoutError):
            writer.write_eof()
            async with asyncio.timeout(HANG_UP_S):
                while await reader.read(65536):
                    pass
        writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Refused | None:
        """Take what the master says, who repeats itself all the time: a silent stream is a broken one."""
        timeouts = self.config.timeouts
        silence_s = min(timeouts.user_s, 3 * timeouts.beat_timeout_s)
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(silence_s):
                    message = await self._codec.read(reader)
                if message is None:
                    return None
                if isinstance(message, Refused):
                    return message
                self._heard_at = self.clock.now()
                if isinstance(message, WorkerAnswer):
                    self._apply(self.core.on_answer(message.worker, message.answer))
                elif isinstance(message, (StackRequest, CheckTask)):
                    self.on_task(message)
                else:
                    assert isinstance(message, Directive)
                    self._on_directive(message)
        return None

    def _on_directive(self, directive: Directive) -> None:
        was_leaving = self.core.leaving
        self._apply(self.core.on_directive(directive))
        if directive.note != self._told:
            self._told = directive.note
            if directive.note:
                log.info("%s", directive.note)
        if self.core.leaving != was_leaving:
            self.report_soon(0.0)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.config.timeouts.beat_interval_s)
            now = self.clock.now()
            self.on_beat()
            self._apply(self.core.on_tick(now, self.config.timeouts.beat_timeout_s))
            self.send(self.core.beat(self._spare_port, now))

    def renew_port(self) -> None:
        """Look for a port that nobody uses, for a script's own rendezvous."""
        self._spare_port = free_port(self.config.address)

    def report_soon(self, delay_s: float) -> None:
        """Send a report after at most `delay_s`; several changes go into one."""
        loop = asyncio.get_running_loop()
        at = loop.time() + delay_s
        if self._flush is not None:
            if self._flush_at <= at:
                return
            self._flush.cancel()
        self._flush_at = at
        self._flush = loop.call_at(at, self._report)

    def _report(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self.send(self.core.report(self._spare_port, self.clock.now()))

    def send(self, message: msgspec.Struct) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(self._codec.encode(message))
