"""The driver of a job on many hosts: asks which there are, and has an agent on each. The shell around `HostBook`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker import __version__
from stoker.base.clock import Clock
from stoker.cli.hosts_discovery import HostSource
from stoker.cli.hosts_options import HostOptions, agent_command, forwarded, is_local
from stoker.errors import EXIT_FAILED, ConfigError, EnvironmentProblem
from stoker.job.hosts import HostBook
from stoker.job.hosts_events import (
    AgentExited,
    Discovered,
    Effect,
    Event,
    GiveUp,
    JobEnded,
    KillAgent,
    LeaveAgent,
    Say,
    ScriptFailed,
    StartAgent,
    Tick,
)
from stoker.platform.remote import RemoteProcess, start_with_input
from stoker.wire.hosts import AgentEnd, AgentLeave, AgentStart, OptionValue, encode_line

log = logging.getLogger("stoker.hosts")
TICK_S = 0.2
KILL_AFTER_S = 2.0
"""An agent that was told to end has so long before its remote shell is killed."""
QUIET = frozenset({"agent-left"})


class Job(Protocol):
    """What the driver needs of the master; it says what happens through `Driver.feed`."""

    def stop(self, why: str, exit_code: int) -> None:
        """End the job now."""
        ...

    async def look(self) -> None:
        """Feed JobEnded if the job has ended: asked before the end of an agent is held against its host."""
        ...


@dataclass(frozen=True)
class AgentPlan:
    """What all agents of the job are told."""

    address_for: Callable[[str], str]
    """Where the agent on this host reaches the master; may ask a name server."""
    master_port: int
    token: str = field(repr=False)
    options: Mapping[str, OptionValue]
    """See `agent_options`."""
    directory: str
    environment: Mapping[str, str]
    """The driver's own environment; see `forwarded` for what of it the hosts get."""
    grace_s: float
    """How long agents go on leaving once the driver is gone."""
    log_dir: str

    def start_of(self, effect: StartAgent, master_host: str, variables: Mapping[str, str]) -> AgentStart:
        """The first line for one of them."""
        return AgentStart(
            version=__version__,
            host=effect.host,
            slots=effect.slots,
            order=effect.age,
            master_host=master_host,
            master_port=self.master_port,
            token=self.token,
            directory=self.directory,
            environment=dict(variables),
            options={**self.options, "log_dir": os.path.join(self.log_dir, effect.host.replace(":", "_"))},
            grace_s=self.grace_s,
        )


class Driver:
    """Keeps an agent on every host that should have one.

    `start` begins; `feed` takes what the master says; `close` ends the agents that are left. Its agents live by their
    remote shells, which tell them by the end of their input when this process is gone.
    """

    def __init__(
        self,
        book: HostBook,
        options: HostOptions,
        source: HostSource,
        plan: AgentPlan,
        job: Job,
        clock: Clock,
        *,
        show: Callable[[str, str, list[bytes]], None],
        record: Callable[[str, str, dict[str, Any]], None] | None = None,
    ) -> None:
        """`show(host, stream, lines)` gets what the hosts print and must not wait; `record(kind, why, details)` lines
        for the event log."""
        self.book = book
        self._options = options
        self._source = source
        self._plan = plan
        self._job = job
        self._clock = clock
        self._record = record
        self._show = show
        self._agents: dict[str, RemoteProcess] = {}
        self._addresses: dict[str, str] = {}
        """The master's, as seen from each host."""
        self._endings: dict[str, asyncio.Task[None]] = {}
        """Agents that have ended, and of which the book does not know yet."""
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to ask for hosts."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._discover(), name="host-discovery"),
            loop.create_task(self._tick(), name="host-tick"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._check_task)

    async def close(self, grace_s: float | None, *, success: bool = False) -> None:
        """The job is over: wait for the agents to end, which the master has told to; after `grace_s` kill them.

        None waits without end: after a success scripts may have something to save.
        """
        self.feed(JobEnded(success))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._nobody.wait()
        self.kill("the job has ended")
        await self._nobody.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self, why: str) -> None:
        """End every agent now."""
        for host in list(self._agents):
            self._kill(host, why)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the remote shells by host."""
        return {host: process.pid for host, process in self._agents.items()}

    def feed(self, event: Event) -> None:
        """Give the book one event and carry out what it asks for."""
        for effect in self.book.step(event, self._clock.now()):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartAgent():
                self._start_agent(effect)
            case LeaveAgent(host, why):
                self._tell(host, AgentLeave(why))
            case KillAgent(host, why):
                self._kill(host, why)
            case Say(kind, why, details):
                log.log(logging.DEBUG if kind in QUIET else logging.INFO, "%s", why)
                if self._record is not None:
                    self._record(kind, why, details)
            case GiveUp(why, exit_code):
                self._job.stop(why, exit_code)

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """A driver that does not look for hosts any more must not go on as if it did."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self._job.stop(f"the driver failed: {error!r}", EXIT_FAILED)

    # -- hosts --------------------------------------------------------------------------------------------

    async def _discover(self) -> None:
        """Ask, wait, ask again: never twice at a time."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                listed = await self._source.read()
                await self._look_up([h.host for h in listed.hosts if h.host not in self._addresses])
                self.feed(Discovered(listed))
            except (ConfigError, EnvironmentProblem) as error:
                self.feed(ScriptFailed(str(error)))
            await asyncio.sleep(max(0.0, begun + self._options.interval_s - loop.time()))

    async def _look_up(self, hosts: Sequence[str]) -> None:
        found = await asyncio.gather(*(asyncio.to_thread(self._plan.address_for, host) for host in hosts))
        self._addresses.update(zip(hosts, found, strict=True))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.feed(Tick())

    def _start_agent(self, effect: StartAgent) -> None:
        host, options = effect.host, self._options
        variables = forwarded(self._plan.environment, options.forward)
        argv = agent_command(options.python, variables)
        try:
            process = start_with_input(
                argv if is_local(host) else options.shell.argv(host, argv),
                self._plan.environment,
                on_line=lambda stream, line: self._show(host, stream, [line]),
                on_exit=lambda code, number, last: self._ended(host, code, number, last),
            )
        except EnvironmentProblem as error:
            asyncio.get_running_loop().call_soon(self.feed, AgentExited(host, None, str(error)))
            return
        self._agents[host] = process
        self._nobody.clear()
        process.write(encode_line(self._plan.start_of(effect, self._addresses[host], variables)))

    def _tell(self, host: str, message: AgentLeave | AgentEnd) -> None:
        process = self._agents.get(host)
        if process is not None:
            process.write(encode_line(message))

    def _kill(self, host: str, why: str) -> None:
        process = self._agents.get(host)
        if process is not None:
            self._tell(host, AgentEnd(why))
            process.close_input()
            asyncio.get_running_loop().call_later(KILL_AFTER_S, process.signal, signal.SIGKILL)

    def _ended(self, host: str, code: int | None, signal_number: int | None, last_words: str) -> None:
        del self._agents[host]
        how = "" if signal_number is None else f"its remote shell was killed by signal {signal_number}"
        exited = AgentExited(host, code, ": ".join(part for part in (how, last_words) if part))
        ending = asyncio.get_running_loop().create_task(self._tell_of(exited), name=f"ending-{host}")
        self._endings[host] = ending

    async def _tell_of(self, exited: AgentExited) -> None:
        try:
            await self._job.look()
        finally:
            del self._endings[exited.host]
            self.feed(exited)
            if not self._agents and not self._endings:
                self._nobody.set()
