"""The node of rank 0, which writes snapshots to the storage, is lost and no new world forms: another node writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from stoker.train.checkpoints.layout import COMPLETE
from stoker.train.checkpoints.slots import Slot, all_slots
from stoker.train.checkpoints.storage import CheckpointStorage
from tests.e2e.hosts_census import command_of
from tests.e2e.run_helpers import SCRIPTS, Stoker, free_port, kill_all, wait_for

pytestmark = pytest.mark.real
SCRIPT = (str(SCRIPTS / "kept_snapshots.py"), "checkpoints", "6", "wait")
WAITS_S = ("--timeout", "45")


def node(folder: Path, name: str, *flags: str) -> Stoker:
    (folder / name).mkdir()
    environment = {"STOKER_SNAPSHOT_DIR": str(folder / name)}
    return Stoker(
        folder, "run", "--no-cache", "--nnodes", "2", *WAITS_S, *flags, *SCRIPT, environment=environment
    )


def in_memory(base: Path) -> int:
    """Commits of the newest whole snapshot of the agent whose folders are in there."""
    headers = [Slot(path).peek() for folder in base.glob("*/") for path in all_slots(folder)]
    return max((h.commits for h in headers if h is not None and h.state == COMPLETE), default=0)


def writes(job: Stoker) -> bool:
    """Whether it has a saver."""
    children = psutil.Process(job.process.pid).children()
    return any("stoker.train.checkpoints.saver" in command_of(child) for child in children)


def hosts_the_master(job: Stoker) -> bool:
    return any("master" in command_of(child) for child in psutil.Process(job.process.pid).children())


def lose_the_writer(folder: Path, first: Stoker, second: Stoker, name: str = "b") -> int:
    """Kill the first node with all that it has written; what the second, of that name, has in its memory."""
    wait_for(lambda: writes(first), why="a saver")
    commits = wait_for(lambda: in_memory(folder / name) >= 4 and in_memory(folder / name), why="snapshots")
    assert not writes(second)
    kill_all(first)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return int(commits)


def names_in(folder: Path, commits: int) -> list[str]:
    image = CheckpointStorage(str(folder)).read_newest()
    assert image is not None
    assert image.commits >= commits
    assert image.state()["values"]["total"] == image.commits
    return [path.name.partition(f"{image.commits:012d}")[2] for path in folder.iterdir()]


def test_the_master_went_with_it(tmp_path: Path) -> None:
    """Nobody says who is left: each node writes beside what others may be writing."""
    endpoint = f"127.0.0.1:{free_port()}"
    first = node(tmp_path, "a", "--rdzv-endpoint", endpoint, "--node-rank", "0")
    wait_for(lambda: hosts_the_master(first), why="master")
    second = node(tmp_path, "b", "--rdzv-endpoint", endpoint, "--node-rank", "1")
    commits = lose_the_writer(tmp_path, first, second)
    done = second.finish(150)
    assert done.code != 0, done.text
    assert names_in(tmp_path / "checkpoints", commits) == [""]


def test_the_master_is_elsewhere(tmp_path: Path) -> None:
    """It says who of the others writes."""
    endpoint = f"127.0.0.1:{free_port()}"
    job = ("--rdzv-id", "night-run", "--nnodes", "2", *WAITS_S)
    master = Stoker(tmp_path, "master", "--listen", endpoint, *job)
    flags = ("--rdzv-endpoint", endpoint, "--rdzv-id", "night-run", "--node-rank", "1")
    first = node(tmp_path, "a", *flags)
    wait_for(lambda: [*(tmp_path / "a").iterdir()], why="first node")
    second = node(tmp_path, "b", *flags)
    wait_for(lambda: writes(first) or writes(second), why="a saver")
    if writes(first):
        commits = lose_the_writer(tmp_path, first, second)
    else:
        first, second = second, first
        commits = lose_the_writer(tmp_path, first, second, "a")
    done = second.finish(150)
    assert done.code != 0, done.text
    assert "only 1 of at least 2 nodes" in done.text
    assert names_in(tmp_path / "checkpoints", commits) == [""], "it is the only one that writes"
    master.finish()
