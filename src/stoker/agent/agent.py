"""The shell around `NodeCore`: one stream to the master, child processes, a Unix socket for the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stoker.agent import core as decisions
from stoker.agent.core import NodeCore
from stoker.agent.environment import free_port, worker_environment
from stoker.agent.output import StreamChoice, WorkerOutput
from stoker.agent.workers import WorkerChannel
from stoker.base.clock import Clock
from stoker.base.ids import new_id
from stoker.errors import EnvironmentProblem, MasterUnreachable, WireError
from stoker.platform.port import Platform, Process
from stoker.settings import Timeouts
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Directive, Join, Outcome, Refused, ToAgent, WorkerExit, WorkerSpec, WorkerState
from stoker.wire.stream import open_stream

log = logging.getLogger("stoker.agent")
COALESCE_S = 0.05


@dataclass(frozen=True)
class AgentConfig:
    """What an agent needs to know."""

    master_host: str
    master_port: int
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
    rank_hint: int = -1
    timeouts: Timeouts = Timeouts()
    redirects: StreamChoice = StreamChoice("--redirects", "0")
    tee: StreamChoice = StreamChoice("--tee", "0")
    show: Callable[[int, str, bytes], None] | None = None
    """`show(rank, stream, line)`: a line for the console."""


@dataclass
class _Running:
    process: Process
    output: WorkerOutput
    failure: str = ""
    kill_timer: asyncio.TimerHandle | None = None


class Agent:
    """Runs a node's workers until the job ends."""

    def __init__(self, config: AgentConfig, platform: Platform, clock: Clock) -> None:
        self.config = config
        self.platform = platform
        self.clock = clock
        self.core = NodeCore(new_id("node"))
        self._codec: FrameCodec[ToAgent] = FrameCodec(ToAgent)
        self._running: dict[str, _Running] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._writer: asyncio.StreamWriter | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._flush_at = 0.0
        self._spare_port = 0
        self.late_failure = ""
        """Last words of a worker that failed after the run had succeeded."""
        self._done: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        path = config.runtime_dir / f"agent-{os.getpid()}-{new_id('s')[2:]}.sock"
        self._channel = WorkerChannel(
            path, on_hello=self._on_hello, on_state=self._on_state, on_failure=self._on_failure
        )

    async def run(self) -> Outcome | None:
        """Until the job ends (its outcome) or this node has left it (None).

        Raises MasterUnreachable when there is no master for the whole timeout, WireError and AccessDenied when
        it refuses this node.
        """
        await self._channel.start()
        try:
            while True:
                reader = await self._connect()
                if reader is None:
                    return None
                outcome = await self._session(reader)
                if self._done.done():
                    return self._done.result()
                if outcome is not None:
                    raise WireError(f"the master refuses this node: {outcome}")
                log.warning("lost the master: workers are stopped, joining again as a new node")
                self._apply(self.core.on_stream_lost())
                await self._wait_for_workers()
                if self.core.leaving:
                    return None
                self.core = NodeCore(new_id("node"))
        finally:
            self._apply(self.core.stop_all())
            await self._wait_for_workers()
            await self._channel.close()

    def leave(self, why: str) -> None:
        """Ask to leave the job in good order."""
        self.core.leaving = why
        self._report_soon(0.0)

    def kill(self) -> None:
        """End every worker now, and wait for nobody."""
        self._apply(self.core.stop_all())
        if self.core.leaving and not self._done.done():
            self._done.set_result(None)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running workers."""
        return {name: running.process.pid for name, running in self._running.items()}

    # -- the master ---------------------------------------------------------------------------------------

    async def _connect(self) -> asyncio.StreamReader | None:
        """Reach the master; None when this node is to leave before it did."""
        config = self.config
        deadline = self.clock.now() + config.timeouts.user_s
        said = False
        while not self.core.leaving:
            try:
                reader, self._writer = await open_stream(
                    config.master_host,
                    config.master_port,
                    config.token,
                    timeout_s=config.timeouts.beat_timeout_s,
                )
                return reader
            except MasterUnreachable as error:
                if self.clock.now() > deadline:
                    raise MasterUnreachable(
                        f"{error}, for {config.timeouts.user_s:.0f} s: start the job with node rank 0 first, and "
                        "check --rdzv-endpoint"
                    ) from None
                if not said:
                    log.info("waiting for the master at %s:%s", config.master_host, config.master_port)
                    said = True
                await asyncio.sleep(0.2)
        return None

    async def _session(self, reader: asyncio.StreamReader) -> str | None:
        """Speak with the master until the job ends or the stream breaks; returns why it refused this node."""
        config = self.config
        self._spare_port = free_port(config.address)
        self._send(
            Join(
                node=self.core.node,
                job=config.run_id,
                host=config.host,
                address=config.address,
                slots=config.slots,
                rank_hint=config.rank_hint,
            )
        )
        self._report()
        beating = asyncio.create_task(self._beat(), name="agent-beat")
        reading = asyncio.create_task(self._read(reader), name="agent-read")
        try:
            waited: set[asyncio.Future[Any]] = {reading, self._done}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return await reading if reading.done() else None
        finally:
            for task in (beating, reading):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    async def _read(self, reader: asyncio.StreamReader) -> str | None:
        """Take directives, which the master repeats all the time: one that is silent for the whole timeout is lost."""
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(self.config.timeouts.user_s):
                    message = await self._codec.read(reader)
                if message is None:
                    return None
                if isinstance(message, Refused):
                    return message.why
                assert isinstance(message, Directive)
                self._apply(self.core.on_directive(message))
        return None

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.config.timeouts.beat_interval_s)
            self._report()

    def _report_soon(self, delay_s: float) -> None:
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
        self._send(self.core.report(self._spare_port))

    def _send(self, message: msgspec.Struct) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(self._codec.encode(message))

    # -- workers ------------------------------------------------------------------------------------------

    def _apply(self, effects: list[decisions.Effect]) -> None:
        for effect in effects:
            match effect:
                case decisions.Spawn(spec):
                    self._spawn(spec)
                case decisions.Stop(worker, at_once):
                    self._stop(worker, at_once=at_once)
                case decisions.GiveOrder(worker, order):
                    self._channel.give(worker, order)
                case decisions.Leave(outcome):
                    if not self._done.done():
                        self._done.set_result(outcome)

    def _spawn(self, spec: WorkerSpec) -> None:
        config = self.config
        folder = config.log_dir / self.core.node / spec.worker
        output = WorkerOutput(folder, spec.slot, lambda stream, line: self._show(spec, stream, line))
        environment = worker_environment(
            config.environment,
            spec,
            run_id=config.run_id,
            address=config.address,
            agent_socket=str(self._channel.path),
            error_file=str(folder / "error.json"),
            timeout_s=config.timeouts.user_s,
            extra=config.extra,
        )
        try:
            process = self.platform.start(
                config.command,
                environment,
                on_output=output.feed,
                on_exit=lambda code, signal_number: self._on_exit(spec.worker, code, signal_number),
            )
        except EnvironmentProblem as error:
            output.close()
            self.core.problem = str(error)
            self._report_soon(0.0)
            return
        self._running[spec.worker] = _Running(process, output)
        self._idle.clear()
        self.core.on_spawned(spec.worker, process.pid)
        self._spare_port = free_port(config.address)
        self._report_soon(COALESCE_S)

    def _stop(self, worker: str, *, at_once: bool) -> None:
        running = self._running.get(worker)
        if running is None:
            return
        if at_once:
            running.process.signal(signal.SIGKILL)
            return
        running.process.signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        grace_s = self.config.timeouts.stop_grace_s
        running.kill_timer = loop.call_later(grace_s, running.process.signal, signal.SIGKILL)

    def _show(self, spec: WorkerSpec, stream: str, line: bytes) -> None:
        config = self.config
        hidden = config.redirects.has(spec.slot, stream) and not config.tee.has(spec.slot, stream)
        if config.show is not None and not hidden:
            config.show(self.rank_of(spec), stream, line)

    def rank_of(self, spec: WorkerSpec) -> int:
        """The worker's rank in the current world, or the one it was started with."""
        world = self.core.directive.world
        members = world.members if world is not None else ()
        return next((m.rank for m in members if m.worker == spec.worker), spec.rank)

    def _on_exit(self, worker: str, code: int | None, signal_number: int | None) -> None:
        running = self._running.pop(worker)
        if running.kill_timer is not None:
            running.kill_timer.cancel()
        running.output.close()
        if running.output.lost:
            log.warning("%s", running.output.lost)
        failed = code != 0
        outcome = self.core.directive.outcome
        said = running.failure or _error_file(running.output.folder) or running.output.last_traceback()
        words = said or running.output.last_lines()
        if signal_number == signal.SIGABRT and said:
            # An exception, whose exit PyTorch then aborts because a process group is still there.
            code, signal_number = 1, None
        ended = WorkerExit(
            code=code,
            signal=signal_number,
            message=words if failed else "",
            wall_s=self.clock.wall(),
        )
        was_released = outcome is not None and outcome.success and not self.core.is_stopping(worker)
        if failed and was_released and not self.late_failure:
            self.late_failure = words or f"{worker} ended with {code if code is not None else signal_number}"
        self._apply(self.core.on_exit(worker, ended))
        self._report_soon(0.0)
        if not self._running:
            self._idle.set()

    def _on_hello(self, worker: str) -> None:
        self._apply(self.core.on_hello(worker))
        self._report_soon(COALESCE_S)

    def _on_state(self, worker: str, state: WorkerState) -> None:
        known = self.core.workers.get(worker)
        only_commits = known is not None and known.state.phase == state.phase == "member"
        self._apply(self.core.on_state(worker, state))
        self._report_soon(COALESCE_S if only_commits else 0.0)

    def _on_failure(self, worker: str, message: str) -> None:
        running = self._running.get(worker)
        if running is not None:
            running.failure = message

    async def _wait_for_workers(self) -> None:
        await self._idle.wait()


def _error_file(folder: Path) -> str:
    """What torch's `@record` wrote, if the script uses it."""
    try:
        raw = msgspec.json.decode((folder / "error.json").read_bytes())
        message = raw["message"]
        if isinstance(message, str):
            return message
        extra = message.get("extraInfo", {})
        return str(extra.get("py_callstack") or message.get("message", ""))
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return ""
