"""An agent and its worker processes, with a master that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker.agent.agent import Agent
from stoker.agent.exits import ExitFactsReader, OomCounter
from stoker.agent.link import AgentConfig
from stoker.agent.resources import process_state
from stoker.base.clock import SystemClock
from stoker.platform.local import LocalPlatform
from stoker.platform.port import Platform
from stoker.settings import Timeouts
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Directive, NodeReport, Outcome, ToMaster, WorkerReport, WorkerSpec, WorkerState
from stoker.wire.stream import SWITCHING, read_head

pytestmark = pytest.mark.real

LONG_S = 60.0
SPEC = WorkerSpec("w0", 0, 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, 0, 0)
DONE = Outcome(True, 0, "done")
SLEEP = "import time; time.sleep(600)"


class StandInMaster:
    """Says what it is told to; keeps the reports."""

    def __init__(self) -> None:
        self.reports: list[NodeReport] = []
        """Those that `until` has not passed over."""
        self.is_called = asyncio.Event()
        self._news = asyncio.Event()
        self._codec: FrameCodec[ToMaster] = FrameCodec(ToMaster)
        self._writer: asyncio.StreamWriter | None = None
        self._seq = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(SWITCHING)
        self._writer = writer
        self.is_called.set()
        with contextlib.suppress(OSError):
            while (message := await self._codec.read(reader)) is not None:
                if isinstance(message, NodeReport):
                    self.reports.append(message)
                self._news.set()
        writer.close()

    def tell(self, *, run: tuple[WorkerSpec, ...] = (SPEC,), outcome: Outcome | None = None) -> None:
        assert self._writer is not None
        self._seq += 1
        directive = Directive(seq=self._seq, generation=1, run=run, outcome=outcome)
        self._writer.write(FrameCodec(Directive).encode(directive))

    async def until(self, what: Callable[[WorkerReport], bool]) -> WorkerReport:
        """The first report of the worker of which that is true."""
        async with asyncio.timeout(LONG_S):
            while True:
                while self.reports:
                    workers = self.reports[0].workers
                    if workers and what(workers[0]):
                        return workers[0]
                    del self.reports[0]
                self._news.clear()
                await self._news.wait()


@contextlib.asynccontextmanager
async def node(
    folder: Path,
    code: str,
    platform: Platform | None = None,
    *,
    logs: Path | None = None,
    beat_timeout_s: float = LONG_S,
) -> AsyncIterator[tuple[Agent, StandInMaster, asyncio.Task[Outcome | None]]]:
    """An agent that runs; its master; its end."""
    master = StandInMaster()
    server = await asyncio.start_server(master.serve, "127.0.0.1", 0)

    async def locate() -> tuple[str, int]:
        return "127.0.0.1", server.sockets[0].getsockname()[1]

    (folder / "run").mkdir()
    config = AgentConfig(
        locate=locate, token="t", command=(sys.executable, "-c", code), slots=1, host="h", address="127.0.0.1",
        run_id="none", log_dir=logs or folder / "logs", runtime_dir=folder / "run", environment=os.environ,
        timeouts=Timeouts(LONG_S, beat_interval_s=0.1, beat_timeout_s=beat_timeout_s, park_s=LONG_S, stop_grace_s=0.2),
    )  # fmt: skip
    agent = Agent(config, platform or LocalPlatform(), SystemClock())
    running = asyncio.create_task(agent.run())
    try:
        await asyncio.wait_for(master.is_called.wait(), LONG_S)
        yield agent, master, running
    finally:
        agent.kill()
        await running
        server.close()


class Deaf:
    """A process that nothing ends, as one that a driver holds in the kernel; and what it was sent."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.sent: list[int] = []
        self.on_exit: Callable[[int | None, int | None], None] = lambda code, number: None
        self.on_output: Callable[[str, bytes], None] = lambda stream, data: None

    def signal(self, signal_number: int) -> None:
        self.sent.append(signal_number)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class DeafPlatform:
    def __init__(self) -> None:
        self.process = Deaf()

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_output: Callable[[str, bytes], None],
        on_exit: Callable[[int | None, int | None], None],
        before_exec: Callable[[], None] = lambda: None,
    ) -> Deaf:
        self.process.on_output, self.process.on_exit = on_output, on_exit
        return self.process


def test_a_process_that_cannot_be_killed_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose end comes after all is not told of twice."""
    monkeypatch.setattr("stoker.agent.agent.UNKILLABLE_S", 0.3)
    platform = DeafPlatform()
    process = platform.process

    async def story() -> Outcome | None:
        async with node(tmp_path, SLEEP, platform) as (_agent, master, running):
            master.tell()
            await master.until(lambda worker: worker.pid == process.pid)
            master.tell(outcome=DONE)
            ended = await asyncio.wait_for(running, LONG_S)
            process.on_output("stdout", b"late")
            process.on_exit(None, signal.SIGKILL)
            return ended

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(story()) == DONE
    assert process.sent == [signal.SIGTERM, signal.SIGKILL]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"w0: process {process.pid} cannot be killed (state ")
    assert said.endswith("): a driver or file system holds it; it is left behind")


RECORDED = """
import os
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise LookupError("the data is elsewhere")
main()
"""


def test_what_torch_records_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    async def story() -> WorkerReport:
        async with node(tmp_path, RECORDED) as (_, master, _running):
            master.tell()
            worker = await master.until(lambda worker: worker.exit is not None)
            assert [path for path in (tmp_path / "run").iterdir() if path.suffix != ".sock"] == []
            return worker

    worker = asyncio.run(story())
    assert worker.exit is not None
    assert worker.exit.code == 1
    assert "the data is elsewhere" in worker.exit.message


def test_a_worker_that_ends_waits_for_no_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening anything in its log folder hangs, and so does asking how much is free there."""
    logs, back = tmp_path / "logs", threading.Event()
    statvfs = os.statvfs

    def stalled(folder: Any) -> os.statvfs_result:
        if str(folder).startswith(str(logs)):
            back.wait(LONG_S)
        return statvfs(folder)

    monkeypatch.setattr(os, "statvfs", stalled)
    code = "raise OSError(28, 'No space left on device')"

    async def story() -> float:
        async with node(tmp_path, code, logs=logs) as (agent, master, _):
            folder = logs / agent.core.node / "w0"
            folder.mkdir(parents=True)
            for name in ("stdout.log", "stderr.log", "error.json"):
                os.mkfifo(folder / name)
            master.tell()
            longest_s, loop = 0.0, asyncio.get_running_loop()

            async def watch() -> None:
                nonlocal longest_s
                while True:
                    before = loop.time()
                    await asyncio.sleep(0.01)
                    longest_s = max(longest_s, loop.time() - before)

            watching = asyncio.create_task(watch())
            worker = await master.until(lambda worker: worker.exit is not None)
            watching.cancel()
            assert worker.exit is not None
            assert worker.exit.sign == "disk-full"
            agent._killed.set()  # nobody waits for the files
            back.set()
            return longest_s

    assert asyncio.run(story()) < LONG_S / 4, "it would have been silent for as long as the file system is"


def test_a_folder_that_does_not_answer_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    back = threading.Event()
    statvfs = os.statvfs

    def stalled(folder: Any) -> os.statvfs_result:
        asked.append(str(folder))
        if folder == tmp_path:
            back.wait(LONG_S)
        return statvfs(folder)

    monkeypatch.setattr(os, "statvfs", stalled)
    reader = ExitFactsReader(OomCounter(), watched=(tmp_path,))
    try:
        for _ in range(3):
            assert reader.read(None, signal.SIGBUS, now=0.0).full_disk == ""
    finally:
        back.set()
    assert asked.count(str(tmp_path)) == 1
    assert asked.count("/dev/shm") == 3


def test_who_is_held_by_a_debugger_for_a_moment_was_not_stopped_before(tmp_path: Path) -> None:
    """A worker says little in a long step: what it said last is no sign of since when it is held."""
    libc = ctypes.CDLL(None, use_errno=True)

    async def story() -> float:
        async with node(tmp_path, SLEEP, beat_timeout_s=4.0) as (agent, master, _):
            master.tell()
            pid = (await master.until(lambda worker: worker.pid > 0)).pid
            agent._on_state("w0", WorkerState(phase="member", commits=1))
            await asyncio.sleep(3.0)
            attach, detach = 16, 17  # see sys/ptrace.h
            assert libc.ptrace(attach, pid, 0, 0) == 0, os.strerror(ctypes.get_errno())
            seen = await master.until(lambda worker: worker.stopped_s > 0)
            assert libc.ptrace(detach, pid, 0, 0) == 0
            await master.until(lambda worker: worker.stopped_s == 0)
            assert process_state(pid) == "S"
            return seen.stopped_s

    assert asyncio.run(story()) < 1.0
