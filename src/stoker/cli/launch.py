"""Put master, cache and agent together for `stoker run`, and tell the user how it went."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stoker.agent.agent import Agent, AgentConfig
from stoker.agent.output import StreamChoice
from stoker.base.clock import SystemClock
from stoker.base.ids import new_token
from stoker.cache.embedded import EmbeddedCache
from stoker.cli.endpoint import Endpoint, JobToken, Nodes, address_towards, is_this_machine, token_of
from stoker.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    EnvironmentProblem,
)
from stoker.job.journal.sqlite import SqliteJournal
from stoker.job.machine import JobConfig, JobMachine
from stoker.job.master import Master, listen
from stoker.platform.local import LocalPlatform
from stoker.settings import Timeouts, cache_settings, environment, runtime_dir
from stoker.wire.job import Outcome

log = logging.getLogger("stoker")
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Launch:
    """A whole `stoker run`, as its flags say."""

    command: list[str]
    nodes: Nodes
    slots: int
    endpoint: Endpoint
    timeouts: Timeouts
    node_rank: int | None = None
    local_address: str | None = None
    job: str = "none"
    max_restarts: int | None = None
    log_dir: str = "stoker-logs"
    tee: StreamChoice = StreamChoice("--tee", "0")
    redirects: StreamChoice = StreamChoice("--redirects", "0")
    token_file: str | None = None
    buckets: dict[str, str] = field(default_factory=dict)
    cache_dir: str | None = None
    cache_capacity_bytes: int | None = None
    cache_endpoint: str | None = None
    no_cache: bool = False
    checkpoint_dir: str | None = None
    checkpoint_every: int = 100
    audit: bool = False
    show: Callable[[int, str, bytes], None] | None = None
    """Where worker lines go; None: to this process's own output, with the rank in front."""
    environment: dict[str, str] = field(default_factory=dict)
    """More variables for the workers."""
    on_start: Callable[[Agent, Master | None], None] | None = None
    """Called once everything runs."""


@dataclass(frozen=True)
class CachePart:
    """The embedded cache of this node."""

    cache: EmbeddedCache
    url: str
    token: str

    def stop(self) -> None:
        self.cache.stop()


async def run_job(launch: Launch) -> int:
    """Run this node's part of the job; returns the exit code."""
    folder = _log_folder(launch.log_dir)
    token = token_of(launch.endpoint, launch.token_file)
    master, port = await _start_master(launch, token, folder)
    cache = None
    try:
        cache = _start_cache(launch)
        agent = Agent(_agent_config(launch, token, port, folder, cache), LocalPlatform(), SystemClock())
        _on_signals(agent, master)
        if launch.on_start is not None:
            launch.on_start(agent, master)
        outcome = await _agent_until_end(agent, master)
        if master is not None:
            await master.close(grace_s=launch.timeouts.beat_timeout_s)
            token.forget()
        return _verdict(outcome, agent, folder, launch)
    finally:
        if cache is not None:
            cache.stop()


async def _agent_until_end(agent: Agent, master: Master | None) -> Outcome | None:
    outcome = await agent.run()
    if master is not None and outcome is None:
        return await master.wait()
    return outcome


def _verdict(outcome: Outcome | None, agent: Agent, folder: Path, launch: Launch) -> int:
    """Say how it ended: the first error of the run is what the user sees."""
    if outcome is None:
        log.info("this node has left the job")
        return EXIT_OK
    if outcome.success and not agent.late_failure:
        return _audit(folder) if launch.audit else EXIT_OK
    if outcome.success:
        print(agent.late_failure, file=sys.stderr)
        log.error("a worker failed after the training had ended; its output is in %s", folder)
        return 1
    if outcome.error:
        print(outcome.error.rstrip(), file=sys.stderr)
    log.error("the run failed: %s", outcome.why)
    if outcome.exit_code not in (EXIT_INTERRUPTED, TERMINATED):
        log.error("the output of every worker is in %s", folder)
    return outcome.exit_code


def _audit(folder: Path) -> int:
    from stoker.data.audit import audit_known
    from stoker.data.ledger import read_ledgers

    report = audit_known(list(read_ledgers(folder / "audit")))
    if report.unseen_steps:
        log.warning(
            "audit: this node's workers read only a part of %d steps; bring %s of all nodes together to check",
            report.unseen_steps,
            folder / "audit",
        )
        return EXIT_OK
    log.info(
        "audit: %d steps in %d generations, %d done again; records missed %d, repeated %d",
        report.steps,
        report.generations,
        report.steps_lost,
        report.missed,
        report.repeated,
    )
    return EXIT_OK if report.missed == report.repeated == 0 else 1


def _log_folder(base: str) -> Path:
    folder = Path(base) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot make the log folder {folder}: {error.strerror}; see --log-dir"
        ) from None
    return folder.resolve()


async def _start_master(launch: Launch, token: JobToken, folder: Path) -> tuple[Master | None, int]:
    """Become the master where this node may and nobody is; returns it and the port."""
    endpoint = launch.endpoint
    may_start = launch.node_rank == 0 or (launch.node_rank is None and is_this_machine(endpoint.host))
    if not may_start:
        if endpoint.port == 0:
            raise ConfigError("--node-rank above 0 needs --rdzv-endpoint HOST:PORT of the node with rank 0")
        return None, endpoint.port
    try:
        listener = listen(endpoint.host, endpoint.port)
    except EnvironmentProblem:
        if endpoint.port != 0 and launch.nodes.maximum > 1 and await _answers(endpoint):
            return None, endpoint.port
        raise
    machine = JobMachine(
        JobConfig(
            job=launch.job,
            min_nodes=launch.nodes.minimum,
            max_nodes=launch.nodes.maximum,
            max_restarts=launch.max_restarts,
            timeout_s=launch.timeouts.user_s,
            beat_timeout_s=launch.timeouts.beat_timeout_s,
            park_s=launch.timeouts.park_s,
            last_call_s=launch.timeouts.last_call_s,
        )
    )
    journal = SqliteJournal(folder / "events.db")
    master = Master(machine, clock=SystemClock(), journal=journal, token=token.value)
    await master.start(listener)
    return master, int(listener.getsockname()[1])


async def _answers(endpoint: Endpoint) -> bool:
    try:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except OSError:
        return False
    writer.close()
    return True


def _start_cache(launch: Launch) -> CachePart | None:
    if launch.no_cache or launch.cache_endpoint is not None:
        if launch.buckets:
            raise ConfigError(
                "--bucket is for the embedded cache: configure the buckets where the cache is served"
            )
        return None
    settings = cache_settings()
    token = new_token()
    capacity = launch.cache_capacity_bytes or settings.capacity_bytes
    directory = Path(launch.cache_dir) if launch.cache_dir else settings.directory
    cache = EmbeddedCache(directory, capacity, launch.buckets, token)
    try:
        endpoint = cache.start()
    except EnvironmentProblem as error:
        if launch.cache_dir:
            raise
        log.warning("the cache uses a folder of its own, removed at the end: %s", error)
        cache = EmbeddedCache(None, capacity, launch.buckets, token)
        endpoint = cache.start()
    return CachePart(cache, endpoint.unix_url, token)


def _agent_config(
    launch: Launch, token: JobToken, port: int, folder: Path, cache: CachePart | None
) -> AgentConfig:
    extra = dict(launch.environment)
    address = launch.local_address or address_towards(launch.endpoint)
    extra["STOKER_NODE_ADDRESS"] = address
    if cache is not None:
        extra["STOKER_CACHE_ENDPOINT"] = cache.url
        extra["STOKER_CACHE_TOKEN"] = cache.token
    if launch.cache_endpoint is not None:
        extra["STOKER_CACHE_ENDPOINT"] = launch.cache_endpoint
    if launch.checkpoint_dir is not None:
        extra["STOKER_CHECKPOINT_DIR"] = str(Path(launch.checkpoint_dir).resolve())
        extra["STOKER_CHECKPOINT_EVERY"] = str(launch.checkpoint_every)
    if launch.audit:
        extra["STOKER_AUDIT_DIR"] = str(folder / "audit")
    host = "127.0.0.1" if launch.endpoint.host in ("0.0.0.0", "::") else launch.endpoint.host
    return AgentConfig(
        master_host=host,
        master_port=port,
        token=token.value,
        command=launch.command,
        slots=launch.slots,
        host=socket.gethostname(),
        address=address,
        run_id=launch.job,
        log_dir=folder,
        runtime_dir=runtime_dir(),
        environment=environment(),
        extra=extra,
        rank_hint=-1 if launch.node_rank is None else launch.node_rank,
        timeouts=launch.timeouts,
        redirects=launch.redirects,
        tee=launch.tee,
        show=launch.show or _to_console,
    )


def _to_console(rank: int, stream: str, line: bytes) -> None:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.buffer.write(b"[rank %d] %s\n" % (rank, line))
    target.flush()


def _on_signals(agent: Agent, master: Master | None) -> None:
    """The first Ctrl-C ends the run in good order, the second at once."""
    seen: list[int] = []

    def handle(number: signal.Signals) -> None:
        seen.append(number)
        if len(seen) > 1:
            agent.kill()
            return
        why = f"interrupted by {number.name}"
        if master is not None:
            master.stop(why, 128 + number)
        else:
            agent.leave(why)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
