"""A job that exists in memory only, served over a real socket by the shipping router."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from stoker.errors import ConfigError
from stoker.job.control.connection import Limits, serve_connection
from stoker.job.control.router import ControlRouter
from stoker.wire.control import (
    Accepted,
    JobEvent,
    JobOutcome,
    JobStatus,
    MasterStatus,
    NodeStatus,
    ScaleAdvice,
    ShardLease,
    ShardStatus,
    SpeedAt,
    StackFrame,
    StackThread,
    WorkerStacks,
    WorkerStatus,
)
from stoker.wire.stream import SWITCHING, Head

TOKEN = "a-token-for-tests"


def a_status(job: str = "night-run") -> JobStatus:
    """Two nodes, three workers, one of them slow."""
    nodes = (
        NodeStatus(
            "node-a1", "host1", "10.0.0.1", 2, age=0, silent_s=0.2,
            workers=(
                WorkerStatus("worker-0", 0, 0, 4711, "member", 120, 1.0, 2_000_000_000, {"loss": 0.25}),
                WorkerStatus("worker-1", 1, 1, 4712, "member", 120, 2.5, 2_100_000_000, {"loss": None}),
            ),
        ),
        NodeStatus("node-b2", "host2", "10.0.0.2", 2, age=1, state="leaving", why="drained",
                   workers=(WorkerStatus("worker-2", 2, 0, 99, "member", 120),)),
    )  # fmt: skip
    return JobStatus(
        job=job, phase="running", why="3 workers on 2 nodes train", generation=4, world_size=3,
        nodes_min=1, nodes_max=4, nodes_target=2, node_unit=1, commits=120, steps_per_s=8.5,
        restarts=2, restarts_used=1, restarts_max=3, since_commit_s=0.1, started_wall_s=1_700_000_000.0,
        nodes=nodes,
        master=MasterStatus(321, 1_700_000_000.0, 1, "sqlite:///logs/journal.db", "0.1.0"),
    )  # fmt: skip


@dataclass
class FakeJob:
    """Implements JobControl. What was asked is in `asked`."""

    told: JobStatus = field(default_factory=a_status)
    log: list[JobEvent] = field(default_factory=list)
    asked: list[tuple[object, ...]] = field(default_factory=list)
    advice: ScaleAdvice | None = None
    error: Exception | None = None
    """Raised by `stacks`."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, kind: str, why: str, **details: object) -> None:
        seq = len(self.log) + 1
        self.log.append(JobEvent(seq, 1_700_000_000.0 + seq, kind, why, details))
        self._news.set()
        self._news = asyncio.Event()

    def end(self, why: str = "every worker finished") -> None:
        self.record("ended", why)
        self.told = msgspec.structs.replace(
            self.told, phase="ended", why=why, outcome=JobOutcome(True, 0, why)
        )

    def status(self) -> JobStatus:
        return self.told

    def outcome(self) -> JobOutcome | None:
        return self.told.outcome

    def node_names(self) -> list[str]:
        return [node.node for node in self.told.nodes]

    async def events(self, after: int, limit: int) -> list[JobEvent]:
        return [event for event in self.log if event.seq > after][:limit]

    async def wait_for_events(self, after: int, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            while not any(event.seq > after for event in self.log):
                await asyncio.wait_for(self._news.wait(), timeout_s)

    def scale(self, nodes: int) -> Accepted:
        if not self.told.nodes_min <= nodes <= self.told.nodes_max:
            raise ConfigError(f"{nodes} nodes: this job takes 1 to 4 (--nnodes)")
        self.asked.append(("scale", nodes))
        self.told = msgspec.structs.replace(self.told, nodes_target=nodes)
        return Accepted(f"the target is {nodes} nodes now")

    def stop(self, why: str, exit_code: int) -> Accepted:
        self.asked.append(("stop", why, exit_code))
        self.end(why)
        return Accepted("the job ends now")

    def leave_node(self, node: str, why: str) -> Accepted:
        self.asked.append(("leave", node, why))
        return Accepted(f"{node} leaves at the next agreed commit")

    async def stacks(self, timeout_s: float) -> list[WorkerStacks]:
        self.asked.append(("stacks", timeout_s))
        if self.error is not None:
            raise self.error
        step = StackFrame("step", "/job/train.py", 9)
        other = StackThread("loader", (StackFrame("run", "threading.py", 1),))

        def at(function: str, file: str, line: int) -> tuple[StackThread, ...]:
            return (StackThread("MainThread", (StackFrame(function, file, line), step), is_main=True), other)

        return [
            WorkerStacks("worker-0", "node-a1", 0, 4711, at("all_reduce", "torch/distributed.py", 1)),
            WorkerStacks("worker-1", "node-a1", 1, 4712, at("read", "/job/loader.py", 7), state="T"),
            WorkerStacks("worker-2", "node-b2", 2, 99, at("all_reduce", "torch/distributed.py", 1)),
            WorkerStacks("worker-3", "node-b2", None, problem="it has not started"),
        ]

    def recommendation(self) -> ScaleAdvice | None:
        return self.advice

    def shards(self) -> list[ShardStatus]:
        lease = ShardLease(3, "worker-0", 12.5, failures=1)
        return [ShardStatus("stoker://clicks/", 10, 2, 1, 7, failures=1, epoch=1, leases=(lease,))]


def some_advice() -> ScaleAdvice:
    measured = (SpeedAt(1, 4.6), SpeedAt(2, 8.5))
    return ScaleAdvice(4, 2, "2 more nodes give 80 % more", 1.8, 0.9, False, measured)


class Served:
    """A router on a real socket, its loop in a thread of its own."""

    def __init__(
        self, job: FakeJob, *, token: str = TOKEN, limits: Limits | None = None, port: int = 0
    ) -> None:
        self.job = job
        self.router = ControlRouter(job, token)
        self.limits = limits
        self.upgraded: list[tuple[Head, bytes]] = []
        self.broken: list[dict[str, object]] = []
        self.hung_up = threading.Event()
        """A connection has ended."""
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self._wanted_port = port
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def do(self, what: Callable[[], object]) -> object:
        """Run something on the server's loop."""
        done: list[object] = []
        ready = threading.Event()

        def run() -> None:
            try:
                done.append(what())
            finally:
                ready.set()

        self.loop.call_soon_threadsafe(run)
        assert ready.wait(60)
        return done[0]

    def start(self) -> None:
        self._thread.start()
        for _ in range(12_000):
            if self.port:
                return
            threading.Event().wait(0.005)
        raise AssertionError("the server did not start")

    def stop(self) -> None:
        """End the server as a killed process would: all connections break."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(lambda _, context: self.broken.append(context))
        try:
            self.loop.run_until_complete(self._serve())
            self.loop.run_until_complete(self._break_all())
        finally:
            self.loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", self._wanted_port)
        self.port = server.sockets[0].getsockname()[1]
        await self._stopping.wait()
        server.close()

    async def _break_all(self) -> None:
        await _some_rounds()  # who was just accepted becomes a connection first
        for writer in self._writers:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _some_rounds()  # what was aborted is lost first

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        task = self.loop.create_task(self._converse(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve_connection(reader, writer, self.router, on_upgrade=self._upgrade, limits=self.limits)
        except asyncio.CancelledError:
            pass
        finally:
            self.hung_up.set()

    async def _upgrade(self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SWITCHING)
        self.upgraded.append((head, await reader.readexactly(5)))
        writer.write(b"frame")


async def _some_rounds() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@contextlib.contextmanager
def served(job: FakeJob, *, token: str = TOKEN, limits: Limits | None = None) -> Iterator[Served]:
    """Serve a job until the end of the block; then nothing may have gone wrong on the server's loop."""
    server = Served(job, token=token, limits=limits)
    server.start()
    try:
        yield server
    finally:
        server.stop()
    assert not server.broken, server.broken
