"""Whether this node hosts the job's master, how its agent finds it, and what signals to `stoker run` mean."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.agent.agent import Agent
from stoker.cli.endpoint import (
    ANY_ADDRESS,
    Endpoint,
    JobToken,
    address_towards,
    is_this_machine,
    listen_here,
)
from stoker.cli.master import MasterStart, job_config
from stoker.cli.master_process import MasterProcess
from stoker.cli.options import Launch
from stoker.cli.registry import JobRecord, Registration, new_record, process_id, records, register, sweep
from stoker.errors import ConfigError, EnvironmentProblem, JobError, MasterUnreachable, StokerError
from stoker.job.journal.open import EtcdPlace, journal_file, open_locator, parse_journal_url
from stoker.wire.control_client import JobClient, split_endpoint

if TYPE_CHECKING:
    from stoker.job.journal.leadership import EtcdLocator

log = logging.getLogger("stoker")
NO_WAY_EVERY_S = 0.5
TELL_AGAIN_S = 0.2


@dataclass
class Hosting:
    """Where the master is, and the process that it runs in where this node hosts it."""

    locate: Callable[[], Awaitable[tuple[str, int]]]
    address: str
    """This node's own, for the others."""
    endpoint: str
    """Where this machine reaches the master; empty: the journal says."""
    grace_s: float
    process: MasterProcess | None = None
    may_be_left: bool = False
    """Other nodes can host the master as well."""
    registration: Registration | None = None
    succeed: Callable[[], MasterProcess | None] = lambda: None
    """Hosts the next master where another command of this machine hosted the one before and is gone, if nobody listens
    at the endpoint any more."""
    locator: EtcdLocator | None = None

    async def moved(self, host: str, port: int) -> None:
        """Return once the master is known to be elsewhere than there."""
        if self.locator is not None:
            with contextlib.suppress(StokerError):  # the next stream will say
                async with contextlib.aclosing(self.locator.changes()) as changes:
                    async for leader in changes:
                        if leader is not None and split_endpoint(leader.endpoint) != (host, port):
                            return
        await asyncio.Event().wait()

    def has_master(self) -> bool:
        """Whether a master's process runs here."""
        return self.process is not None and self.process.is_alive

    def start(self) -> None:
        """Start the master, if it is to run here."""
        if self.process is not None:
            self.process.start()

    def look_after(self) -> None:
        """Take over from a master that is gone with the command that hosted it, where this one may."""
        if self.process is None and (process := self.succeed()) is not None:
            log.warning(
                "nobody hosts the master at %s any more: this command does, from now on", self.endpoint
            )
            self.process = process
            process.start()

    async def close(self) -> None:
        if self.process is not None:
            await self.process.close()
        if self.locator is not None:
            await self.locator.close()
        if self.registration is not None:
            self.registration.remove()


async def host_master(launch: Launch, token: JobToken, folder: Path) -> Hosting:
    """Find out where the master is to be; become its host where this node may and nobody is.

    Raises ConfigError, EnvironmentProblem.
    """
    hosting, listen_at = await _by_journal(launch) if launch.journal_is_shared else await _by_endpoint(launch)
    own_journal = launch.journal or str(folder / "events.db")
    record = new_record(
        job=launch.job,
        endpoint=hosting.endpoint,
        token=token.value,
        log_dir=str(folder),
        command=launch.command,
        journal=launch.journal if launch.journal_is_shared and launch.journal else "",
        journal_file=journal_file(own_journal) if listen_at is not None else "",
    )
    registration = hosting.registration = register(record)
    sweep()

    def process(listener: socket.socket, journal: str, *, continues: bool) -> MasterProcess:
        start = _master_start(launch, token, hosting, journal)
        made = MasterProcess(start, listener, continues=continues)
        named = msgspec.structs.replace(record, journal_file=journal_file(journal))
        made.on_spawn = lambda pid: _name_master(registration, named, pid)
        return made

    journal_of_other = _journal_of_other(launch, hosting) or journal_file(launch.journal or "memory:")

    def succeed() -> MasterProcess | None:
        nonlocal journal_of_other
        with contextlib.suppress(StokerError):
            # Remembered: once its command and its master are gone, nobody says so any more.
            journal_of_other = _journal_of_other(launch, hosting) or journal_of_other
        if not os.path.isfile(journal_of_other):
            return None
        try:
            listener = listen_here(launch.endpoint.host, launch.endpoint.port)
        except EnvironmentProblem:
            return None
        return process(listener, journal_of_other, continues=True)

    if listen_at is not None:
        hosting.process = process(listen_at, own_journal, continues=False)
    elif _may_start(launch):
        hosting.succeed = succeed
    return hosting


def _master_start(launch: Launch, token: JobToken, hosting: Hosting, journal: str) -> MasterStart:
    """All that a master which this command hosts is told."""
    config = job_config(
        launch.timeouts,
        job=launch.job,
        min_nodes=launch.nodes.minimum,
        max_nodes=launch.nodes.maximum,
        node_unit=launch.node_unit,
        relaunch=launch.relaunch,
        check_nodes=launch.check_nodes,
        exclude_stragglers=launch.exclude_stragglers,
        hang_after_s=launch.hang_after_s,
        auto_scale=launch.auto_scale,
        target_efficiency=launch.target_efficiency,
    )
    return MasterStart(
        config,
        token.value,
        hosting.endpoint,
        journal,
        grace_s=hosting.grace_s,
        lease_s=max(1.0, launch.timeouts.beat_timeout_s),
        ends_with_parent=launch.endpoint.port == 0 and not launch.journal_is_shared,
        verbose=launch.verbose,
    )


def _journal_of_other(launch: Launch, hosting: Hosting) -> str:
    """The file in which the master that another command of this machine hosts keeps its journal; empty: that is not
    known, and whoever took another would begin the job anew."""
    for known in records():
        is_host = any(process.role == "master" for process in known.processes)
        if (known.job, known.endpoint) == (launch.job, hosting.endpoint) and is_host and known.log_dir:
            return known.journal_file
    return ""


def _name_master(registration: Registration, record: JobRecord, pid: int) -> None:
    """A run that is killed leaves its master behind: the record has to live as long."""
    with contextlib.suppress(EnvironmentProblem):
        processes = (process_id("run"), process_id("master", pid))
        registration.update(msgspec.structs.replace(record, processes=processes))


async def _by_endpoint(launch: Launch) -> tuple[Hosting, socket.socket | None]:
    """The master is at the endpoint that all nodes were given."""
    endpoint = launch.endpoint
    listener = None
    port = endpoint.port
    if _may_start(launch):
        try:
            listener = listen_here(endpoint.host, endpoint.port)
            port = int(listener.getsockname()[1])
        except EnvironmentProblem:
            if endpoint.port == 0 or launch.nodes.maximum == 1 or not await _answers(endpoint):
                raise
    elif port == 0:
        raise ConfigError("--node-rank above 0 needs --rdzv-endpoint HOST:PORT of the node with rank 0")
    host = "127.0.0.1" if endpoint.host in ANY_ADDRESS else endpoint.host

    async def locate() -> tuple[str, int]:
        hosting.look_after()
        return host, port

    address = await _own_address(launch)
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    grace_s = launch.timeouts.beat_timeout_s + launch.timeouts.stop_grace_s
    hosting = Hosting(locate, address, shown, grace_s)
    return hosting, listener


def _may_start(launch: Launch) -> bool:
    """Whether the job's master may run here, if it is bound to an endpoint."""
    return launch.node_rank == 0 or (launch.node_rank is None and is_this_machine(launch.endpoint.host))


async def _by_journal(launch: Launch) -> tuple[Hosting, socket.socket | None]:
    """Every node may host the master; the journal elects one and tells the agents which."""
    assert launch.journal is not None
    locator = open_locator(launch.journal, launch.job)
    address = await _own_address(launch)
    listener = listen_here(address, 0)

    async def locate() -> tuple[str, int]:
        try:
            async with asyncio.timeout(launch.timeouts.beat_timeout_s):
                return split_endpoint(await locator.locate())
        except TimeoutError:
            raise MasterUnreachable(f"the journal at {launch.journal} names no master") from None

    endpoint = f"{address}:{listener.getsockname()[1]}"
    grace_s = launch.timeouts.beat_timeout_s + launch.timeouts.stop_grace_s
    return Hosting(locate, address, endpoint, grace_s, may_be_left=True, locator=locator), listener


async def _own_address(launch: Launch) -> str:
    """This node's address for the others. A node whose network is not there yet waits for it.

    Raises MasterUnreachable when there is no way to the endpoint for the whole timeout.
    """
    if launch.local_address:
        return launch.local_address
    loop = asyncio.get_running_loop()
    deadline = loop.time() + launch.timeouts.user_s
    is_said = False
    towards = _journals_endpoint(launch) if launch.journal_is_shared else launch.endpoint
    while (address := await asyncio.to_thread(address_towards, towards)) is None:
        where = f"{towards.host}:{towards.port}"
        if loop.time() > deadline:
            raise MasterUnreachable(
                f"there is no way to {where} from this node for {launch.timeouts.user_s:.0f} s: check --rdzv-endpoint "
                "and the network, or say this node's own address with --local-addr"
            )
        if not is_said:
            log.info("waiting for a way to %s", where)
            is_said = True
        await asyncio.sleep(NO_WAY_EVERY_S)
    return address


def _journals_endpoint(launch: Launch) -> Endpoint:
    """Where the journal is, if the job's own endpoint is not given: of its hosts the first that others reach, too."""
    if not launch.endpoint.is_loopback:
        return launch.endpoint
    assert launch.journal is not None
    place = parse_journal_url(launch.journal)
    hosts = place.endpoints if isinstance(place, EtcdPlace) else ()
    ends = [Endpoint(*split_endpoint(host)) for host in hosts]
    return next((end for end in ends if not end.is_loopback), launch.endpoint)


async def _answers(endpoint: Endpoint) -> bool:
    try:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except OSError:
        return False
    writer.close()
    return True


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    """To each process group of these, which began as sessions of their own."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


class Steering:
    """What Ctrl-C and SIGTERM mean."""

    def __init__(self, launch: Launch, agent: Agent, hosting: Hosting, token: JobToken) -> None:
        self._launch = launch
        self._agent = agent
        self._hosting = hosting
        self._token = token
        self._seen = 0
        self.exit_code = 0
        """What to exit with where the user would not wait for the end; 0: as the end says."""
        self._tasks: set[asyncio.Task[None]] = set()

    def on_signals(self) -> None:
        """Ctrl-C ends the job where its master is, else this node leaves. SIGTERM is a notice that this node will be
        taken away: it leaves, and the job goes on without it if it can. A second signal ends this node at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle, number)
        loop.add_signal_handler(signal.SIGTSTP, self._pause)

    def _pause(self) -> None:
        """Ctrl-Z stops all that belongs to this command, until `fg` or `bg` lets it go on. Where no shell could do that
        (`ssh -t host stoker run …`), the kernel does not let SIGTSTP stop it, and all go on at once."""
        everybody = list(self._agent.pids.values())
        if self._hosting.process is not None and self._hosting.process.pid:
            everybody.append(self._hosting.process.pid)
        _signal_all(everybody, signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTSTP, self._pause)
        _signal_all(everybody, signal.SIGCONT)

    def _handle(self, number: signal.Signals) -> None:
        self._seen += 1
        why = f"interrupted by {number.name}"
        if self._seen > 1:
            self.exit_code = 128 + number
            self._agent.leave(why)
            self._agent.kill()
            if self._hosting.process is not None:
                self._hosting.process.give_up()
        elif self._hosting.process is not None and (
            self._launch.nodes.maximum == 1 or number == signal.SIGINT
        ):
            task = asyncio.create_task(self._stop_job(why, 128 + number))
            self._tasks.add(task)
        else:
            self._agent.leave(why)

    async def _stop_job(self, why: str, exit_code: int) -> None:
        """End the job if its master is here. One that is just being started again is waited for, but not for long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._launch.timeouts.beat_timeout_s
        while True:
            try:
                host, port = await self._hosting.locate()
                if self._is_elsewhere(host, port):
                    self._agent.leave(why)
                    return
                await asyncio.to_thread(self._ask_to_stop, f"{host}:{port}", why, exit_code)
                return
            except StokerError as error:
                if type(error) is JobError:
                    return  # it has ended, and this node hears of that
                if loop.time() >= deadline:
                    log.warning("the master cannot be told to end the job (%s): this node leaves", error)
                    self._agent.leave(why)
                    return
            await asyncio.sleep(TELL_AGAIN_S)

    def _is_elsewhere(self, host: str, port: int) -> bool:
        """Whether the others go on with their master when this node leaves."""
        hosting = self._hosting
        is_here = not hosting.may_be_left or split_endpoint(hosting.endpoint) == (host, port)
        return self._launch.nodes.maximum > 1 and not is_here

    def _ask_to_stop(self, endpoint: str, why: str, exit_code: int) -> None:
        with JobClient(endpoint, self._token.value, timeout_s=2.0) as client:
            client.stop(why, exit_code)
