"""The master's shell with a node that is spoken for by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

from stoker.base.clock import SystemClock
from stoker.job.journal.memory import MemoryJournal
from stoker.job.machine import JobConfig
from stoker.job.master import Master, MasterConfig, listen
from stoker.job.overview import Overview
from stoker.job.services import Service
from stoker.job.shard_service import ShardService
from stoker.wire.exits import ExitFacts
from stoker.wire.frames import FrameCodec
from stoker.wire.job import (
    Answer,
    Call,
    Directive,
    Join,
    NodeReport,
    ToAgent,
    ToMaster,
    WorkerAnswer,
    WorkerCall,
    WorkerReport,
    WorkerState,
)
from stoker.wire.shards import (
    DatasetSpec,
    LeaseShard,
    RecordSplit,
    RegisterDataset,
    ShardCall,
    ShardLeased,
    decode_answer,
    encode,
)
from stoker.wire.stream import open_stream

TICK_S = 0.05


class JumpingClock(SystemClock):
    """A clock that may leave time out, as if this process had been stopped."""

    def __init__(self) -> None:
        self.left_out_s = 0.0

    def now(self) -> float:
        return super().now() + self.left_out_s


class WatchedShards(ShardService):
    """Notes when it was told that time has passed."""

    def __init__(self, records: Mapping[str, bytes]) -> None:
        super().__init__(records, 0.0)
        self.ticks: list[float] = []

    def on_tick(self, now: float) -> None:
        self.ticks.append(now)
        super().on_tick(now)


async def start(journal: MemoryJournal, clock: SystemClock | None = None) -> tuple[Master, int]:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]

    def services(records: Mapping[str, bytes]) -> dict[str, Service]:
        return {"shards": WatchedShards(records)}

    config = MasterConfig(JobConfig(beat_timeout_s=1.0), "secret", f"127.0.0.1:{port}", tick_s=TICK_S)
    master = Master(
        config, clock=clock or SystemClock(), journal=journal, services=services, control=Overview
    )
    await master.start(listener)
    return master, port


class NodeByHand:
    """A node with one worker."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._to_master: FrameCodec[ToMaster] = FrameCodec(ToMaster)
        self._to_agent: FrameCodec[ToAgent] = FrameCodec(ToAgent)
        self._seq = 0
        self._calls = 0
        self.directive = Directive(seq=0, generation=0)

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await open_stream("127.0.0.1", self._port, "secret", timeout_s=30)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def join(self, *, resumes: bool = False) -> None:
        self._say(Join("n", "none", "h", "127.0.0.1", 1, resumes=resumes, report_seq=-1))
        self.report()

    def report(self, exit_facts: ExitFacts | None = None) -> None:
        self._seq += 1
        state = WorkerState(elastic=True)
        workers = [WorkerReport(spec.worker, spec.slot, 1, state, exit_facts) for spec in self.directive.run]
        self._say(NodeReport("n", self._seq, tuple(workers), directive_seq=self.directive.seq))

    async def directed(self, what: str) -> Directive:
        """The next directive that says this."""
        while not getattr(self.directive, what):
            message = await self._read()
            if isinstance(message, Directive):
                self.directive = message
        return self.directive

    async def ask(self, call: ShardCall) -> object:
        self._calls += 1
        worker = self.directive.run[0].worker
        self._say(WorkerCall(worker, Call(self._calls, "shards", encode(call))))
        while True:
            message = await self._read()
            if isinstance(message, WorkerAnswer):
                assert isinstance(message.answer, Answer)
                return decode_answer(message.answer.body)

    async def _read(self) -> ToAgent | None:
        return await asyncio.wait_for(self._to_agent.read(self._reader), 60)

    def _say(self, message: ToMaster) -> None:
        self._writer.write(self._to_master.encode(message))


def spec(**options: float) -> DatasetSpec:
    return DatasetSpec(RecordSplit(10, 10), **{"lease_timeout_s": 30.0, **options})  # type: ignore[arg-type]


def shards_of(master: Master) -> WatchedShards:
    service = master.desk.services["shards"]
    assert isinstance(service, WatchedShards)
    return service


def test_time_in_which_the_master_was_stopped_takes_no_lease_away_before_the_nodes_are_heard() -> None:
    async def story() -> None:
        clock = JumpingClock()
        master, port = await start(MemoryJournal(), clock)
        async with NodeByHand(port) as node:
            await node.join()
            await node.directed("run")
            await node.ask(RegisterDataset("train", spec()))
            assert isinstance(await node.ask(LeaseShard("train")), ShardLeased)
            ticks = shards_of(master).ticks
            clock.left_out_s = 60.0
            woken_at, before = clock.now(), len(ticks)
            while len(ticks) == before:  # noqa: ASYNC110 (nobody tells of it)
                await asyncio.sleep(0.01)
            assert ticks[before] >= woken_at + TICK_S, "the tick that came late was left out"
        await master.close()

    asyncio.run(story())


def test_a_shard_that_workers_die_of_is_what_the_job_fails_with() -> None:
    async def story() -> None:
        master, port = await start(MemoryJournal())
        async with NodeByHand(port) as node:
            await node.join()
            await node.directed("run")
            await node.ask(RegisterDataset("train", spec(max_failures=1)))
            await node.ask(LeaseShard("train"))
            node.report(ExitFacts(code=9, signal=None, message="ValueError: no picture"))
            outcome = (await node.directed("outcome")).outcome
        assert outcome is not None
        assert outcome.exit_code == 1
        assert outcome.why.startswith("shard 0 of dataset 'train'"), (
            "an error of the script would end it, too"
        )
        assert "it exited with code 9\nValueError: no picture" in outcome.why
        assert await master.wait() == outcome
        await master.close(grace_s=5)

    asyncio.run(story())
