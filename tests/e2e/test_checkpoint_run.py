"""`stoker run` with a Checkpointer: what is in memory reaches the storage, however the run ends."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from stoker.cli.job_events import read_events
from stoker.errors import EnvironmentProblem
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.wire.control import JobEvent
from tests.e2e.hosts_census import command_of
from tests.e2e.run_helpers import SCRIPTS, Finished, Stoker, run, wait_for
from tests.s3_server import BUCKET, KEYS, s3_server

pytestmark = pytest.mark.real
NEWEST_OF_6 = (4, 6)
"""The last one may come due while the one before it is still under way."""
SNAPSHOTS = str(SCRIPTS / "kept_snapshots.py")


def commits_in(url: str | Path) -> int | None:
    image = CheckpointStorage(str(url)).read_newest()
    if image is not None:
        assert image.state()["values"]["total"] == image.commits
    return None if image is None else image.commits


def events(folder: Path, kind: str) -> list[JobEvent]:
    """Of the run whose log is in there."""
    found: list[JobEvent] = []
    for path in folder.glob("logs/*/events.db"):
        with contextlib.suppress(EnvironmentProblem):  # it has just been made
            found += [event for event in read_events(path) if event.kind == kind]
    return found


def train(folder: Path, url: str, *more: str, flags: tuple[str, ...] = (), **environment: str) -> Finished:
    return run(folder, "run", "--no-cache", "--log-dir", "logs", *flags, SNAPSHOTS, url, *more, **environment)


def test_an_error_leaves_the_newest_snapshot_in_the_storage(tmp_path: Path) -> None:
    """The saver has not even begun when the run is over."""
    done = train(tmp_path, "checkpoints", "7", "error")
    assert done.code == 1, done.text
    assert "failed on purpose" in done.err
    found = commits_in(tmp_path / "checkpoints")
    assert found in NEWEST_OF_6
    done = train(tmp_path, "checkpoints", "16")
    assert done.code == 0, done.text
    assert f"begins at {found} with {found}" in done.out, done.text
    assert (commits_in(tmp_path / "checkpoints") or 0) > 10


def test_two_workers_write_one_checkpoint(tmp_path: Path) -> None:
    done = train(tmp_path, "checkpoints", "6", flags=("--nproc-per-node", "2"))
    assert done.code == 0, done.text
    assert commits_in(tmp_path / "checkpoints") in NEWEST_OF_6


def test_snapshots_are_written_while_it_trains(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--no-cache", SNAPSHOTS, "checkpoints", "6", "wait")
    wait_for(lambda: commits_in(tmp_path / "checkpoints") in NEWEST_OF_6, why="a checkpoint")
    (worker,) = job.workers()
    os.kill(job.process.pid, signal.SIGTERM)
    done = job.finish()
    assert done.code == 128 + signal.SIGTERM, done.text
    assert commits_in(tmp_path / "checkpoints") in NEWEST_OF_6
    assert not Path(f"/proc/{worker.pid}").exists()


def test_an_agent_that_is_killed_takes_its_saver_with_it(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--no-cache", SNAPSHOTS, "checkpoints", "6", "wait")
    wait_for(lambda: commits_in(tmp_path / "checkpoints") in NEWEST_OF_6, why="a checkpoint")
    children = psutil.Process(job.process.pid).children()
    savers = [child for child in children if "stoker.train.checkpoints.saver" in command_of(child)]
    assert len(savers) == 1
    job.process.kill()
    job.finish()
    wait_for(lambda: not savers[0].is_running() or savers[0].status() == "zombie", why="the saver's end")


def test_a_storage_that_fails_is_in_the_event_log(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/checkpoints"
    job = Stoker(tmp_path, "run", "--no-cache", "--log-dir", "logs", SNAPSHOTS, url, "4", "wait", "hold")
    wait_for(
        lambda: [p for p in tmp_path.glob("logs/*/*/*/stdout.log") if "begins" in p.read_text()],
        why="a worker",
    )
    (tmp_path / "checkpoints").write_text("a file in the way")
    (tmp_path / "go").touch()
    failed = wait_for(lambda: events(tmp_path, "checkpoint-failed"), why="an event")
    assert "cannot write to" in failed[0].why or "cannot list" in failed[0].why
    (tmp_path / "checkpoints").unlink()
    wait_for(lambda: events(tmp_path, "checkpoint-written-again"), why="an event")
    assert commits_in(tmp_path / "checkpoints") in (2, 4)
    job.process.send_signal(signal.SIGTERM)
    job.finish()


def test_a_run_goes_on_from_s3(tmp_path: Path) -> None:
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3") as endpoint:
        url = f"s3://{BUCKET}/run-7?endpoint={endpoint}"
        done = train(tmp_path, url, "7", "error", **KEYS)
        assert done.code == 1, done.text
        done = train(tmp_path, url, "9", **KEYS)
        assert done.code == 0, done.text
        assert "begins at 6 with 6" in done.out or "begins at 4 with 4" in done.out
