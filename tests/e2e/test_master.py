"""`stoker master` as a process of its own, with two nodes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.cli.registry import JobRecord
from stoker.errors import MasterUnreachable
from stoker.wire.control import JobStatus
from stoker.wire.control_client import JobClient
from tests.e2e.run_helpers import TOY, Stoker, free_port, run, wait_for

pytestmark = pytest.mark.real


class Cluster:
    """A master with its journal, and nodes of one worker each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.started: list[Stoker] = []

    def start(self, *arguments: str) -> Stoker:
        self.started.append(Stoker(self.folder, *arguments))
        return self.started[-1]

    def master(self) -> Stoker:
        return self.start(
            "master", "--listen", self.endpoint, "--journal", "job.db", "--rdzv-id", "night-run", "--nnodes", "2"
        )  # fmt: skip

    def node(self, *script: str) -> Stoker:
        return self.start(
            "run", "--no-cache", "--rdzv-endpoint", self.endpoint, "--rdzv-id", "night-run", "--nnodes", "2",
            "--node-rank", "1", TOY, *script,
        )  # fmt: skip

    def runs(self, *, by: Stoker) -> JobStatus:
        """The status once this master has heard of a commit and of both workers."""

        def look() -> JobStatus | None:
            assert by.process.poll() is None, by.finish().text
            for path in (self.folder / "runtime" / "stoker" / "jobs").glob(f"*.{by.process.pid}.json"):
                record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
                with contextlib.suppress(MasterUnreachable), JobClient(record.endpoint, record.token) as job:
                    status = job.status()
                    heard = status.commits > 0 and [pid > 0 for pid in pids(status)] == [True, True]
                    return status if status.phase == "running" and heard else None
            return None

        found: JobStatus = wait_for(look, why="running job")
        return found

    def close(self) -> None:
        for command in self.started:
            command.process.kill()
            command.finish()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def pids(status: JobStatus) -> list[int]:
    return sorted(worker.pid for node in status.nodes for worker in node.workers)


def test_a_job_outlives_its_master_and_its_journal_serves_the_next_job(cluster: Cluster) -> None:
    master = cluster.master()
    nodes = [cluster.node("--hold", "go", "--epochs", "1", "--step-s", "0.1") for _ in range(2)]
    before = cluster.runs(by=master)

    second = run(cluster.folder, "master", "--listen", "127.0.0.1:0", "--journal", "job.db")
    assert second.code == 5, second.text
    assert f"process id {master.process.pid} holds the journal" in second.err
    stranger = run(cluster.folder, "run", "--no-cache", "--nnodes", "1:2", "--rdzv-endpoint",
                   cluster.endpoint, "--rdzv-id", "other", TOY)  # fmt: skip
    assert stranger.code == 1, stranger.text
    assert "it wants job 'other', this master runs 'night-run'" in stranger.err

    master.process.kill()
    master.finish()
    away = run(cluster.folder, "job", "status", cluster.endpoint, STOKER_JOB_TOKEN="any")
    assert away.code == 3, away.text
    master = cluster.master()
    after = cluster.runs(by=master)
    assert (after.generation, pids(after)) == (before.generation, pids(before)), "the same workers train on"
    assert after.master.incarnation == before.master.incarnation + 1
    assert after.started_wall_s == before.started_wall_s

    master.interrupt(signal.SIGTERM)
    ended = master.finish()
    assert (ended.code, "the job goes on" in ended.err) == (0, True), ended.text
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids(before)), "SIGTERM is for the master alone"
    master = cluster.master()
    assert pids(cluster.runs(by=master)) == pids(before)
    (cluster.folder / "go").touch()
    for command in (*nodes, master):
        done = command.finish()
        assert done.code == 0, done.text
    assert not list((cluster.folder / "runtime" / "stoker").glob("*.token")), "a secret is for one job"

    master = cluster.master()
    wait_for(lambda: json.loads(run(cluster.folder, "job", "ls", "--json").out)["jobs"], why="next job")
    (job,) = json.loads(run(cluster.folder, "job", "ls", "--json").out)["jobs"]
    assert (job["status"]["phase"], job["status"]["generation"]) == ("waiting", 0)
    assert job["status"]["master"]["incarnation"] == 0
    told = run(cluster.folder, "job", "events", "--kind", "ended", "--json").out.splitlines()
    assert [json.loads(line)["why"] for line in told] == ["every worker finished"], "of the job before"
    assert run(cluster.folder, "job", "stop", "--why", "enough").code == 0
    assert master.finish().code == 130


@pytest.mark.parametrize("what", ["damaged", "foreign", "a folder"])
def test_what_is_no_journal_is_refused(tmp_path: Path, what: str) -> None:
    journal = tmp_path / "job.db"
    if what == "damaged":
        journal.write_bytes(b"no journal")
    elif what == "foreign":
        with contextlib.closing(sqlite3.connect(journal)) as database:
            database.execute("CREATE TABLE songs (name TEXT)")
    else:
        journal.mkdir()
    refused = run(tmp_path, "master", "--listen", "127.0.0.1:0", "--journal", "job.db")
    assert refused.code == (2 if what == "a folder" else 5), refused.text
    said = {
        "damaged": "job.db is not a journal, or a damaged one",
        "foreign": "job.db is a SQLite file of another program",
        "a folder": "job.db is a folder: name a file in it",
    }
    assert said[what] in refused.err
    assert "listens" not in refused.err
    assert "Traceback" not in refused.err


def test_flags_that_cannot_be_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        for flags, code, words in (
            (
                ("--listen", busy),
                5,
                f"cannot listen on {busy}: Address already in use; choose another port with --listen",
            ),
            (("--listen", "127.0.0.1:x"), 2, "--listen '127.0.0.1:x': write HOST:PORT"),
            (("--listen", "0.0.0.0:0"), 2, "needs a secret"),
        ):
            refused = run(tmp_path, "master", *flags)
            assert refused.code == code, refused.text
            assert words in refused.err
