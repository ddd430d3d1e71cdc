"""`stoker agent --from-stdin`: a job's agent on a host on which a driver started it through a remote shell.

The first line of its input says what to do; more lines ask it to leave or to end; the end of the input says that the
driver is gone, and then it leaves in good order.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, MutableMapping
from dataclasses import replace
from typing import Any

from stoker import __version__
from stoker.agent.agent import Agent
from stoker.cli.agent_lock import only_agent
from stoker.cli.launch import run_job
from stoker.cli.options import Launch
from stoker.cli.run import launch_of
from stoker.errors import EXIT_INTERRUPTED, ConfigError, EnvironmentProblem, StokerError, WireError
from stoker.settings import environment, runtime_dir
from stoker.wire.hosts import LINE_BYTES_MAX, AgentEnd, AgentLeave, AgentStart, decode_line

log = logging.getLogger("stoker.agent")
STDIN = 0
READ_BYTES = 256 * 1024
LAST_RESORT_S = 10.0
"""An agent that is to end now and does not is cut off after this."""

RunJob = Callable[[Launch], Coroutine[Any, Any, int]]


def add_agent_parser(subparsers: Any) -> None:
    """Add `agent`."""
    parser = subparsers.add_parser(
        "agent",
        help="run a job's agent for a driver (stoker run --hosts starts it)",
        description="Run this host's part of a job for the driver that started this command through a remote shell.",
    )
    parser.add_argument(
        "--from-stdin", action="store_true", required=True, help="take settings and secret as a line on stdin"
    )
    parser.set_defaults(handler=handle_agent)


def handle_agent(_: argparse.Namespace) -> int:
    """Do what the driver says; returns the exit code."""
    start, rest = read_start(STDIN)
    enter(start)
    with only_agent(runtime_dir(), start.host, start.token, grace_s=start.grace_s):
        return asyncio.run(serve(start, rest, STDIN, launch_from, run_job))


def read_start(descriptor: int) -> tuple[AgentStart, bytes]:
    """The first line, and what came after it. Raises WireError, ConfigError when the driver is of another version."""
    data = b""
    while b"\n" not in data:
        more = os.read(descriptor, READ_BYTES)
        if not more or len(data) > LINE_BYTES_MAX:
            raise WireError(
                f"no settings on standard input, only {len(data)} bytes: a driver starts this command"
            )
        data += more
    line, _, rest = data.partition(b"\n")
    message = decode_line(line)
    if not isinstance(message, AgentStart):
        raise WireError("the first line must be of type start")
    if message.version != __version__:
        raise ConfigError(
            f"the driver runs Stoker {message.version}, {message.host} has {__version__}: install the same on both"
        )
    return message, rest


def enter(start: AgentStart) -> None:
    """Take over the driver's working directory and variables. Raises ConfigError."""
    try:
        os.chdir(start.directory)
    except OSError as error:
        raise ConfigError(
            f"{start.host} has no working directory {start.directory}: {error.strerror}; start the job from one that "
            "every host has"
        ) from None
    own = environment()
    assert isinstance(own, MutableMapping)
    own.update(start.environment)
    own["STOKER_JOB_TOKEN"] = start.token


def launch_from(start: AgentStart) -> Launch:
    """The same Launch that `stoker run` on this host would make of the driver's flags. Raises ConfigError."""
    flags = {
        **start.options,
        "nproc_per_node": str(start.slots),
        "rdzv_endpoint": f"{start.master_host}:{start.master_port}",
        "master_addr": None,
        "master_port": None,
        "standalone": False,
        "node_rank": start.order + 1,  # not 0: the driver has the master
        "journal": None,
        "job_token_file": None,
        "local_addr": None,
    }
    launch = launch_of(argparse.Namespace(**flags))
    if not launch.audit:
        return launch
    folder = os.path.abspath(
        os.path.join(launch.log_dir, "audit")
    )  # the driver checks what all hosts have noted
    return replace(launch, audit=False, environment={**launch.environment, "STOKER_AUDIT_DIR": folder})


async def serve(
    start: AgentStart,
    rest: bytes,
    descriptor: int,
    launch_from: Callable[[AgentStart], Launch],
    run: RunJob,
) -> int:
    """Run this host's part of the job and listen to the driver; returns the exit code."""
    channel = DriverChannel(start, rest, descriptor)
    launch = replace(launch_from(start), on_start=channel.attach, host=start.host)
    task = asyncio.get_running_loop().create_task(run(launch), name="agent-job")
    channel.open(task)
    try:
        return await task
    except asyncio.CancelledError:
        if not channel.cut_off:
            raise
        return EXIT_INTERRUPTED
    finally:
        channel.close()


class DriverChannel:
    """Hears the driver: its lines, and the end of them."""

    def __init__(self, start: AgentStart, rest: bytes, descriptor: int) -> None:
        self._grace_s = start.grace_s
        self._data = rest
        self._descriptor = descriptor
        self._agent: Agent | None = None
        self._task: asyncio.Task[int] | None = None
        self._leaving = ""
        self._ending = False
        self._timers: list[asyncio.TimerHandle] = []
        self.cut_off = False
        """The job was cancelled, as it did not end by itself."""

    def open(self, task: asyncio.Task[int]) -> None:
        """Listen, on behalf of the task that runs the job. Raises EnvironmentProblem."""
        self._task = task
        try:
            asyncio.get_running_loop().add_reader(self._descriptor, self._readable)
        except OSError as error:
            task.cancel()
            raise EnvironmentProblem(f"standard input must be a pipe or a socket: {error}") from None
        self._take_lines()

    def attach(self, agent: Agent) -> None:
        """The agent is there."""
        self._agent = agent
        if self._leaving:
            agent.leave(self._leaving)
        if self._ending:
            agent.kill()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        for timer in self._timers:
            timer.cancel()

    def _readable(self) -> None:
        data = os.read(self._descriptor, READ_BYTES)
        if not data:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            if not self._leaving:
                log.warning("the driver is gone: leaving the job")
                self._leave("the driver is gone")
            self._later(self._grace_s, self._end)
            return
        self._data += data
        if len(self._data) > LINE_BYTES_MAX:
            self._data = b""  # no driver says so much
        self._take_lines()

    def _take_lines(self) -> None:
        while b"\n" in self._data:
            line, _, self._data = self._data.partition(b"\n")
            try:
                message = decode_line(line)
            except WireError as error:
                log.error("%s", error)
                continue
            if isinstance(message, AgentLeave):
                log.info("the driver asks this host to leave: %s", message.why)
                self._leave(message.why)
            elif isinstance(message, AgentEnd):
                log.warning("the driver ends this host's part: %s", message.why)
                self._leave(message.why)
                self._end()

    def _leave(self, why: str) -> None:
        self._leaving = why
        if self._agent is not None:
            self._agent.leave(why)

    def _end(self) -> None:
        self._ending = True
        if self._agent is not None:
            self._agent.kill()
        self._later(LAST_RESORT_S, self._cut_off)

    def _cut_off(self) -> None:
        self.cut_off = True
        if self._task is not None:
            self._task.cancel()

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, act))


def main() -> int:
    """`python -m stoker.cli.agent`: what a driver starts. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="stoker: %(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="stoker agent")
    parser.add_argument("--from-stdin", action="store_true", required=True)
    try:
        return handle_agent(parser.parse_args())
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
