"""Who speaks for a worker: over a real socket, with real processes behind the ids that say hello."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.agent.workers import WorkerChannel
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Answer, Hello, Order, ToWorker, WorkerState

pytestmark = pytest.mark.real

CODEC: FrameCodec[ToWorker] = FrameCodec(ToWorker)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Agent:
    """The agent's end, which notes what it hears."""

    def __init__(self, folder: Path) -> None:
        self.hellos: list[int] = []
        self.commits: list[int] = []
        self._open: list[asyncio.StreamWriter] = []
        self.channel = WorkerChannel(
            folder / "agent.sock",
            on_hello=lambda _, pid: self.hellos.append(pid),
            on_state=lambda _, state: self.commits.append(state.commits),
            on_failure=lambda *_: None,
            on_call=lambda *_: None,
        )

    async def hello(self, pid: int) -> Connection:
        reader, writer = await asyncio.open_unix_connection(str(self.channel.path))
        self._open.append(writer)
        writer.write(CODEC.encode(Hello(worker="w", pid=pid)))
        return reader, writer

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not what():  # noqa: ASYNC110 - the other end is heard in between
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.channel.close()
        for writer in self._open:
            writer.close()


@asynccontextmanager
async def agent_in(folder: Path) -> AsyncIterator[Agent]:
    agent = Agent(folder)
    await agent.channel.start()
    try:
        yield agent
    finally:
        await agent.close()


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 60))


def test_a_process_that_a_worker_has_started_is_refused_and_told_why(tmp_path: Path) -> None:
    """It imports the script again, which says hello; the worker must not lose its channel to it."""

    async def story() -> None:
        async with agent_in(tmp_path) as agent:
            reader, writer = await agent.hello(os.getpid())
            await agent.until(lambda: agent.hellos == [os.getpid()])
            child, child_writer = await agent.hello(os.getpid() + 1)
            child_writer.write(CODEC.encode(WorkerState(commits=99)))
            said = await CODEC.read(child)
            assert isinstance(said, Answer)
            assert said.number == 0
            assert f"as process {os.getpid()} is" in said.error
            assert await CODEC.read(child) is None, "and the channel is closed"
            agent.channel.give("w", Order(generation=3))
            assert await CODEC.read(reader) == Order(generation=3)
            writer.write(CODEC.encode(WorkerState(commits=7)))
            await agent.until(lambda: bool(agent.commits))
            assert agent.commits == [7], "the child speaks for nobody"
            assert agent.hellos == [os.getpid()]

    play(story())


def test_a_process_that_has_become_another_program_says_hello_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with agent_in(tmp_path) as agent:
            old, _ = await agent.hello(os.getpid())
            new, _ = await agent.hello(os.getpid())
            await agent.until(lambda: len(agent.hellos) == 2)
            agent.channel.give("w", Order(generation=3))
            assert await CODEC.read(new) == Order(generation=3)
            assert await CODEC.read(old) is None

    play(story())


def test_the_next_process_of_a_script_takes_over_when_the_one_before_is_gone(tmp_path: Path) -> None:
    """Even where a loader process of the first has inherited the channel and holds it open."""

    first = subprocess.Popen(["sleep", "100"])

    async def story() -> None:
        async with agent_in(tmp_path) as agent:
            await agent.hello(first.pid)
            await agent.until(lambda: len(agent.hellos) == 1)
            first.kill()
            await asyncio.to_thread(first.wait)
            second, writer = await agent.hello(os.getpid())
            await agent.until(lambda: len(agent.hellos) == 2)
            agent.channel.give("w", Order(generation=3))
            assert await CODEC.read(second) == Order(generation=3)
            writer.close()
            await agent.until(lambda: not agent.channel._speakers)
            third, _ = await agent.hello(os.getppid())
            await agent.until(lambda: len(agent.hellos) == 3)
            agent.channel.give("w", Order(generation=4))
            assert await CODEC.read(third) == Order(generation=4)

    play(story())
