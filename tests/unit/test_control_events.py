"""`stoker job events`: of a running job, of one whose master goes away, of one that is over."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from stoker.job.journal.durable import Entry
from stoker.job.journal.file import APPLICATION_ID, FileJournal
from stoker.wire.control import JobEvent
from tests.unit.control_cli import Said, commands, running, use_runtime_folder
from tests.unit.control_fake import FakeJob, Served


@pytest.fixture
def stoker(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return commands(capsys)


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_runtime_folder(tmp_path, monkeypatch)


def test_events(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    job.record("node-joined", "host1 offers 2 workers", node="node-a1", generation=0)
    job.record("generation", "enough nodes", generation=1)
    job.record("worker-replace", "killed by SIGKILL", worker="worker-1", rank=1, generation=1)
    with running(job):
        lines = stoker("events").out.splitlines()
        assert [line.split("  ", 1)[1].split() for line in lines] == [
            ["gen", "0", "node-joined", "node-a1:", "host1", "offers", "2", "workers"],
            ["gen", "1", "generation", "enough", "nodes"],
            ["gen", "1", "worker-replace", "worker-1", "(rank", "1):", "killed", "by", "SIGKILL"],
        ]
        said = stoker(
            "events", "--json", "--after", "1", "--kind", "generation,x", "--kind", "node-joined"
        ).out
        assert [msgspec.json.decode(line, type=JobEvent) for line in said.splitlines()] == [job.log[1]]


def test_following_goes_on_to_the_end_and_past_a_full_page(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    for number in range(2500):
        job.record("noise", str(number))
    with running(job) as server:
        timer = threading.Timer(0.1, lambda: server.do(job.end))
        timer.start()
        said = stoker("events", "--follow", "--json")
        timer.join()
        assert [json.loads(line)["seq"] for line in said.out.splitlines()] == list(range(1, 2502))
        assert len(stoker("events", "--json").out.splitlines()) == 2501


def write_events(path: Path, events: list[JobEvent]) -> None:
    async def write() -> None:
        journal = FileJournal(path)
        await journal.write({}, [Entry(e.wall_s, e.kind, e.why, e.details) for e in events])
        await journal.close()

    asyncio.run(write())


@pytest.mark.parametrize("where", ["20240102-1/events.db", "20240102-1", ""])
def test_events_of_a_job_that_is_over(
    stoker: Callable[..., Said], tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = (
        [JobEvent(1, 5.0, "ended", "older")],
        [
            JobEvent(1, 1.5, "generation", "first", {"generation": 1}),
            JobEvent(2, 2.5, "ended", "every worker finished"),
        ],
    )
    logs = tmp_path / "a folder with ? and %20"
    write_events(logs / "20240101-1" / "events.db", older)
    write_events(logs / "20240102-1" / "events.db", newer)
    said = stoker("events", "--log-dir", str(logs / where), "--json")
    assert [msgspec.json.decode(line, type=JobEvent) for line in said.out.splitlines()] == newer
    assert stoker("events", "--log-dir", str(logs / where), "--kind", "ended").out.count("\n") == 1
    with caplog.at_level("WARNING"):
        assert stoker("events", "--log-dir", str(logs / where), "--kind", "banana,ended").code == 0
    (warning,) = [record.message for record in caplog.records]
    assert "no event is of kind banana" in warning
    assert "ended" in warning


def test_logs_that_are_none(stoker: Callable[..., Said], tmp_path: Path) -> None:
    said = stoker("events", "--log-dir", str(tmp_path))
    assert (said.code, said.out) == (2, "")
    assert "no events.db" in said.err
    (tmp_path / "events.db").write_text("this is no database, but it is long enough to look at" * 20)
    assert stoker("events", "--log-dir", str(tmp_path)).code == 5
    (tmp_path / "events.db").unlink()
    with closing(sqlite3.connect(tmp_path / "events.db")) as database:
        database.execute("CREATE TABLE entry (seq, wall_s, kind, why, details)")
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute("INSERT INTO entry VALUES ('one', 1, 'k', 'w', '[')")
        database.commit()
    said = stoker("events", "--log-dir", str(tmp_path))
    assert said.code == 5
    assert "is not a journal, or a damaged one" in said.err


def test_following_survives_a_master_that_is_started_again(stoker: Callable[..., Said]) -> None:
    job = FakeJob()
    job.record("generation", "first")
    again: list[Served] = []
    with running(job) as server:

        def restart() -> None:
            server.stop()
            new = Served(job, port=server.port)
            job.record("master-restored", "2 nodes are to come back")
            again.append(new)
            new.start()
            new.do(job.end)

        timer = threading.Timer(0.2, restart)
        timer.start()
        said = stoker("events", "--follow", "--json")
        timer.join()
        again[0].stop()
    assert [json.loads(line)["seq"] for line in said.out.splitlines()] == [1, 2, 3]
    assert said.code == 0


def test_what_is_written_while_the_master_goes_for_good_is_read_from_the_log(
    stoker: Callable[..., Said], tmp_path: Path
) -> None:
    job = FakeJob()
    job.record("generation", "first")
    log = [*job.log, JobEvent(2, 2.0, "ended", "every worker finished")]
    write_events(tmp_path / "logs" / "events.db", log)
    with running(job, journal_file=str(tmp_path / "logs" / "events.db")) as server:
        folder = tmp_path / "stoker" / "jobs"

        def die() -> None:
            server.stop()
            for path in folder.glob("*.json"):
                path.unlink()

        timer = threading.Timer(0.2, die)
        timer.start()
        said = stoker("events", "--follow", "--json")
        timer.join()
    assert [json.loads(line)["seq"] for line in said.out.splitlines()] == [1, 2]
    assert said.code == 0
