"""What waits for the journal while it cannot be written, and which of its records a new job takes over."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from stoker.base.clock import SystemClock
from stoker.errors import ConfigError, JournalUnavailable, WireError
from stoker.job.events import Event, Keep, NodeJoined, NodeReported, StopRequested
from stoker.job.journal.durable import Entry
from stoker.job.journal.keeper import CLOSED, WAITING_ENTRIES_MAX, Keeper
from stoker.job.journal.memory import MemoryJournal, SoleLeadership
from stoker.job.machine import JobConfig, JobMachine
from stoker.wire.job import Join, NodeReport
from tests.e2e.run_helpers import run


class FullDisk(MemoryJournal):
    """Cannot be written while `is_full`."""

    def __init__(self) -> None:
        super().__init__(kept_entries=10 * WAITING_ENTRIES_MAX)
        self.is_full = False

    async def write(self, records: Mapping[str, bytes | None], entries: Sequence[Entry] = ()) -> None:
        if self.is_full:
            raise JournalUnavailable("no space is left")
        await super().write(records, entries)


def test_events_beyond_those_that_may_wait_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    too_many = 2500

    async def story() -> list[tuple[str, str]]:
        journal = FullDisk()
        keeper = Keeper(journal, SystemClock())
        keeper.tell("before", "it can be written", {})
        await keeper.flush()
        journal.is_full = True
        keeper.tell("node-joined", "0", {})
        await keeper.flush()
        for number in range(1, WAITING_ENTRIES_MAX + too_many):
            keeper.tell("node-joined", str(number), {})
        await keeper.flush()
        keeper.keep_bytes("job", b"record")
        journal.is_full = False
        await keeper.flush()
        keeper.tell("after", "it can be written again", {})
        await keeper.flush()
        assert await journal.load() == {"job": b"record"}
        assert keeper.problem == ""
        return [(entry["kind"], entry["why"]) for entry in await journal.read_entries()]

    kept = asyncio.run(story())
    assert kept[1:-2] == [("node-joined", str(number)) for number in range(WAITING_ENTRIES_MAX)]
    assert kept[-2:] == [
        ("events-dropped", f"{too_many} events are missing here: no space is left"),
        ("after", "it can be written again"),
    ]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2, "that it cannot be written, and that events are dropped: once each"
    assert "10000 events wait for the journal" in said[1]


def test_a_journal_that_can_be_written_takes_all_events_of_one_turn() -> None:
    count = WAITING_ENTRIES_MAX + 7

    async def story() -> int:
        journal = FullDisk()
        keeper = Keeper(journal, SystemClock())
        for number in range(count):
            keeper.tell("worker-started", str(number), {})
        await keeper.flush()
        return len(await journal.read_entries())

    assert asyncio.run(story()) == count


class Waited(SoleLeadership):
    waited = True


class ContestedJournal(MemoryJournal):
    """Another process was the master when this one came."""

    async def lead(self, endpoint: str, *, ttl_s: float = 5.0) -> SoleLeadership:
        return Waited()


COMES = (
    NodeJoined(Join(node="node-a", job="none", host="h", address="127.0.0.1", slots=1)),
    NodeReported(NodeReport("node-a", 1, ())),
)
ENDS = StopRequested("enough", 7)


def records_of(*events: Event) -> dict[str, bytes | None]:
    """What a machine keeps of these; its node has not heard of the end."""
    machine, kept = JobMachine(JobConfig()), dict[str, bytes | None]()
    for event in events:
        for effect in machine.step(event, 0.0):
            if isinstance(effect, Keep) and effect.record is not None:
                kept[effect.key] = msgspec.msgpack.encode(effect.record)
    assert {"job", "node/node-a"} <= kept.keys()
    return kept


@pytest.mark.parametrize(
    ("has_ended", "continues", "has_waited", "is_anew"),
    [
        (True, False, False, True),
        (True, True, False, False),
        (True, False, True, False),
        (False, False, False, False),
        (False, True, False, False),
    ],
    ids=["the next command", "a master that died", "a candidate", "a job that runs", "its master that died"],
)
def test_who_begins_anew_with_a_journal_that_was_not_closed(
    has_ended: bool, continues: bool, has_waited: bool, is_anew: bool
) -> None:
    async def story() -> None:
        journal = ContestedJournal() if has_waited else MemoryJournal()
        records = records_of(*COMES, ENDS) if has_ended else records_of(*COMES)
        await journal.write(records)
        found = await Keeper(journal, SystemClock()).lead("x:1", ttl_s=1.0, continues=continues)
        assert found == await journal.load() == ({} if is_anew else records)
        restored = JobMachine.restore(JobConfig(), found, 0.0)
        assert (restored.outcome is None) == (is_anew or not has_ended)

    asyncio.run(story())


class AbsentJournal(MemoryJournal):
    """Cannot be reached so many times."""

    def __init__(self, to_lead: int, to_load: int) -> None:
        super().__init__()
        self.to_lead, self.to_load = to_lead, to_load

    async def lead(self, endpoint: str, *, ttl_s: float = 5.0) -> SoleLeadership:
        self.to_lead -= 1
        if self.to_lead >= 0:
            raise JournalUnavailable("it is away")
        return await super().lead(endpoint, ttl_s=ttl_s)

    async def load(self) -> dict[str, bytes]:
        self.to_load -= 1
        if self.to_load >= 0:
            raise JournalUnavailable("it is away again")
        return await super().load()


def test_a_journal_that_is_away_to_begin_with_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        journal = AbsentJournal(2, 1)
        keeper = Keeper(journal, SystemClock())
        assert await keeper.lead("x:1", ttl_s=1.0, patience_s=60.0) == {}
        assert keeper.leads
        assert (journal.to_lead, journal.to_load) == (-2, -1)
        for patience_s in (0.0, 0.3):
            with pytest.raises(JournalUnavailable, match=r"it is away$"):
                await Keeper(AbsentJournal(99, 0), SystemClock()).lead(
                    "x:1", ttl_s=1.0, patience_s=patience_s
                )

    asyncio.run(story())
    assert [record.message for record in caplog.records] == [
        "waiting for the journal, for 60 s at most: it is away",
        "waiting for the journal, for 0 s at most: it is away",
    ]


def test_a_record_that_cannot_be_read_is_an_error_of_its_own() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        await journal.write({"job": b"of tomorrow"})
        with pytest.raises(WireError, match="'job' cannot be read"):
            await Keeper(journal, SystemClock()).lead("x:1", ttl_s=1.0)

    asyncio.run(story())


@pytest.mark.real
def test_a_run_with_the_journal_of_one_that_was_killed_at_its_end_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('it runs', flush=True)")
    command = ("run", "--no-cache", "--journal", "job.db", "script.py")
    first = run(tmp_path, *command)
    assert (first.code, "it runs" in first.out) == (0, True), first.text
    with closing(sqlite3.connect(tmp_path / "job.db")) as database:
        assert database.execute("DELETE FROM record WHERE name = ?", (CLOSED,)).rowcount == 1
        database.commit()  # as if master and run had been killed before it
    second = run(tmp_path, *command)
    assert (second.code, "it runs" in second.out) == (0, True), second.text


def test_the_journal_of_another_job_is_refused() -> None:
    async def story() -> None:
        journal = MemoryJournal()
        for name in ("bert", "bert"):
            keeper = Keeper(journal, SystemClock())
            keeper.begin(await keeper.lead("x:1", ttl_s=1.0), name)
            await keeper.flush()
            await journal.close()
        assert keeper.masters.count == 2
        keeper = Keeper(journal, SystemClock())
        with pytest.raises(ConfigError, match="that of job 'bert', which has not ended: give --rdzv-id bert"):
            keeper.begin(await keeper.lead("x:1", ttl_s=1.0), "none")

    asyncio.run(story())
