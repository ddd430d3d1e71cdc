"""`stoker master`: a job's coordinator as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from stoker.base.clock import SystemClock
from stoker.base.units import parse_duration_s
from stoker.cli.endpoint import (
    ANY_ADDRESS,
    DEFAULT_JOB,
    DEFAULT_PORT,
    Endpoint,
    endpoint_of,
    listen_here,
    nodes_of,
    token_of,
)
from stoker.cli.policy import (
    add_policy_flags,
    add_scale_flags,
    hang_after_of,
    parsed,
    relaunch_of,
    target_efficiency_of,
)
from stoker.cli.registry import new_record, process_id, register
from stoker.errors import (
    EXIT_OK,
    AccessDenied,
    ConfigError,
    JournalUnavailable,
    LeadershipLost,
    StokerError,
    WireError,
)
from stoker.job.journal.open import EtcdPlace, journal_file, open_journal, parse_journal_url
from stoker.job.master import Master, MasterConfig
from stoker.job.meeting import Meetings
from stoker.job.overview import Overview
from stoker.job.remarks import Remarks
from stoker.job.services import Service
from stoker.job.shard_service import ShardService
from stoker.job.state import JobConfig
from stoker.settings import DEFAULT_TIMEOUT_S, Timeouts
from stoker.wire.job import Outcome

log = logging.getLogger("stoker.master")
EXIT_AGAIN = 75
"""Another master has taken over, or the journal is away: this one may wait for its turn again."""
REFUSES = "REFUSES"
"""In the place of a level: why a master that `stoker run` has started ends."""

EPILOG = """\
examples:
  export STOKER_JOB_TOKEN=$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')
  stoker master --listen 0.0.0.0:29400 --journal /var/lib/stoker/job.db --nnodes 2:8
  stoker master --listen host1:29400 --journal etcd://etcd1:2379,etcd2:2379 --rdzv-id bert --nnodes 2:8
  # the nodes, with the same token:
  stoker run --rdzv-endpoint host1:29400 --nproc-per-node 8 --node-rank 1 train.py

A master that dies is started again with the same journal; the workers train on meanwhile. SIGTERM and Ctrl-C end this
process and leave the job alone; `stoker job stop` ends the job.
"""


class MasterStart(msgspec.Struct, frozen=True):
    """All that a master process is told."""

    job: JobConfig
    token: str
    endpoint: str
    """`host:port` for agents and for the registry."""
    journal: str
    grace_s: float = 5.0
    """How long the nodes have at the end to hear of it and to stop their workers."""
    lease_s: float = 5.0
    follows: bool = False
    """There was a master before it: a journal that cannot be reached, or denies access for now, is waited for."""
    continues: bool = False
    """A master of this job died just now: should the job be over, its nodes are to hear of that, and none begins."""
    ends_with_parent: bool = False
    """Nobody else knows where it listens: should `stoker run` be killed, no node will ever come again."""
    verbose: bool = False


def add_master_parser(subparsers: Any) -> None:
    """Add `master`."""
    parser = subparsers.add_parser(
        "master",
        help="run a job's coordinator alone",
        description="Run the coordinator of one job as a process of its own. `stoker run` starts one by itself.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("--from-stdin", action="store_true", help=argparse.SUPPRESS)
    flag("--listen-fd", type=int, default=None, help=argparse.SUPPRESS)
    flag("--listen", default=f"127.0.0.1:{DEFAULT_PORT}", metavar="HOST:PORT", help="where agents reach it")
    flag(
        "--journal",
        default="stoker-master.db",
        metavar="URL",
        help="a file (stoker-master.db), or etcd://host:2379,host:2379",
    )
    flag("--rdzv-id", default=DEFAULT_JOB, metavar="ID", help="name of the job")
    flag(
        "--nnodes", default="1:1024", metavar="MIN:MAX", help="nodes that the job needs and may have (1:1024)"
    )
    flag("--node-unit", type=int, default=1, metavar="N", help="a world's nodes are a multiple of this (1)")
    flag("--max-restarts", type=int, default=None, metavar="N", help="restarts of workers that failed")
    flag("--timeout", default=f"{DEFAULT_TIMEOUT_S:.0f}s", metavar="TIME", help="the job's one timeout")
    flag("--job-token-file", metavar="FILE", help="file with the job's secret (else STOKER_JOB_TOKEN)")
    add_policy_flags(parser.add_argument_group("failures and health"))
    add_scale_flags(parser.add_argument_group("scaling"))
    parser.set_defaults(handler=handle_master)


def handle_master(arguments: argparse.Namespace) -> int:
    """Run a master; returns the job's exit code."""
    if arguments.from_stdin:
        return _handle_child(arguments.listen_fd)
    timeouts = Timeouts.from_user_timeout(parsed("--timeout", parse_duration_s, arguments.timeout))
    nodes = nodes_of(arguments.nnodes)
    where = endpoint_of(
        nodes, rdzv_endpoint=arguments.listen, master_addr=None, master_port=None, flag="--listen"
    )
    config = job_config(
        timeouts,
        job=arguments.rdzv_id,
        min_nodes=nodes.minimum,
        max_nodes=nodes.maximum,
        node_unit=arguments.node_unit,
        relaunch=relaunch_of(arguments, slots=None),
        check_nodes=arguments.node_check,
        exclude_stragglers=arguments.exclude_stragglers,
        hang_after_s=hang_after_of(arguments),
        auto_scale=arguments.auto_scale,
        target_efficiency=target_efficiency_of(arguments),
        outlives_nodes=True,
    )
    listener = listen_here(where.host, where.port, flag="--listen")
    host, port = where.host, int(listener.getsockname()[1])
    shown = socket.gethostname() if host in ANY_ADDRESS else host
    token = token_of(Endpoint(host, port), arguments.job_token_file)
    grace_s = timeouts.beat_timeout_s + timeouts.stop_grace_s
    start = MasterStart(config, token.value, f"{shown}:{port}", arguments.journal, grace_s)
    record = new_record(
        job=config.job,
        endpoint=start.endpoint,
        token=token.value,
        processes=[process_id("master")],
        log_dir="",
        command=["stoker", "master"],
        journal=start.journal if isinstance(parse_journal_url(start.journal), EtcdPlace) else "",
        journal_file=journal_file(start.journal),
    )
    with contextlib.ExitStack() as stack:
        if where.port == 0:
            stack.callback(token.forget)  # no other master will have this port

        def on_start() -> None:
            stack.enter_context(register(record))
            log.info(
                "the master of job %r listens on %s:%s; its journal is %s",
                config.job,
                host,
                port,
                start.journal,
            )

        outcome = asyncio.run(serve(start, listener, on_start=on_start))
    if outcome is None:
        return EXIT_OK
    token.forget()
    return outcome.exit_code


def job_config(timeouts: Timeouts, **options: Any) -> JobConfig:
    """A job's configuration with the times that follow from the user's timeout. Raises ConfigError."""
    return JobConfig(
        timeout_s=timeouts.user_s,
        beat_timeout_s=timeouts.beat_timeout_s,
        park_s=timeouts.park_s,
        last_call_s=timeouts.last_call_s,
        **options,
    )


async def serve(
    start: MasterStart,
    listener: socket.socket,
    *,
    on_made: Callable[[Master], None] = lambda _: None,
    on_start: Callable[[], None] = lambda: None,
) -> Outcome | None:
    """Be the job's master until it has ended (its outcome) or a signal ends this process (None).

    `on_start` is called once it is the only one and agents may come. Raises what `Master.start` and `wait` do.
    """
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            log.info("%s: this master ends, the job goes on until another takes up its journal", number.name)
            stopped.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    has_its_own_servers = isinstance(parse_journal_url(start.journal), EtcdPlace)
    config = MasterConfig(
        start.job,
        start.token,
        start.endpoint,
        lease_s=start.lease_s,
        continues=start.continues,
        patience_s=start.job.timeout_s if has_its_own_servers else 0.0,
    )
    journal = open_journal(start.journal, start.job.job)
    master = Master(config, clock=SystemClock(), journal=journal, services=_services, control=Overview)
    on_made(master)
    waiting: asyncio.Task[Outcome] = asyncio.create_task(_whole(master, listener, on_start))
    try:
        ends: list[asyncio.Future[Any]] = [waiting, stopped]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError, StokerError):
            await waiting
        await master.close(grace_s=start.grace_s if not stopped.done() else 0.0)


async def _whole(master: Master, listener: socket.socket, on_start: Callable[[], None]) -> Outcome:
    await master.start(listener)
    on_start()
    return await master.wait()


def _services(records: Mapping[str, bytes]) -> dict[str, Service]:
    return {
        "meeting": Meetings(records),
        "remarks": Remarks(),
        "shards": ShardService(records, time.monotonic()),
    }


# -- as a child of `stoker run` -------------------------------------------------------------------------------


def _handle_child(listen_fd: int | None) -> int:
    """What `stoker run` starts: told on standard input, heard on standard output (the outcome) and error (the log)."""
    if listen_fd is None:
        raise ConfigError("--from-stdin is for `stoker run`, which also gives --listen-fd")
    try:
        start = msgspec.json.decode(sys.stdin.buffer.readline(), type=MasterStart)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not a master's start: {error}") from None
    _log_for_parent(verbose=start.verbose)
    listener = socket.socket(fileno=listen_fd)
    try:
        outcome = asyncio.run(_serve_parent(start, listener))
    except LeadershipLost as error:
        log.warning("%s", error)
        return EXIT_AGAIN
    except StokerError as error:
        if isinstance(error, (JournalUnavailable, AccessDenied)) and start.follows:
            log.warning("%s", error)
            return EXIT_AGAIN
        refusal = str(error).replace("\n", "\v")
        print(f"{REFUSES} {refusal}", file=sys.stderr, flush=True)
        return error.exit_code
    if outcome is None:
        return EXIT_AGAIN
    with contextlib.suppress(OSError):
        os.write(1, msgspec.json.encode(outcome) + b"\n")
    return EXIT_OK


async def _serve_parent(start: MasterStart, listener: socket.socket) -> Outcome | None:
    """Be the master. Standard input ends with the parent: then the job may still need it, if it leads; one that only
    waits for its turn would take up what others have ended."""
    loop = asyncio.get_running_loop()
    made: list[Master] = []
    serving: asyncio.Task[Outcome | None] = asyncio.create_task(serve(start, listener, on_made=made.append))

    def parent_is_gone() -> None:
        loop.remove_reader(0)
        leads = bool(made) and made[0].keeper.leads
        if start.ends_with_parent or not leads:
            os.kill(os.getpid(), signal.SIGTERM)

    loop.add_reader(0, parent_is_gone)
    return await serving


def _log_for_parent(*, verbose: bool) -> None:
    """One line for each message, its level first; a parent that is gone costs the lines, never the job."""
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\v")
