"""The driver's sight of its job: the master's control API, turned into events for the book of hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from stoker.errors import StokerError
from stoker.job.hosts_events import Event, JobEnded, NodeCordoned, NodeJoined, NodeLost, WorldFormed
from stoker.wire.control import JobEvent, JobStatus, NodeStatus
from stoker.wire.control_client import JobClient

log = logging.getLogger("stoker.hosts")
WAIT_S = 1.0
"""How long one question waits for news; also how long the end of the driver may wait for its answer."""
ANSWER_S = 5.0
"""How long a master may take for an answer."""
LOOK_S = 2.0
"""How long a look waits for a master."""
AGAIN_S = 0.2
"""Between two tries while no master answers."""


def changes(before: JobStatus | None, now: JobStatus, worlds: int) -> list[Event]:
    """What is new since the last look; `worlds`: how many worlds were formed meanwhile."""
    old = {} if before is None else {node.node: node for node in before.nodes}
    events: list[Event] = [NodeJoined(node.node, node.host) for node in now.nodes if node.node not in old]
    here = {node.node for node in now.nodes}
    events += [NodeLost(name, "the master counts it as gone") for name in old if name not in here]
    if now.phase == "ended":
        return [*events, _ended(now)]
    events += [WorldFormed(_in_world(now.nodes))] * worlds
    for node in now.nodes:
        was = old.get(node.node)
        if node.state == "cordoned" and (was is None or was.state != "cordoned"):
            events.append(NodeCordoned(node.node, node.why))
    return events


def new_worlds(events: Iterable[JobEvent], status: JobStatus) -> int:
    """How many worlds of this job these tell of. A journal may hold those of jobs before it, too."""
    return sum(event.kind == "world" and event.wall_s >= status.started_wall_s for event in events)


def _ended(status: JobStatus) -> JobEnded:
    return JobEnded(success=status.outcome is not None and status.outcome.success)


def _in_world(nodes: tuple[NodeStatus, ...]) -> frozenset[str]:
    return frozenset(n.node for n in nodes if any(worker.rank is not None for worker in n.workers))


class ControlledJob:
    """A job whose master answers at an address. The master may be away for a while: then nothing is new."""

    def __init__(self, locate: Callable[[], Awaitable[tuple[str, int]]], token: str) -> None:
        self.feed: Callable[[Event], None] = lambda event: None
        """Where events go."""
        self.has_begun = False
        """Whether it has had a node since this process began."""
        self._locate = locate
        self._token = token
        self._stopping: asyncio.Task[None] | None = None

    def stop(self, why: str, exit_code: int) -> None:
        """End the job now; asked again until a master has heard it."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(
                self._stop(why, exit_code), name="job-stop"
            )

    async def close(self) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stopping

    async def look(self) -> None:
        """Feed JobEnded if the job has ended. A master that is away, or gone as the job has ended, gets some time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                while True:
                    try:
                        async with self._client() as client:
                            status = await asyncio.to_thread(client.status)
                    except StokerError:
                        await asyncio.sleep(AGAIN_S)
                        continue
                    if status.phase == "ended":
                        self.feed(_ended(status))
                    return

    async def watch(self) -> None:
        """Feed what happens, until cancelled. A lost look is healed by the next: each compares with the one before."""
        before: JobStatus | None = None
        after = 0
        while True:
            try:
                async with self._client() as client:
                    while True:
                        page = await asyncio.to_thread(client.events, after, 1000, WAIT_S)
                        if before is not None and not page.events:
                            continue
                        status = await asyncio.to_thread(client.status)
                        self.has_begun = self.has_begun or bool(status.nodes)
                        worlds = new_worlds(page.events, status)
                        for event in changes(before, status, worlds):
                            self.feed(event)
                        before, after = status, page.after
                        if page.ended:
                            return
            except StokerError as error:
                log.debug("the master does not answer: %s", error)
                await asyncio.sleep(AGAIN_S)

    async def _stop(self, why: str, exit_code: int) -> None:
        while True:
            try:
                async with self._client() as client:
                    await asyncio.to_thread(client.stop, why[:1000], exit_code)
                return
            except StokerError as error:
                log.debug("the master does not answer: %s", error)
                await asyncio.sleep(AGAIN_S)

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[JobClient]:
        host, port = await self._locate()
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with JobClient(where, self._token, timeout_s=ANSWER_S) as client:
            yield client
