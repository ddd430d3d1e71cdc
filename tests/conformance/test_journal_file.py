"""What only a journal in a file can meet: another process, a full disk, a file that is something else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.base.rng import Rng
from stoker.errors import JournalDamaged, JournalHeld, JournalUnavailable
from stoker.job.journal.file import SYNC_AFTER_WRITES, FileJournal
from stoker.testing.job_journal import entry
from tests.conformance.journal_helpers import writing

pytestmark = pytest.mark.real


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill_disk(ballast: Path) -> None:
    """Write a file until nothing more fits."""
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(descriptor, b"x" * 512)
    os.close(descriptor)


async def fill(path: Path, count: int = 20, size_bytes: int = 100) -> None:
    """A journal with some records and entries."""
    journal = FileJournal(path)
    for number in range(count):
        await journal.write({f"r{number}": bytes([65 + number % 26]) * size_bytes}, [entry(number)])
    await journal.close()


def test_a_second_master_is_told_who_holds_it(path: Path) -> None:
    async def refused() -> JournalHeld:
        second = FileJournal(path)
        with pytest.raises(JournalHeld) as caught:
            await second.lead("127.0.0.1:2")
        with pytest.raises(JournalHeld):
            await second.write({"a": b"other"})
        await second.close()
        return caught.value

    with writing(f"sqlite://{path}", "job") as writer:
        writer.wait_for_batches(3)
        error = asyncio.run(refused())
        assert error.pid == writer.process.pid
        assert str(error.pid) in str(error)
        assert str(path) in str(error)
        writer.process.send_signal(signal.SIGSTOP)
        assert asyncio.run(refused()).pid == writer.process.pid
        writer.process.send_signal(signal.SIGKILL)
        writer.rest()

    async def free() -> None:
        journal = FileJournal(path)
        await journal.lead("127.0.0.1:2")
        assert "a" not in await journal.load()
        await journal.close()

    asyncio.run(free())


def test_two_journals_in_one_process_exclude_each_other(path: Path) -> None:
    async def test() -> None:
        first, second = FileJournal(path), FileJournal(path.parent / "." / path.name)
        await first.lead("127.0.0.1:1")
        with pytest.raises(JournalHeld) as caught:
            await second.lead("127.0.0.1:2")
        assert caught.value.pid == os.getpid()
        await first.close()
        await second.lead("127.0.0.1:2")
        await second.close()

    asyncio.run(test())


def test_others_read_while_it_is_written_and_after_its_end(path: Path) -> None:
    async def seen() -> list[str]:
        reader = FileJournal(path)
        try:
            return [e["why"] for e in await reader.read_entries()]
        finally:
            await reader.close()

    with writing(f"sqlite://{path}", "job") as writer:
        writer.wait_for_batches(SYNC_AFTER_WRITES + 50)
        before = asyncio.run(seen())
        after = asyncio.run(seen())
        writer.process.send_signal(signal.SIGKILL)
        writer.rest()
    assert len(before) >= SYNC_AFTER_WRITES + 50
    assert after[: len(before)] == before
    left = asyncio.run(seen())  # what a killed writer left, its write-ahead log included
    assert left[: len(after)] == after
    asyncio.run(fill(path))
    finished = asyncio.run(seen())
    assert finished[: len(left)] == left
    assert len(finished) == len(left) + 20
    assert not path.with_name(f"{path.name}-wal").exists()


def test_a_finished_journal_is_read_from_a_read_only_disk(mount: Path) -> None:
    path = mount / "journal.sqlite"
    asyncio.run(fill(path))
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)

    async def test() -> None:
        reader = FileJournal(path)
        assert [e["number"] for e in await reader.read_entries(limit=3)] == [0, 1, 2]
        with pytest.raises(JournalUnavailable, match="may write there"):
            await reader.write({"a": b"1"})
        await reader.close()

    asyncio.run(test())


def test_reading_does_not_make_a_file(path: Path) -> None:
    async def test() -> None:
        with pytest.raises(JournalUnavailable, match="no journal at"):
            await FileJournal(path).read_entries()

    asyncio.run(test())
    assert not path.exists()


def test_a_file_that_is_not_laid_out_yet_has_no_entries(path: Path) -> None:
    """A master makes the file, and lays it out a moment later."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
    assert path.stat().st_size > 0

    async def test() -> None:
        assert await FileJournal(path).read_entries() == []
        journal = FileJournal(path)
        await journal.lead("127.0.0.1:1")
        await journal.write({"a": b"1"}, [entry(1)])
        assert [found["number"] for found in await FileJournal(path).read_entries()] == [1]
        await journal.close()

    asyncio.run(test())


def test_a_full_disk_passes(mount: Path) -> None:
    async def test() -> None:
        journal = FileJournal(mount / "journal.sqlite")
        await journal.write({"a": b"0"}, [entry(0)])
        ballast = mount / "ballast"
        kept, said = 0, []
        for number in range(1, 40):
            if number == 10:
                fill_disk(ballast)
            if number == 30:
                ballast.unlink()
            try:
                await journal.write({"a": b"%d" % number, "b": b"x" * 5000}, [entry(number)])
                kept = number
            except JournalUnavailable as error:
                said.append(str(error))
                assert (await journal.load())["a"] == b"%d" % kept
        assert len(said) > 5
        assert all("full" in s and "free space" in s for s in said)
        assert kept == 39
        assert (await journal.load())["a"] == b"39"
        numbers = [e["number"] for e in await journal.read_entries()]
        assert numbers == sorted(numbers)
        assert len(numbers) == 40 - len(said)
        await journal.close()
        again = FileJournal(mount / "journal.sqlite")
        assert (await again.load())["a"] == b"39"
        await again.close()

    asyncio.run(test())


def test_a_disk_that_is_full_from_the_start(mount: Path) -> None:
    fill_disk(mount / "ballast")

    async def test() -> None:
        journal = FileJournal(mount / "deep" / "journal.sqlite")
        with pytest.raises(JournalUnavailable, match="free space"):
            await journal.lead("127.0.0.1:1")
        (mount / "ballast").unlink()
        await journal.write({"a": b"1"})
        assert await journal.load() == {"a": b"1"}
        await journal.close()

    asyncio.run(test())


def refusal(path: Path) -> str:
    """What a master is told about a file that is no journal; the file must stay as it is."""

    async def test() -> str:
        journal = FileJournal(path)
        try:
            with pytest.raises(JournalDamaged) as caught:
                await journal.lead("127.0.0.1:1")
            with pytest.raises(JournalDamaged):
                await FileJournal(path).read_entries()
            return str(caught.value)
        finally:
            await journal.close()

    before = path.read_bytes()
    said = asyncio.run(test())
    assert path.read_bytes() == before
    assert str(path) in said
    return said


def test_a_text_file_is_refused(path: Path) -> None:
    path.write_text("these are my notes\n" * 100)
    assert "move it away" in refusal(path)


def test_the_database_of_another_program_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE entry (x)")
    database.close()
    assert "another program" in refusal(path)


def test_the_journal_of_a_newer_version_is_refused(path: Path) -> None:
    asyncio.run(fill(path))
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 2")
    database.close()
    assert "newer Stoker" in refusal(path)


def test_a_file_that_was_cut_is_refused(path: Path) -> None:
    asyncio.run(fill(path, 200, 1000))
    os.truncate(path, path.stat().st_size // 2)

    async def test() -> None:
        journal = FileJournal(path)
        with pytest.raises(JournalDamaged, match="put back a copy"):
            await journal.load()
        await journal.close()

    asyncio.run(test())


def test_flipped_bytes_are_never_taken_for_records(path: Path) -> None:
    asyncio.run(fill(path, 100, 1000))
    whole = path.read_bytes()
    expected = {f"r{n}": bytes([65 + n % 26]) * 1000 for n in range(100)}
    rng = Rng(7)

    async def load() -> dict[str, bytes] | None:
        journal = FileJournal(path)
        try:
            return await journal.load()
        except (JournalDamaged, JournalUnavailable):
            return None
        finally:
            await journal.close()

    found = 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[rng.below(len(damaged))] ^= 1 << rng.below(8)
        path.write_bytes(damaged)
        records = asyncio.run(load())
        found += records is None
        assert records is None or set(records.values()) <= set(expected.values())
    assert found > 50


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    async def test() -> None:
        journal = FileJournal(tmp_path)
        with pytest.raises(JournalUnavailable, match="cannot open the journal"):
            await journal.lead("127.0.0.1:1")
        await journal.close()
        (tmp_path / "file").write_text("")
        below = FileJournal(tmp_path / "file" / "journal.sqlite")
        with pytest.raises(JournalUnavailable, match="cannot keep a journal in"):
            await below.lead("127.0.0.1:1")

    asyncio.run(test())
