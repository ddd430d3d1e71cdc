"""Put master, cache and agent together for `stoker run`, and tell the user how it went."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.agent.accelerators import AUTO
from stoker.agent.agent import Agent
from stoker.agent.console import Console
from stoker.agent.link import AgentConfig
from stoker.base.clock import SystemClock
from stoker.base.ids import new_token
from stoker.cache.embedded import EmbeddedCache
from stoker.cli.endpoint import JobToken, token_of
from stoker.cli.hosting import Hosting, Steering, host_master
from stoker.cli.job_events import summary_in
from stoker.cli.options import Launch
from stoker.cli.run_logs import audited, log_folder
from stoker.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, EnvironmentProblem
from stoker.platform.group_guard import GroupGuard
from stoker.platform.local import LocalPlatform
from stoker.platform.programs import require_program
from stoker.platform.shared_folders import make_owned_folder, remove_folder, shared_base
from stoker.settings import cache_settings, environment, reports_at_exit, runtime_dir, snapshot_base
from stoker.wire.job import Outcome

log = logging.getLogger("stoker")
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class CachePart:
    """The embedded cache of this node."""

    cache: EmbeddedCache
    url: str
    token: str

    def stop(self) -> None:
        self.cache.stop()


async def run_job(launch: Launch) -> int:
    """Run this node's part of the job; returns the exit code.

    Raises ConfigError, EnvironmentProblem (also for a program that is not there), MasterUnreachable and their like.
    """
    require_program(launch.command[0], {**environment(), **launch.environment})
    folder = log_folder(launch.log_dir)
    console = Console() if launch.show is None else None
    if console is not None:
        console.take_logs()
    killed = asyncio.Event()
    try:
        return await _run_with(launch, folder, console, killed)
    finally:
        if console is not None:
            await console.close(launch.timeouts.user_s, killed)


async def _run_with(launch: Launch, folder: Path, console: Console | None, killed: asyncio.Event) -> int:
    """Everything between the console's beginning and its end; `killed` is set when there is a hurry to end."""
    token = token_of(launch.endpoint, launch.token_file, shared_journal=launch.journal_is_shared)
    hosting = await host_master(launch, token, folder)
    cache, guard, snapshots = None, GroupGuard(), None
    try:
        cache = _start_cache(launch)
        snapshots = _snapshot_folder(launch)
        config = _agent_config(launch, token, hosting, folder, cache, console, snapshots)
        agent = Agent(config, LocalPlatform(guard), SystemClock(), killed=killed)
        if hosting.process is not None:
            first = agent.core.node
            hosting.process.has_taken_part = lambda: agent.core.was_taken or agent.core.node != first
        steer = Steering(launch, agent, hosting, token)
        steer.on_signals()
        hosting.start()
        if launch.on_start is not None:
            launch.on_start(agent)
        outcome = await _until_end(agent, hosting, launch.timeouts.beat_timeout_s)
        if outcome is None and steer.exit_code:
            log.error("interrupted: the workers were ended at once")
            return steer.exit_code
        if hosting.process is not None:
            token.forget()
        if outcome is not None and outcome.success:
            await _tell_summary(folder)
        return _verdict(outcome, agent, folder, launch, _say if console is None else console.say)
    finally:
        guard.close()
        await hosting.close()
        if cache is not None:
            cache.stop()
        if snapshots is not None:
            remove_folder(snapshots)


async def _until_end(agent: Agent, hosting: Hosting, patience_s: float) -> Outcome | None:
    """Until the job has ended, or this node has left it and is not needed for its master either."""
    running = asyncio.create_task(agent.run(), name="agent")
    master, missed = hosting.process, None
    try:
        if master is not None:
            ends: list[asyncio.Future[Any]] = [running, master.ended]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if master.ended.done() and agent.core.directive.outcome is None:
                ended = await master.wait()  # raises why there will be no more master
                if ended is not None and await _has_missed_end(agent, running, ended, patience_s):
                    missed = ended
        outcome = await running or (None if agent.is_killed else missed)
    finally:
        if not running.done():
            agent.kill()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    master = hosting.process
    if master is None or agent.is_killed:
        return outcome
    if outcome is None and not hosting.may_be_left:
        log.info("this node has left the job; its master stays until the job ends")
        return await master.wait()
    if hosting.may_be_left:
        master.retire(at_once=outcome is None)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(hosting.grace_s):
            await master.wait()
    return outcome


async def _has_missed_end(
    agent: Agent, running: asyncio.Task[Outcome | None], ended: Outcome, patience_s: float
) -> bool:
    """Whether an agent has not heard of the end from a master, and is told to go.

    It was away from the others while the job ended, and by now they have gone. The master here, which was next, has
    found in the journal that it is over, and no node that it could tell.
    """
    if agent.core.directive.outcome is None:
        await asyncio.wait([running], timeout=patience_s)
    if running.done() or agent.core.directive.outcome is not None:
        return False
    log.warning("the job has ended while this node did not reach its master: %s", ended.why)
    agent.leave("the job has ended")
    return True


async def _tell_summary(folder: Path) -> None:
    """Where the time went, on the node that has the event log."""
    if not reports_at_exit():
        return
    with contextlib.suppress(EnvironmentProblem):  # it is not worth a failure
        summary = await asyncio.to_thread(summary_in, folder)
        if summary is not None and summary.has_worlds:
            log.info("%s", summary)


def _verdict(
    outcome: Outcome | None, agent: Agent, folder: Path, launch: Launch, say: Callable[[str], None]
) -> int:
    """Say how it ended: the first error of the run is what the user sees."""
    if outcome is None:
        log.info("this node has left the job")
        return EXIT_OK
    if outcome.success and not agent.late_failure:
        return audited(folder, "nodes") if launch.audit else EXIT_OK
    if outcome.success:
        say(f"{agent.late_failure}\n")
        log.error("a worker failed after the training had ended; its output is in %s", folder)
        return 1
    if outcome.error:
        say(f"{outcome.error.rstrip()}\n")
    log.error("the run failed: %s", outcome.why)
    if outcome.exit_code not in (EXIT_INTERRUPTED, TERMINATED):
        log.error("the output of every worker is in %s", folder)
    return outcome.exit_code


def _start_cache(launch: Launch) -> CachePart | None:
    if launch.no_cache or launch.cache_endpoint is not None:
        if launch.buckets:
            raise ConfigError(
                "--bucket is for the embedded cache: configure the buckets where the cache is served"
            )
        return None
    settings = cache_settings()
    token = new_token()
    given = launch.cache_capacity_bytes
    capacity = settings.capacity_bytes if given is None else given
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


def _snapshot_folder(launch: Launch) -> Path | None:
    """Where this node's workers leave snapshots for those that come after them; None: each makes one of its own."""
    try:
        return make_owned_folder(snapshot_base() or shared_base(), launch.job)
    except EnvironmentProblem as error:
        log.warning("a run whose workers all die goes on from a storage alone: %s", error)
        return None


def _agent_config(
    launch: Launch,
    token: JobToken,
    hosting: Hosting,
    folder: Path,
    cache: CachePart | None,
    console: Console | None,
    snapshots: Path | None,
) -> AgentConfig:
    extra = dict(launch.environment)
    extra["STOKER_SNAPSHOT_DIR"] = str(snapshots) if snapshots is not None else ""
    extra["STOKER_SAVER"] = "1" if snapshots is not None else "0"
    extra["STOKER_NODE_ADDRESS"] = hosting.address
    if cache is not None:
        extra["STOKER_CACHE_ENDPOINT"] = cache.url
        extra["STOKER_CACHE_TOKEN"] = cache.token
    if launch.cache_endpoint is not None:
        extra["STOKER_CACHE_ENDPOINT"] = launch.cache_endpoint
    if launch.checkpoint_dir is not None:
        is_url = "://" in launch.checkpoint_dir
        extra["STOKER_CHECKPOINT_DIR"] = (
            launch.checkpoint_dir if is_url else str(Path(launch.checkpoint_dir).resolve())
        )
        extra["STOKER_CHECKPOINT_EVERY"] = str(launch.checkpoint_every)
    extra["STOKER_ACCELERATOR"] = launch.accelerator
    if launch.auto_tune:
        extra["STOKER_AUTO_TUNE"] = "1"
    if launch.audit:
        extra["STOKER_AUDIT_DIR"] = str(folder / "audit")
    return AgentConfig(
        locate=hosting.locate,
        moved=hosting.moved,
        is_hosted=hosting.has_master,
        token=token.value,
        command=launch.command,
        slots=launch.slots,
        host=launch.host or socket.gethostname(),
        address=hosting.address,
        run_id=launch.job,
        log_dir=folder,
        runtime_dir=runtime_dir(),
        snapshot_dir=snapshots,
        environment=environment(),
        extra=extra,
        slot_environments=launch.slot_environments,
        device="" if launch.accelerator == AUTO else launch.accelerator,
        rank_hint=-1 if launch.node_rank is None else launch.node_rank,
        timeouts=launch.timeouts,
        redirects=launch.redirects,
        tee=launch.tee,
        show=console.show if console is not None else _one_by_one(launch.show),
        shown=console.outlets if console is not None else (),
    )


def _one_by_one(
    show: Callable[[int, str, bytes], None] | None,
) -> Callable[[int, str, Sequence[bytes]], None] | None:
    """For whoever wants to be shown each line."""
    if show is None:
        return None

    def show_all(rank: int, stream: str, lines: Sequence[bytes]) -> None:
        for line in lines:
            show(rank, stream, line)

    return show_all


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
