"""`stoker run --hosts` and `--host-discovery-script`: master here, agents on the hosts, until the job has ended."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.agent.console import Console
from stoker.base.clock import SystemClock
from stoker.base.ids import new_token
from stoker.base.rng import Rng
from stoker.cli.endpoint import JobToken, token_of
from stoker.cli.hosting import host_master
from stoker.cli.hosts import AgentPlan, Driver
from stoker.cli.hosts_job import ControlledJob
from stoker.cli.hosts_options import HostOptions, agent_options, meeting_point
from stoker.cli.master_process import MasterProcess
from stoker.cli.options import Launch
from stoker.cli.run_logs import audited, log_folder
from stoker.errors import EXIT_INTERRUPTED, EXIT_OK
from stoker.job.hosts import HostBook
from stoker.settings import environment, job_token
from stoker.wire.job import Outcome

log = logging.getLogger("stoker")
LATE_S = 5.0
"""What agents get beyond their own grace times, at the end."""


async def run_over_hosts(launch: Launch, options: HostOptions, arguments: argparse.Namespace) -> int:
    """Run a job on the hosts that the flags name; returns the exit code.

    `launch` and `options` are what `arguments`, the flags of `stoker run`, say.
    """
    folder = log_folder(launch.log_dir)
    console, killed = Console(), asyncio.Event()
    console.take_logs()
    try:
        return await _run_with(launch, options, arguments, folder, console, killed)
    finally:
        await console.close(launch.timeouts.user_s, killed)


async def _run_with(
    launch: Launch,
    options: HostOptions,
    arguments: argparse.Namespace,
    folder: Path,
    console: Console,
    killed: asyncio.Event,
) -> int:
    """Everything between the console's beginning and its end; `killed` is set when there is a hurry to end."""
    given = arguments.rdzv_endpoint or arguments.master_addr or arguments.master_port
    endpoint, address_for = meeting_point(launch.endpoint if given else None, options)
    nodes = options.nodes(None if arguments.nnodes == "1" else launch.nodes)
    launch = replace(launch, endpoint=endpoint, nodes=nodes, node_rank=0, drives=True)
    token = _token_of(launch)
    hosting = await host_master(launch, token, folder)
    master = hosting.process
    assert master is not None, "node rank 0 hosts the master"
    _, port = await hosting.locate()
    timeouts = launch.timeouts
    plan = AgentPlan(
        address_for=address_for,
        master_port=port,
        token=token.value,
        options={
            **agent_options(arguments),
            "nnodes": f"{nodes.minimum}:{nodes.maximum}",
            "shutdown_timeout": f"{timeouts.stop_grace_s:f}s",
        },
        directory=os.getcwd(),
        environment=environment(),
        grace_s=timeouts.stop_grace_s + timeouts.beat_timeout_s,
        log_dir=str(folder / "hosts"),
    )
    clock = SystemClock()
    job = ControlledJob(hosting.locate, token.value)
    master.has_taken_part = lambda: job.has_begun
    driver = Driver(
        HostBook(options.policy(nodes, timeouts), Rng(os.getpid()), clock.now()),
        options,
        options.source(environment(), timeouts),
        plan,
        job,
        clock,
        show=console.show_from,
        record=_recorder(folder / "hosts.jsonl"),
    )
    _on_signals(job, driver, master, killed)
    hosting.start()
    driver.start()
    job.feed = driver.feed
    watching = asyncio.create_task(job.watch(), name="job-watch")
    outcome = None
    try:
        outcome = await master.wait()
    finally:
        success = outcome is not None and outcome.success
        await driver.close(None if success else plan.grace_s + LATE_S, success=success)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await job.close()
        await hosting.close()
    token.forget()
    return EXIT_INTERRUPTED if outcome is None else _verdict(outcome, folder, console.say, audit=launch.audit)


def _token_of(launch: Launch) -> JobToken:
    """As given; else a new one: the agents get it over their standard input."""
    if launch.token_file is None and job_token() is None:
        return JobToken(new_token())
    return token_of(launch.endpoint, launch.token_file)


def _on_signals(job: ControlledJob, driver: Driver, master: MasterProcess, killed: asyncio.Event) -> None:
    """The first Ctrl-C or SIGTERM ends the job in good order, the second at once: `killed` is set."""
    seen = []

    def handle(number: signal.Signals) -> None:
        seen.append(number)
        if len(seen) == 1:
            job.stop(f"interrupted by {number.name}", 128 + number)
        else:
            killed.set()
            driver.kill(f"interrupted by {number.name}")
            master.give_up()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)


def _verdict(outcome: Outcome, folder: Path, say: Callable[[str], None], *, audit: bool) -> int:
    """Say how it ended: the first error of the run is what the user sees."""
    if outcome.success:
        return audited(folder, "hosts") if audit else EXIT_OK
    if outcome.error:
        say(f"{outcome.error.rstrip()}\n")
    log.error("the run failed: %s", outcome.why)
    if outcome.exit_code not in (EXIT_INTERRUPTED, 128 + signal.SIGTERM):
        log.error("what was decided about the hosts is in %s", folder / "hosts.jsonl")
    return outcome.exit_code


def _recorder(path: Path) -> Callable[[str, str, dict[str, Any]], None]:
    """Keep what is decided about hosts, a JSON object per line. A full disk costs the lines, never the job."""

    def record(kind: str, why: str, details: dict[str, Any]) -> None:
        entry = {"wall_s": round(time.time(), 3), "kind": kind, "why": why, "details": details}
        with contextlib.suppress(OSError), path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    return record
