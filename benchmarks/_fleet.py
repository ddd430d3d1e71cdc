"""Thousands of simulated agents in one process, each with a real TCP stream to a real master.

An agent does what a real one does with directives, but its workers are records: they start, leave a world and enter
the next one at once. Every fifth sign of life is a whole report, as with real agents. `_fleet_main.py` runs it.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from stoker.wire.frames import FrameCodec
from stoker.wire.job import (
    Answer,
    Beat,
    Directive,
    Join,
    NodeReport,
    Refused,
    ToAgent,
    WorkerAnswer,
    WorkerReport,
    WorkerSpec,
    WorkerState,
)
from stoker.wire.stream import STREAM_PATH, UPGRADE

FULL_EVERY = 5
CONNECTS_AT_ONCE = 1000
CODEC: FrameCodec[Any] = FrameCodec(ToAgent)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody tells."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


class TakesAnswers(Protocol):
    """What a worker does with answers to its calls."""

    def on_answer(self, answer: Answer) -> None: ...


class Worker:
    """A worker that does nothing but change worlds."""

    __slots__ = ("calls", "commits", "fresh", "generation", "left", "phase", "spec", "world")

    def __init__(self, spec: WorkerSpec, generation: int) -> None:
        self.spec = spec
        self.phase: Any = "parked"
        self.generation = generation
        self.world = 0
        self.left = 0
        self.commits = 0
        self.fresh = True
        self.calls: TakesAnswers | None = None

    def follow(self, directive: Directive) -> bool:
        """Do what the directive says; whether anything changed."""
        changed = False
        if self.phase == "member" and directive.generation > self.world:
            self.commits = max(self.commits, directive.stop_at_commit)
            self.phase, self.left = "parked", self.world
            changed = True
        if self.phase == "parked" and self.generation < directive.generation:
            self.generation = directive.generation
            changed = True
        world = directive.world
        if world is None or self.phase != "parked" or not self.left < world.generation == self.generation:
            return changed
        if world.member(self.spec.worker) is None:
            return changed
        self.phase, self.world, self.fresh = "member", world.generation, False
        self.commits = world.commits
        return True

    def report(self) -> WorkerReport:
        state = WorkerState(
            phase=self.phase,
            generation=self.generation,
            left=self.left,
            commits=self.commits,
            fresh=self.fresh,
            store="127.0.0.1:1",
            elastic=True,
        )
        return WorkerReport(self.spec.worker, self.spec.slot, 1000, state)


class Agent(asyncio.Protocol):
    """One agent; a new instance of the protocol's connection for each stream, the same object."""

    def __init__(self, fleet: Fleet, number: int, name: str, slots: int) -> None:
        self.fleet, self.number, self.node, self.slots = fleet, number, name, slots
        self.transport: Any = None
        self.buffer = b""
        self.is_streaming = False
        self.is_gone = False
        self.was_told = False
        """The master has spoken on the present stream."""
        self.seq = -1
        self.beats = number
        self.directive = Directive(seq=0, generation=0)
        self.workers: dict[str, Worker] = {}

    # -- the stream ---------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer, self.is_streaming, self.was_told = transport, b"", False, False
        transport.write(self.fleet.upgrade)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport, self.is_streaming = None, False
        if not self.is_gone:
            self.fleet.note_lost(self)

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data if self.buffer else data
        at = 0
        if not self.is_streaming:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self.buffer = data
                return
            if not data.startswith(b"HTTP/1.1 101"):
                self.fleet.refusals[data.split(b"\r\n", 1)[0].decode("latin-1")] += 1
                self.transport.close()
                return
            at, self.is_streaming = end + 4, True
            self.join()
        size = len(data)
        while at + 4 <= size:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > size:
                break
            self.take(CODEC.decode(data[at + 4 : end]))
            at = end
        self.buffer = data[at:]

    def send(self, message: Any) -> None:
        if self.transport is not None:
            self.transport.write(CODEC.encode(message))

    def take(self, message: Any) -> None:
        if isinstance(message, Directive):
            if not self.was_told:
                self.was_told = True
                self.fleet.told += 1
            self.follow(message)
        elif isinstance(message, WorkerAnswer):
            worker = self.workers.get(message.worker)
            if worker is not None and worker.calls is not None:
                worker.calls.on_answer(message.answer)
        elif isinstance(message, Refused):
            self.fleet.refusals[message.why] += 1
            self.is_gone = True

    # -- what an agent does -------------------------------------------------------------------------------

    def join(self) -> None:
        was_taken = self.directive.seq > 0
        self.send(
            Join(
                node=self.node,
                job="bench",
                host="sim",
                address=self.fleet.address(self.number),
                slots=self.slots,
                resumes=was_taken,
                report_seq=self.seq,
                directive_seq=self.directive.seq,
                generation=self.directive.generation,
            )
        )
        self.report()

    def follow(self, directive: Directive) -> None:
        known = self.directive
        if (directive.epoch, directive.seq) <= (known.epoch, known.seq):
            return
        self.directive = directive
        changed = False
        if len(directive.run) != len(self.workers) or any(
            s.worker not in self.workers for s in directive.run
        ):
            before = self.workers
            self.workers = {
                s.worker: before.get(s.worker) or Worker(s, directive.generation) for s in directive.run
            }
            for name, worker in self.workers.items():
                if name not in before:
                    self.fleet.on_worker(self, worker)
            changed = True
        for worker in self.workers.values():
            changed = worker.follow(directive) or changed
        if directive.world is not None:
            self.fleet.note_world(directive.world.generation, directive.world.size)
        if changed:
            self.report()

    def report(self) -> None:
        self.seq += 1
        self.send(
            NodeReport(
                node=self.node,
                seq=self.seq,
                workers=tuple(worker.report() for worker in self.workers.values()),
                spare_port=2,
                directive_seq=self.directive.seq,
            )
        )

    def beat(self) -> None:
        self.beats += 1
        if self.beats % FULL_EVERY:
            self.send(Beat(self.node, self.seq, self.directive.seq))
        else:
            self.report()


class Fleet:
    """All agents of this process."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.host, self.port = host, port
        self.upgrade = (
            f"GET {STREAM_PATH} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
            f"Upgrade: {UPGRADE}\r\nConnection: Upgrade\r\n\r\n"
        ).encode()
        self.agents: list[Agent] = []
        self.refusals: Counter[str] = Counter()
        self.told = 0
        """Agents to which the master has spoken on their present stream."""
        self.lost_streams = 0
        self.sent = 0
        """Signs of life sent."""
        self.world = 0
        self.world_size = 0
        self.world_count = 0
        """Agents that hold the newest world."""
        self.world_at = 0.0
        """When the last of them got it."""
        self.per_s = -1.0
        """Signs of life per second of all agents; below 0: one of each agent."""
        self.changed = asyncio.Event()
        self.on_worker: Callable[[Agent, Worker], None] = lambda agent, worker: None
        """Called with each worker that starts."""
        self._made = 0
        self._slots = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._rng = random.Random(1)

    @staticmethod
    def address(number: int) -> str:
        """Where an agent claims to be: no two are on one host."""
        return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"

    # -- streams ------------------------------------------------------------------------------------------

    def add(self, count: int, slots: int) -> None:
        """Start so many new agents."""
        for _ in range(count):
            agent = Agent(self, self._made, f"node-{self._made}", slots)
            self._made += 1
            self.agents.append(agent)
            self._start(agent, 0)

    def _start(self, agent: Agent, attempt: int) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(agent, attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, agent: Agent, attempt: int) -> None:
        loop = asyncio.get_running_loop()
        while not agent.is_gone:
            await asyncio.sleep(self._rng.uniform(0, min(1.0, 0.05 * 2 ** (attempt - 1))) if attempt else 0)
            attempt += 1
            async with self._slots:
                sock = socket.socket()
                sock.setblocking(False)
                try:
                    sock.bind((f"127.0.{agent.number % 200}.2", 0))
                    await loop.sock_connect(sock, (self.host, self.port))
                    await loop.create_connection(lambda: agent, sock=sock)
                    return
                except OSError:
                    sock.close()

    def note_lost(self, agent: Agent) -> None:
        """A stream has ended that was to last: its agent comes back."""
        self.lost_streams += 1
        self.told -= agent.was_told
        agent.was_told = False
        self._start(agent, 1)

    def lose(self, count: int) -> None:
        """So many random agents end with all that runs on them."""
        for agent in self._rng.sample(self.agents, count):
            self.end(agent)

    def end(self, agent: Agent) -> None:
        agent.is_gone = True
        self.told -= agent.was_told
        self.agents.remove(agent)
        if agent.transport is not None:
            agent.transport.close()

    # -- what is seen -------------------------------------------------------------------------------------

    def note_world(self, generation: int, size: int) -> None:
        if generation > self.world:
            self.world, self.world_size, self.world_count = generation, size, 0
        if generation == self.world:
            self.world_count += 1
            self.world_at = time.monotonic()
            if self.world_count >= len(self.agents):
                self.changed.set()

    async def wait_for_world(self, nodes: int, slots: int, timeout_s: float) -> None:
        """Return when every agent holds a world of all workers of so many nodes. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not (self.world_size == nodes * slots and self.world_count >= len(self.agents) == nodes):
                self.changed.clear()
                await self.changed.wait()

    async def wait_until_told(self, nodes: int, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await until(lambda: self.told >= nodes)

    async def beat_forever(self) -> None:
        """Signs of life, evenly spread over agents and time; what is late is made up for."""
        at, due, last = 0, 0.0, time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            rate = len(self.agents) if self.per_s < 0 else self.per_s
            due, last = min(due + rate * (now - last), 20000.0), now
            while due >= 1 and self.agents:
                due -= 1
                at = (at + 1) % len(self.agents)
                agent = self.agents[at]
                if agent.is_streaming:
                    agent.beat()
                    self.sent += 1
