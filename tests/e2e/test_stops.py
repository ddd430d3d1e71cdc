"""Stops and continuations of real children, pushed by SIGCHLD; their exits go on being reaped by the platform."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from stoker.agent.resources import process_state
from stoker.agent.stops import StopWatch
from stoker.platform.local import LocalPlatform, LocalProcess

pytestmark = pytest.mark.real

Exit = tuple[int | None, int | None]


class Node:
    """Children started as an agent starts them, and what it hears of them."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.watch = StopWatch(self._say("stopped"), self._say("continued"))
        self.exits: dict[LocalProcess, asyncio.Future[Exit]] = {}

    def _say(self, what: str) -> Callable[[int], None]:
        return lambda pid: self.news.put_nowait((what, pid))

    def start(self, *command: str) -> LocalProcess:
        ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        child = LocalPlatform().start(
            command, os.environ, on_output=lambda *_: None, on_exit=lambda *how: ended.set_result(how)
        )
        self.exits[child] = ended
        self.watch.watch(child.pid)
        return child

    async def heard(self) -> tuple[str, int]:
        return await asyncio.wait_for(self.news.get(), 30)

    async def exit_of(self, child: LocalProcess) -> Exit:
        return await asyncio.wait_for(asyncio.shield(self.exits[child]), 30)


def let_it_end(pid: int) -> None:
    """The calling loop stands still meanwhile; the exit is left for others to take."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    here = Node()
    here.watch.start()
    try:
        yield here
    finally:
        for child, ended in here.exits.items():
            if not ended.done():
                child.signal(signal.SIGKILL)
        await asyncio.gather(*here.exits.values())
        here.watch.close()


def test_a_stop_and_a_continuation_are_told_and_the_exit_is_left_to_the_platform() -> None:
    async def story() -> None:
        async with node() as here:
            child = here.start("sleep", "100")
            for _ in range(3):
                os.kill(child.pid, signal.SIGSTOP)
                assert await here.heard() == ("stopped", child.pid)
                assert process_state(child.pid) == "T"
                os.kill(child.pid, signal.SIGCONT)
                assert await here.heard() == ("continued", child.pid)
            os.kill(child.pid, signal.SIGTERM)
            assert await here.exit_of(child) == (None, signal.SIGTERM)
            assert process_state(child.pid) == "", "it has been reaped"

    asyncio.run(story())


def test_exit_codes_reach_the_platform_while_others_are_stopped() -> None:
    async def story() -> None:
        async with node() as here:
            sleepers = [here.start("sleep", "100") for _ in range(5)]
            for child in sleepers:  # the kernel makes one SIGCHLD of several
                os.kill(child.pid, signal.SIGSTOP)
            code = here.start("sh", "-c", "exit 7")
            assert await here.exit_of(code) == (7, None)
            heard = {await here.heard() for _ in sleepers}
            assert heard == {("stopped", child.pid) for child in sleepers}
            here.watch.forget(code.pid)
            os.kill(sleepers[2].pid, signal.SIGKILL)
            assert await here.exit_of(sleepers[2]) == (None, signal.SIGKILL)
            os.kill(sleepers[0].pid, signal.SIGCONT)
            assert await here.heard() == ("continued", sleepers[0].pid)

    asyncio.run(story())


def test_nothing_is_done_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    waitid = os.waitid

    def counting(kind: int, number: int, options: int) -> os.waitid_result | None:
        asked.append(number)
        return waitid(kind, number, options)

    monkeypatch.setattr(os, "waitid", counting)

    async def story() -> None:
        async with node() as here:
            child = here.start("sleep", "100")
            loop = asyncio.get_running_loop()
            asked.clear()
            await asyncio.sleep(0.5)
            assert asked == []
            assert loop._scheduled == []  # type: ignore[attr-defined]
            os.kill(child.pid, signal.SIGSTOP)
            assert await here.heard() == ("stopped", child.pid)
            assert asked

    asyncio.run(story())


def test_a_child_that_was_stopped_before_it_is_watched_is_told_at_once() -> None:
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    os.kill(child.pid, signal.SIGSTOP)
    while process_state(child.pid) != "T":
        time.sleep(0.01)

    async def watch() -> list[tuple[str, int]]:
        async with node() as here:
            here.watch.watch(child.pid)
            here.watch.watch(child.pid)
            return [here.news.get_nowait() for _ in range(here.news.qsize())]

    assert asyncio.run(watch()) == [("stopped", child.pid)]
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert asyncio.run(watch()) == []


@pytest.mark.parametrize("overtakes", [False, True])
def test_a_worker_that_stops_itself_and_ends_as_soon_as_it_goes_on(overtakes: bool) -> None:
    """Its exit may overtake the news that it went on; that is told before the exit, or not at all."""

    async def story() -> None:
        async with node() as here:
            child = here.start(
                sys.executable, "-c", "import os, signal; os.kill(0, signal.SIGSTOP); os._exit(3)"
            )
            assert await here.heard() == ("stopped", child.pid)
            child.signal(signal.SIGCONT)
            if overtakes:
                let_it_end(child.pid)
            assert await here.exit_of(child) == (3, None)
            told = [here.news.get_nowait() for _ in range(here.news.qsize())]
            assert told == [] or (not overtakes and told == [("continued", child.pid)])
            here.watch.forget(child.pid)
            os.kill(os.getpid(), signal.SIGCHLD)
            await asyncio.sleep(0.05)
            assert here.news.empty()

    asyncio.run(story())


def test_subprocesses_of_asyncio_itself_end_as_usual() -> None:
    async def story() -> None:
        async with node() as here:
            here.start("sleep", "100")
            process = await asyncio.create_subprocess_exec("sh", "-c", "exit 5")
            assert await asyncio.wait_for(process.wait(), 30) == 5

    asyncio.run(story())


def test_a_loop_that_keeps_sigchld_is_refused() -> None:
    async def story() -> None:
        with pytest.raises(RuntimeError, match="SIGCHLD"):
            Node().watch.start()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
