"""One master after another: who begins a new job, who tells of the end of the old one, and whom it waits for."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from stoker.base.clock import SystemClock
from stoker.errors import LeadershipLost
from stoker.job.events import Event, Keep, NodeJoined, NodeReported, StopRequested
from stoker.job.journal.keeper import CLOSED, Keeper
from stoker.job.journal.memory import MemoryJournal, SoleLeadership
from stoker.job.machine import JobConfig, JobMachine
from stoker.job.master import Master, MasterConfig, listen
from stoker.job.meeting import Meetings
from stoker.job.overview import Overview
from stoker.wire.frames import FrameCodec
from stoker.wire.job import Directive, Join, NodeReport, ToAgent, ToMaster
from stoker.wire.stream import open_stream

LONG_S = 600.0
CONFIG = JobConfig(max_nodes=2, beat_timeout_s=LONG_S / 2, timeout_s=LONG_S)
ME = Join(node="node-a", job="none", host="h", address="127.0.0.1", slots=1)


class LateLeadership(SoleLeadership):
    waited = True


class ContestedJournal(MemoryJournal):
    """Another process was the master when this one came."""

    async def lead(self, endpoint: str, *, ttl_s: float = 5.0) -> SoleLeadership:
        return LateLeadership()


async def journal_with(records: dict[str, bytes], journal: MemoryJournal | None = None) -> MemoryJournal:
    journal = journal if journal is not None else MemoryJournal()
    await journal.write(dict(records))
    return journal


@pytest.mark.parametrize("continues", [True, False])
def test_what_a_job_that_is_over_has_left(continues: bool) -> None:
    """Also where a candidate that outlived its job finds no leader when it comes again: it begins nothing anew."""

    async def story() -> tuple[dict[str, bytes], dict[str, bytes]]:
        journal = await journal_with({"job": b"old", CLOSED: b"1"})
        keeper = Keeper(journal, SystemClock())
        return await keeper.lead("x:1", ttl_s=1.0, continues=continues), await journal.load()

    found, left = asyncio.run(story())
    assert found == left == ({"job": b"old", CLOSED: b"1"} if continues else {})


def test_who_waited_while_the_job_ended_begins_no_other() -> None:
    async def story() -> None:
        closed = Keeper(await journal_with({"job": b"old", CLOSED: b"1"}, ContestedJournal()), SystemClock())
        with pytest.raises(LeadershipLost, match="the job has ended while this process waited"):
            await closed.lead("x:1", ttl_s=1.0)
        goes_on = Keeper(await journal_with({"job": b"old"}, ContestedJournal()), SystemClock())
        assert await goes_on.lead("x:1", ttl_s=1.0) == {"job": b"old"}

    asyncio.run(story())


def records_of(*events: Event) -> dict[str, bytes]:
    """What a machine keeps of these."""
    machine, kept = JobMachine(CONFIG), {}
    for event in events:
        for effect in machine.step(event, 0.0):
            if isinstance(effect, Keep) and effect.record is not None:
                kept[effect.key] = msgspec.msgpack.encode(effect.record)
    return kept


async def running_master(journal: MemoryJournal) -> tuple[Master, int]:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    master = Master(
        MasterConfig(CONFIG, "secret", f"127.0.0.1:{port}", tick_s=0.02, continues=True),
        clock=SystemClock(),
        journal=journal,
        services=lambda _: {"meeting": Meetings()},
        control=Overview,
    )
    await master.start(listener)
    return master, port


async def come(port: int, join: Join) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await open_stream("127.0.0.1", port, "secret", timeout_s=LONG_S)
    codec: FrameCodec[ToMaster] = FrameCodec(ToMaster)
    writer.write(codec.encode(join))
    writer.write(codec.encode(NodeReport(join.node, join.report_seq + 1, ())))
    return reader, writer


async def outcome_for(reader: asyncio.StreamReader) -> str:
    codec: FrameCodec[ToAgent] = FrameCodec(ToAgent)
    while True:
        message = await codec.read(reader)
        assert isinstance(message, Directive)
        if message.outcome is not None:
            return message.outcome.why


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def test_a_node_hears_of_the_end_though_the_master_died_after_it_had_written_it_down() -> None:
    async def story() -> tuple[str, dict[str, bytes]]:
        ended = records_of(
            NodeJoined(ME), NodeReported(NodeReport("node-a", 1, ())), StopRequested("enough", 1)
        )
        journal = await journal_with(ended)
        master, port = await running_master(journal)
        assert (await master.wait()).why == "enough"
        closing = asyncio.create_task(master.close(grace_s=LONG_S))
        reader, writer = await come(port, msgspec.structs.replace(ME, resumes=True, report_seq=1))
        why = await outcome_for(reader)
        assert not closing.done()
        await hang_up(writer)
        await asyncio.wait_for(closing, LONG_S)
        return why, await journal.load()

    why, left = asyncio.run(asyncio.wait_for(story(), 60.0))
    assert why == "enough"
    assert CLOSED in left, "everybody has heard of it"
