"""What a master shows of its job: the shipping overview of a machine that was fed by hand."""

from __future__ import annotations

import asyncio
from typing import Any

from stoker.base.clock import SystemClock
from stoker.job.control.port import JobControl
from stoker.job.events import NodeJoined, NodeReported, StopRequested
from stoker.job.journal.memory import MemoryJournal
from stoker.job.machine import JobConfig
from stoker.job.master import Master, MasterConfig
from stoker.job.overview import Overview
from stoker.wire.job import Join, NodeReport


class SlowToRead(MemoryJournal):
    """A reader has its answer a while after it was looked up, as from a disk or over a network."""

    def __init__(self) -> None:
        super().__init__()
        self.looked_up, self.may_answer = asyncio.Event(), asyncio.Event()

    async def read_entries(self, after: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        found = await super().read_entries(after, limit)
        self.looked_up.set()
        await self.may_answer.wait()
        return found


def new_master(journal: MemoryJournal | None = None, config: JobConfig | None = None) -> Master:
    """A master that nobody can reach, within a running loop."""
    return Master(
        MasterConfig(config or JobConfig(max_nodes=4), "secret", "127.0.0.1:1"),
        clock=SystemClock(),
        journal=journal or MemoryJournal(),
        services=lambda _: {},
        control=Overview,
    )


def test_what_is_asked_for_alone_is_what_the_status_says() -> None:
    async def story() -> None:
        master = new_master()
        control: JobControl = Overview(master)
        assert (list(control.node_names()), control.outcome()) == ([], None)
        for name in ("b", "a", "c"):
            master.feed(NodeJoined(Join(name, "none", "h", "127.0.0.1", 1)))
        assert list(control.node_names()) == [node.node for node in control.status().nodes] == ["b", "a", "c"]
        master.feed(StopRequested("enough", 7))
        outcome = control.outcome()
        assert outcome is not None
        assert (outcome.success, outcome.exit_code, outcome.why) == (False, 7, "enough")
        assert (control.status().phase, control.status().outcome) == ("ended", outcome)

    asyncio.run(story())


def test_an_event_that_is_written_during_the_look_for_one_is_not_waited_for() -> None:
    async def story() -> None:
        journal = SlowToRead()
        master = new_master(journal)
        waiting = asyncio.create_task(Overview(master).wait_for_events(0, timeout_s=3600.0))
        await journal.looked_up.wait()
        master.keeper.tell("generation", "first", {})
        await master.keeper.flush()
        journal.may_answer.set()
        await asyncio.wait_for(waiting, 20)

    asyncio.run(story())


def test_who_drains_below_the_minimum_is_told_what_follows() -> None:
    async def story() -> tuple[str, str]:
        master = new_master(config=JobConfig(min_nodes=2, max_nodes=4, timeout_s=90.0))
        control: JobControl = Overview(master)
        for name in ("a", "b", "c"):
            master.feed(NodeJoined(Join(name, "none", "h", "127.0.0.1", 1)))
            master.feed(NodeReported(NodeReport(name, 1, ())))
        return control.leave_node("a", "maintenance").why, control.leave_node("b", "maintenance").why

    enough, too_few = asyncio.run(story())
    assert enough.startswith("a leaves")
    assert "--timeout" not in enough
    assert "1 of at least 2 nodes are left then: the job waits for another" in too_few
    assert "ends after 90 s without one (--timeout)" in too_few
