"""Looks on while the job runs, tells the view, and kills the worker that is to die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.rng import Rng
from stoker.cache.client.client import CacheClient
from stoker.cli.demo.story import Kill, LedgerTail, Schedule, Story
from stoker.errors import JournalUnavailable, StokerError
from stoker.job.journal.file import FileJournal
from stoker.wire.cache_api import CacheStatus
from stoker.wire.job import Directive

if TYPE_CHECKING:
    from stoker.agent.agent import Agent

TICK_S = 0.1
LOOK_S = 0.5
RATE_WINDOW_S = 2.0
KILL_AT = 0.55
"""Of the first epoch: origin and cache are both at work then."""
_STEP = re.compile(rb"^step (\d+) loss (\S+)$")
_ACCURACY = re.compile(rb"^accuracy (\S+)$")


@dataclass(frozen=True)
class CacheSample:
    """The cache's figures at one time; sums since it started."""

    wall_s: float
    hits: int
    misses: int
    origin_bytes: int


@dataclass(frozen=True)
class Event:
    """A line of the run's story."""

    wall_s: float
    kind: str
    text: str
    worker: str = ""


@dataclass(frozen=True)
class WorkerRow:
    """One worker, for the view."""

    worker: str
    rank: int | None
    pid: int
    state: str


@dataclass(frozen=True)
class Picture:
    """All that a view shows at one moment."""

    elapsed_s: float
    phase: str
    generation: int
    workers: tuple[WorkerRow, ...]
    steps_done: int
    samples_per_s: float
    rates: tuple[float, ...]
    """Samples per second, one a second, newest last."""
    loss: float | None
    cache: CacheSample | None
    events: tuple[Event, ...]


@dataclass
class Watch:
    """One run as seen from outside the workers.

    `start` is called when the job runs, `show` for every line of a worker.
    """

    schedule: Schedule
    workers: int
    kill_wanted: bool
    rng: Rng
    on_picture: Callable[[Picture], None]
    on_event: Callable[[Event], None]
    story: Story = field(default_factory=Story)
    kill: Kill | None = None
    accuracy: float | None = None
    loss: float | None = None
    cache: list[CacheSample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    folder: Path | None = None
    """Of this run's logs; known once the job runs."""
    started_s: float = 0.0
    ended_s: float = 0.0
    """Wall seconds of the job's start, and of its outcome."""
    first_pids: dict[str, int] = field(default_factory=dict)
    all_pids: dict[str, int] = field(default_factory=dict)
    last_pids: dict[str, int] = field(default_factory=dict)
    """Process ids: of the first world, of all workers ever, of the workers at the end."""
    _agent: Agent | None = None
    _journal: FileJournal | None = None
    _client: CacheClient | None = None
    _tail: LedgerTail | None = None
    _task: asyncio.Task[None] | None = None
    _looked_s: float = 0.0
    _told: int = 0

    def start(self, agent: Agent) -> None:
        """The job runs: look on from now."""
        self.started_s = time.time()
        self._agent = agent
        self.folder = agent.config.log_dir
        self._journal = FileJournal(self.folder / "events.db")
        self._tail = LedgerTail(self.folder / "audit")
        where = agent.config.extra
        self._client = CacheClient(
            where["STOKER_CACHE_ENDPOINT"], where["STOKER_CACHE_TOKEN"], timeout_s=10.0
        )
        self._task = asyncio.create_task(self._look_on(), name="demo-watch")

    async def stop(self) -> None:
        """The job is over: read what was written last."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._client is not None:
            self._client.close()
        self._agent = None
        self._read_ledgers()
        await self._read_events()
        if self._journal is not None:
            await self._journal.close()
        self.ended_s = next((e.wall_s for e in self.events if e.kind == "ended"), time.time())

    def show(self, rank: int, stream: str, line: bytes) -> None:
        """A line that a worker wrote."""
        if stream != "stdout":
            return
        if match := _STEP.match(line):
            with contextlib.suppress(ValueError):
                self.loss = float(match[2])
        elif match := _ACCURACY.match(line):
            with contextlib.suppress(ValueError):
                self.accuracy = float(match[1])
            # Every worker has read all it will and still lives: the figures of this moment are the last ones.
            self._note_pids()
            self.last_pids = dict(self._agent.pids) if self._agent is not None else {}
            self._ask_cache()

    async def _look_on(self) -> None:
        while True:
            self._note_pids()
            self._read_ledgers()
            self._maybe_kill()
            now = time.time()
            if now - self._looked_s >= LOOK_S:
                self._looked_s = now
                await asyncio.to_thread(self._ask_cache)
                await self._read_events()
                self.on_picture(self._picture(now))
            await asyncio.sleep(TICK_S)

    def _note_pids(self) -> None:
        if self._agent is None:
            return
        pids = self._agent.pids
        self.all_pids.update(pids)
        if not self.first_pids and len(pids) == self.workers:
            self.first_pids = pids

    def _read_ledgers(self) -> None:
        for worker, entry in self._tail.read_new() if self._tail is not None else ():
            self.story.add(worker, entry)

    def _ask_cache(self) -> None:
        if self._client is None:
            return
        try:
            status: CacheStatus = self._client.status()
        except StokerError:
            return  # the workers will say what is wrong with it
        self.cache.append(CacheSample(time.time(), status.hits, status.misses, status.origin_bytes))

    async def _read_events(self) -> None:
        if self._journal is None:
            return
        try:
            entries = await self._journal.read_entries(self._told)
        except JournalUnavailable:
            return  # the master has not made it yet
        for entry in entries:
            event = event_of(entry)
            if event is not None:
                self._tell(event)
            self._told = int(entry["seq"])

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def _maybe_kill(self) -> None:
        """Kill one worker of the running world, once, in the second half of the first epoch."""
        if not self.kill_wanted or self.kill is not None or self._agent is None:
            return
        world = self._agent.core.directive.world
        if self.story.steps_done < self.schedule.steps_per_epoch * KILL_AT or world is None:
            return
        pids = self._agent.pids
        if world.size != self.workers or len(pids) != self.workers:
            return
        victim = self.rng.choice(world.members)
        pid = pids[victim.worker]
        self.kill = Kill(victim.worker, victim.rank, pid, world.generation, time.time())
        os.kill(pid, signal.SIGKILL)
        self._tell(
            Event(self.kill.wall_s, "kill", f"SIGKILL to {victim.worker} (rank {victim.rank}, pid {pid})")
        )

    def _picture(self, now: float) -> Picture:
        assert self._agent is not None
        core = self._agent.core
        world = core.directive.world
        ranks = {m.worker: m.rank for m in world.members} if world is not None else {}
        rows = []
        for worker, pid in self._agent.pids.items():
            known = core.workers.get(worker)
            state = known.state.phase if known is not None else "starting"
            rows.append(WorkerRow(worker, ranks.get(worker), pid, state))
        times = [(s, at) for g in self.story.commits.values() for s, at in g.items() if at > now - 60]
        rates = self._rates(times, now)
        recent = sum(self.schedule.records_of(s) for s, at in times if at > now - RATE_WINDOW_S)
        return Picture(
            elapsed_s=now - self.started_s,
            phase=_phase_of(core.directive),
            generation=core.directive.generation,
            workers=tuple(sorted(rows, key=lambda r: (r.rank is None, r.rank, r.worker))),
            steps_done=self.story.steps_done,
            samples_per_s=recent / RATE_WINDOW_S,
            rates=rates,
            loss=self.loss,
            cache=self.cache[-1] if self.cache else None,
            events=tuple(self.events),
        )

    def _rates(self, times: list[tuple[int, float]], now: float) -> tuple[float, ...]:
        sums = [0.0] * 40
        for step, at in times:
            age = int(now - at)
            if 0 <= age < len(sums):
                sums[-1 - age] += self.schedule.records_of(step)
        return tuple(sums)


def _phase_of(directive: Directive) -> str:
    if directive.outcome is not None:
        return "ended"
    if directive.world is not None:
        return "running"
    return "forming" if directive.generation else "waiting"


def event_of(entry: dict[str, Any]) -> Event | None:
    """A journal entry as a line for people; None for those that say nothing new."""
    kind, why, wall_s = str(entry["kind"]), str(entry["why"]), float(entry["wall_s"])
    generation, worker = entry.get("generation"), entry.get("worker")
    match kind:
        case "node-joined" | "node-lost" | "waiting" | "time-spent":
            return None
        case "worker-started":
            text = f"{worker} starts"
        case "generation":
            text = f"generation {generation} is formed: {why}"
        case "world":
            text = f"world of generation {generation}: {why}"
        case "worker-replace":
            text = f"{worker} (rank {entry.get('rank')}) is replaced: {why}"
        case _:
            text = f"{worker}: {why}" if worker else why
    return Event(wall_s, kind, text, worker or "")
