"""A driver with real processes: discovery script, remote shells, agent entry. Only the job is a stand-in, which tells
the driver of nodes and worlds as a master does."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import stat
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cli.endpoint import Nodes
from stoker.cli.hosts import AgentPlan, Driver
from stoker.cli.hosts_options import add_host_flags, agent_options, host_options_of
from stoker.job.hosts import HostBook
from stoker.job.hosts_events import Event, JobEnded, NodeJoined, NodeLost, WorldFormed
from stoker.settings import Timeouts
from tests.e2e.run_helpers import alive

AGENT = Path(__file__).with_name("discovery_agent.py")
SOURCE = Path(__file__).parents[2] / "src"
ONE_TO_FOUR = Nodes(1, 4)
TIMEOUT_S = 60.0
SECRET = "the-secret-of-this-job"


class Clock(SystemClock):
    """The machine's clock, which a test may put forward."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


class StandInJob:
    """A master without a job: nodes join it, every change is a new world, and it can be stopped."""

    def __init__(self) -> None:
        self.feed: Callable[[Event], None] = lambda event: None
        self.nodes: dict[str, dict[str, Any]] = {}
        self.joined: list[str] = []
        self.stopped: tuple[str, int] | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._made = 0
        self._server: asyncio.Server | None = None

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._made += 1
        node = f"node-{self._made}"
        self.nodes[node] = json.loads(await reader.readline())
        self._writers[node] = writer
        self.joined.append(self.nodes[node]["host"])
        self.feed(NodeJoined(node, self.nodes[node]["host"]))
        self.form_world()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        del self.nodes[node], self._writers[node]
        writer.close()
        self.feed(NodeLost(node, "its stream broke"))
        self.form_world()

    def form_world(self) -> None:
        self.feed(WorldFormed(frozenset(self.nodes)))

    def stop(self, why: str, exit_code: int) -> None:
        self.stopped = (why, exit_code)
        self.end()

    async def look(self) -> None:
        await self.answers.wait()
        if self.stopped is not None:
            self.feed(JobEnded())

    def end(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def on(self, host: str) -> dict[str, Any]:
        return next(about for about in self.nodes.values() if about["host"] == host)

    @property
    def hosts(self) -> dict[str, int]:
        return {about["host"]: about["slots"] for about in self.nodes.values()}

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()


def command_lines() -> list[str]:
    """Of everything that was started from here."""
    lines = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return lines


class World:
    """A driver, its job, and a file with the hosts."""

    def __init__(self, folder: Path, *flags: str, nodes: Nodes, environment: Mapping[str, str]):
        self.folder = folder
        self.job = StandInJob()
        self.nodes = nodes
        self.timeouts = Timeouts.from_user_timeout(TIMEOUT_S)
        self.said: list[tuple[str, str]] = []
        self.printed: list[str] = []
        self.clock = Clock()
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nshift 4\nexec {sys.executable} -P {AGENT} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        parser = argparse.ArgumentParser()
        add_host_flags(parser)
        parser.add_argument("--lr", default="0.1")
        script = (
            f"{shlex.quote(sys.executable)} -c 'print(open(\"hosts\").read())'"
            if "--hosts" not in flags
            else None
        )
        self.arguments = parser.parse_args(
            [
                *(["--host-discovery-script", script] if script else []),
                *("--discovery-interval", "100ms", "--remote-shell", "env WHERE={host}"),
                *("--remote-python", str(python), "--blacklist-cooldown-range", "1s", "1s"),
                *flags,
            ]
        )
        self.environment = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
        options = host_options_of(self.arguments, 1, self.environment)
        assert options is not None
        self.options = options
        self.driver: Driver

    def write_hosts(self, *hosts: str) -> None:
        part = self.folder / "hosts.part"
        part.write_text("\n".join(hosts))
        part.rename(self.folder / "hosts")

    async def start(self) -> None:
        os.chdir(self.folder)
        port = await self.job.listen()
        plan = AgentPlan(
            address_for=lambda host: "127.0.0.1",
            master_port=port,
            token=SECRET,
            options=agent_options(self.arguments),
            directory=str(self.folder),
            environment=self.environment,
            grace_s=1.0,
            log_dir="logs",
        )
        self.driver = Driver(
            HostBook(self.options.policy(self.nodes, self.timeouts), Rng(1), self.clock.now()),
            self.options,
            self.options.source(self.environment, self.timeouts),
            plan,
            self.job,
            self.clock,
            record=lambda kind, why, details: self.said.append((kind, why)),
            show=lambda host, stream, lines: self.printed.extend(
                f"{host} {stream}: {line.decode()}" for line in lines
            ),
        )
        self.job.feed = self.driver.feed
        self.driver.start()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.said]

    async def until(self, condition: Callable[[], object], why: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(90):
                while not condition():  # noqa: ASYNC110 - it looks at processes and files
                    await asyncio.sleep(0.02)
                return
        raise AssertionError(
            f"no {why} after 90 s\nsaid: {self.said}\nprinted: {self.printed}\nnodes: {self.job.nodes}"
        )


@contextlib.asynccontextmanager
async def world(
    folder: Path,
    *flags: str,
    hosts: tuple[str, ...] = (),
    nodes: Nodes = ONE_TO_FOUR,
    mood: str = "",
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[World]:
    here = os.getcwd()
    one = World(folder, *flags, nodes=nodes, environment={"MOOD": mood, **(environment or {})})
    if hosts:
        one.write_hosts(*hosts)
    await one.start()
    before = set(one.driver.pids.values())
    try:
        yield one
    finally:
        before |= set(one.driver.pids.values())
        one.job.end()
        async with asyncio.timeout(90):
            await one.driver.close(grace_s=5.0)
        await one.job.close()
        os.chdir(here)
    assert one.driver.pids == {}
    assert not alive([*before])
