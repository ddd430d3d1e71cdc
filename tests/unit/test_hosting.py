"""Who hosts the next master on the same machine, and with which journal."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.cli import registry
from stoker.cli.endpoint import Endpoint, JobToken, Nodes
from stoker.cli.hosting import Hosting, host_master
from stoker.cli.master_process import MasterProcess
from stoker.cli.options import Launch
from stoker.settings import Timeouts
from tests.unit.control_cli import use_runtime_folder
from tests.unit.control_fake import TOKEN, FakeJob, served


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_runtime_folder(tmp_path, monkeypatch)


def listed(endpoint: str, journal_file: str, *, role: str = "master") -> Path:
    """The note of another command that hosts the master there."""
    record = registry.new_record(
        job="none",
        endpoint=endpoint,
        token=TOKEN,
        log_dir="/its-logs",
        command=["t.py"],
        journal_file=journal_file,
        processes=[registry.process_id(role)],
    )
    path = registry.register(record).path
    return path.rename(path.with_name("none.1.json"))


def launch_at(port: int, journal: str | None = None) -> Launch:
    timeouts = Timeouts.from_user_timeout(2.0)
    return Launch(["x"], Nodes(1, 2), 1, Endpoint("127.0.0.1", port), timeouts, journal=journal)


def successor(tmp_path: Path, launch: Launch, note: tuple[str, str] | None) -> str:
    """The journal of the master that a command hosts once the one that was there is gone; empty: it hosts none."""

    async def story() -> str:
        with served(FakeJob()) as master:
            here = replace(launch, endpoint=Endpoint("127.0.0.1", master.port))
            path = listed(master.endpoint, note[0], role=note[1]) if note is not None else None
            hosting: Hosting = await host_master(here, JobToken(TOKEN), tmp_path / "logs")
            assert hosting.process is None
            assert hosting.succeed() is None, "somebody listens there"
        if path is not None:
            path.unlink()
        made: MasterProcess | None = hosting.succeed()
        await hosting.close()
        if made is None:
            return ""
        await made.close()
        return made.start_with.journal

    return asyncio.run(story())


@pytest.mark.real
def test_a_successor_takes_up_the_journal_that_there_was(tmp_path: Path) -> None:
    kept, own = tmp_path / "elsewhere" / "job.db", tmp_path / "own.db"
    kept.parent.mkdir()
    kept.touch()
    note = (str(kept), "master")
    assert successor(tmp_path, launch_at(0), note) == str(kept)
    assert successor(tmp_path, launch_at(0, str(own)), note) == str(kept)


@pytest.mark.real
def test_who_knows_no_journal_begins_no_job_anew(tmp_path: Path) -> None:
    gone, own = str(tmp_path / "gone.db"), tmp_path / "own.db"
    assert successor(tmp_path, launch_at(0), (gone, "master")) == ""
    assert successor(tmp_path, launch_at(0), None) == ""
    assert successor(tmp_path, launch_at(0, str(own)), None) == ""
    own.touch()
    assert successor(tmp_path, launch_at(0, str(own)), None) == str(own)


@pytest.mark.real
def test_the_host_notes_where_its_journal_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def file_of(journal: str | None) -> str:
        hosting = await host_master(launch_at(0, journal), JobToken(TOKEN), tmp_path / "logs")
        (record,) = registry.records()
        assert hosting.process is not None
        note, noted = hosting.process.on_spawn, asyncio.Event()
        hosting.process.on_spawn = lambda pid: (note(pid), noted.set())[0]
        hosting.process.start()
        await noted.wait()
        (with_master,) = registry.records()
        assert with_master.journal_file == record.journal_file
        await hosting.close()
        return record.journal_file

    assert asyncio.run(file_of(None)) == str(tmp_path / "logs" / "events.db")
    assert asyncio.run(file_of("job.db")) == str(tmp_path / "job.db")
    assert asyncio.run(file_of("memory:")) == ""
