"""What an agent does besides running workers: shows their stacks, checks its node, measures what is in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.agent.checks import NodeChecker
from stoker.agent.resources import ResourceMeter
from stoker.agent.stacks import StackDumper, Target, find_py_spy
from stoker.base.clock import Clock
from stoker.wire.health import CheckReply, CheckTask, StackRequest

log = logging.getLogger("stoker.agent")
MEASURE_EVERY_S = 5.0


class Duties:
    """Runs beside the workers. `workers` gives those that run; `send` takes what goes to the
    master."""

    def __init__(
        self,
        log_dir: Path,
        clock: Clock,
        *,
        workers: Callable[[], Mapping[str, Target]],
        send: Callable[[msgspec.Struct], None],
        checker: NodeChecker,
    ) -> None:
        self._workers = workers
        self._send = send
        self._checker = checker
        self._dumper = StackDumper(find_py_spy())
        self._meter = ResourceMeter(log_dir, clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: CheckTask | None = None
        self._checking: asyncio.Task[None] | None = None
        self._reply: CheckReply | None = None
        """The newest check: what was asked, who is at it, what came of it."""

    def start(self) -> None:
        """Begin to measure."""
        self._run(self._measure())

    def close(self) -> None:
        """Stop all of it."""
        for task in self._tasks:
            task.cancel()
        self._meter.close()

    def take(self, message: StackRequest | CheckTask) -> None:
        """Do what the master asks. A new check ends the one before; one that is asked for again is done once, and what
        came of it is said again, for the stream may have broken."""
        if isinstance(message, StackRequest):
            self._run(self._show_stacks(message))
        elif message != self._asked:
            if self._checking is not None:
                self._checking.cancel()
            self._asked, self._reply = message, None
            self._checking = self._run(self._check(message))
        elif self._reply is not None:
            self._send(self._reply)

    def _run(self, duty: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(duty)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _show_stacks(self, request: StackRequest) -> None:
        for reply in await self._dumper.answer(request, self._workers()):
            self._send(reply)

    async def _check(self, task: CheckTask) -> None:
        log.info("checking this node before it joins (group %d, %d nodes)", task.group, task.world_size)
        result = await self._checker.check(task)
        self._reply = CheckReply(task.group, result)
        self._send(self._reply)

    async def _measure(self) -> None:
        while True:
            self._send(
                await self._meter.measure({name: target.pid for name, target in self._workers().items()})
            )
            await asyncio.sleep(MEASURE_EVERY_S)
