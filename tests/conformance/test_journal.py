"""Every journal passes the same suite: in memory, and in a file. (etcd: test_journal_etcd.py.)"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.rng import Rng
from stoker.job.journal import file
from stoker.job.journal.durable import Entry, Journal
from stoker.job.journal.file import SYNC_AFTER_WRITES, FileJournal
from stoker.job.journal.memory import MemoryJournal
from stoker.testing.job_journal import DurableJournalConformance, JournalConformance, check_batches, entry
from tests.conformance.journal_helpers import check_killed_writers

NAMES = st.sampled_from(["a", "b", "c/d", ""]) | st.text(max_size=5)
CHANGES = st.dictionaries(NAMES, st.none() | st.binary(max_size=50), max_size=5)
ENTRIES = st.lists(st.builds(Entry, st.floats(0, 1e9), st.text(max_size=3), st.text(max_size=9), st.just({})))
BATCHES = st.lists(st.tuples(CHANGES, ENTRIES), max_size=8)


class TestMemory(JournalConformance):
    def open_journal(self) -> Journal:
        return MemoryJournal()


class TestFile(DurableJournalConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "new" / "journal.sqlite"

    def open_journal(self) -> Journal:
        return FileJournal(self.path)


@given(BATCHES)
@settings(max_examples=50, deadline=None)
def test_memory_against_a_dictionary(batches: list[tuple[dict[str, bytes | None], list[Entry]]]) -> None:
    asyncio.run(check_batches(MemoryJournal(), batches))


@given(batches=BATCHES)
@settings(max_examples=50, deadline=None)
def test_file_against_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, batches: list[tuple[dict[str, bytes | None], list[Entry]]]
) -> None:
    async def test() -> None:
        journal = FileJournal(tmp_path_factory.mktemp("journal") / "j.sqlite")
        await journal.lead("127.0.0.1:1")
        try:
            await check_batches(journal, batches)
        finally:
            await journal.close()

    asyncio.run(test())


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_the_event_log_keeps_the_newest_entries(tmp_path: Path, kind: str) -> None:
    kept, count = 50, 5 * SYNC_AFTER_WRITES

    async def test() -> None:
        path = tmp_path / "journal.sqlite"
        journal: Journal = (
            MemoryJournal(kept_entries=kept) if kind == "memory" else FileJournal(path, kept_entries=kept)
        )
        for number in range(count):
            await journal.write({"n": b"%d" % number}, [entry(number)])
            if number % 100 == 0:
                entries = await journal.read_entries()
                numbers = [e["number"] for e in entries]
                assert numbers == list(range(numbers[0], number + 1)), "the newest, without a gap"
                assert min(kept, number + 1) <= len(numbers) <= kept + SYNC_AFTER_WRITES + 1
                assert [e["seq"] for e in entries] == [n + 1 for n in numbers], "each keeps its number"
        last = await journal.read_entries(after=count - 3)
        assert [e["number"] for e in last] == [count - 3, count - 2, count - 1]
        assert await journal.read_entries(after=3, limit=2) == (await journal.read_entries())[:2]
        assert await journal.load() == {"n": b"%d" % (count - 1)}
        await journal.close()

    asyncio.run(test())


def test_a_long_event_log_is_shortened_by_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was written when more entries were kept: no single write takes long because of it."""
    monkeypatch.setattr(file, "TRIM_BATCH", 300)

    async def test() -> None:
        path = tmp_path / "journal.sqlite"
        journal = FileJournal(path)
        await journal.write({}, [entry(n) for n in range(2000)])
        await journal.close()
        journal, lengths = FileJournal(path, kept_entries=10), [2000]
        for number in range(2000, 2000 + 50 * SYNC_AFTER_WRITES):
            await journal.write({}, [entry(number)])
            if number % SYNC_AFTER_WRITES == 0:
                lengths.append(len(await journal.read_entries()))
        assert all(after >= before - 300 for before, after in pairwise(lengths))
        assert lengths[-1] <= 10 + SYNC_AFTER_WRITES + 1
        await journal.close()

    asyncio.run(test())


@pytest.mark.real
def test_a_killed_writer_leaves_whole_batches_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    shapes = [(3, 100, 30), (3, 100, 400), (200, 2000, 5), (3, 300_000, 5), (3, 100, 1), (3, 100, 700)]
    check_killed_writers(f"sqlite://{path}", "job", lambda: FileJournal(path), shapes, Rng(1))
