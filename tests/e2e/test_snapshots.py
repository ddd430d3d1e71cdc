"""Runs whose workers all die go on from the snapshots in the node's memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.job_events import read_events
from stoker.platform.shared_folders import PREFIX
from tests.e2e.faults import kill_at_once
from tests.e2e.hosts_network import mount_disk, tool
from tests.e2e.run_helpers import SCRIPTS, Stoker, alive, free_port, kill_all, ledger, said, wait_for

pytestmark = pytest.mark.real
SCRIPT = str(SCRIPTS / "snapshots.py")
COMMITS = 3 * 20


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """Where agents make their folders; at the end of a test there are none of them."""
    base = tmp_path / "memory"
    base.mkdir()
    yield base
    assert [*base.iterdir()] == []


def start(folder: Path, memory: Path, *flags: str) -> Stoker:
    return Stoker(
        folder,
        "run",
        "--audit",
        *flags,
        environment={"STOKER_SNAPSHOT_DIR": str(memory), "STOKER_REPORT": "0"},
    )


def worlds(folder: Path) -> list[dict[str, Any]]:
    path = folder / "worlds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_commit(folder: Path, step: int) -> None:
    wait_for(lambda: any(e["step"] >= step for e in ledger(folder, "commit")), why=f"commit {step}")


def kill_workers(*jobs: Stoker) -> None:
    kill_at_once(*(worker for job in jobs for worker in job.workers()))


def test_all_workers_killed_at_once_go_on_from_memory(tmp_path: Path, memory: Path) -> None:
    """Twice, so that those that were started in their places take snapshots as well."""
    job = start(tmp_path, memory, "--nproc-per-node", "2", SCRIPT, "--out", ".", "--hold-at", "16", "36")
    for step in (13, 33):
        wait_for_commit(tmp_path, step)
        kill_workers(job)
        (tmp_path / f"go-{step + 3}").touch()
        wait_for(lambda step=step: worlds(tmp_path)[-1]["commits"] >= step - 5, why="a world that goes on")
    done = job.finish()
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    begun = sorted({w["commits"] for w in worlds(tmp_path)})
    assert begun[0] == 0
    assert len([w for w in worlds(tmp_path) if w["commits"] == 0]) == 2, "nobody began anew"
    assert all(commits % 5 == 0 for commits in begun)
    entered = [one for one in ledger(tmp_path, "world") if one["commits"] > 0]
    assert entered
    assert not any(one["copied"] for one in entered), "both have loaded the same snapshot"
    last = said(tmp_path)
    assert {one["commits"] for one in last} == {COMMITS}
    assert last[0]["weights"] == last[1]["weights"]
    assert Path(last[0]["folder"]).parent == memory


def test_of_two_nodes_that_lose_all_workers_the_newest_snapshot_counts(tmp_path: Path, memory: Path) -> None:
    """Each node has snapshots of its own, in a folder of its own."""
    endpoint = f"127.0.0.1:{free_port()}"
    flags = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", endpoint, SCRIPT, "--out", ".",
             "--hold-at", "16")  # fmt: skip
    jobs = [start(tmp_path, memory, *flags) for _ in range(2)]
    wait_for_commit(tmp_path, 13)
    wait_for(lambda: len([*memory.glob(f"{PREFIX}*/0-1.snapshot")]) == 2, why="snapshots of both")
    kill_workers(*jobs)
    (tmp_path / "go-16").touch()
    for job in jobs:
        done = job.finish()
        assert done.code == 0, done.text
    assert len([w for w in worlds(tmp_path) if w["commits"] == 0]) == 2
    last = said(tmp_path)
    assert {one["commits"] for one in last} == {COMMITS}
    assert last[0]["weights"] == last[1]["weights"]
    assert last[0]["folder"] != last[1]["folder"]


def test_a_damaged_snapshot_is_not_gone_on_from(tmp_path: Path, memory: Path) -> None:
    job = start(
        tmp_path, memory, "--nproc-per-node", "1", SCRIPT, "--out", ".", "--every", "10", "--hold-at", "28"
    )
    wait_for_commit(tmp_path, 25)
    (worker,) = job.workers()
    worker.suspend()
    for path in memory.glob(f"{PREFIX}*/*.snapshot"):
        with path.open("r+b") as file:
            file.seek(4096 + 100)
            file.write(b"damaged")
    worker.kill()
    (tmp_path / "go-28").touch()
    done = job.finish()
    assert done.code == 0, done.text
    assert "the checksum of modules.model.0.weight does not hold" in done.text
    assert [w["commits"] for w in worlds(tmp_path)] == [0, 0]
    assert {one["commits"] for one in said(tmp_path)} == {COMMITS}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_shared_memory_costs_the_snapshots_not_the_run(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    mount_disk(disk, "1m", f"stoker-test-{os.getpid()}")
    try:
        job = start(tmp_path, disk, "--nproc-per-node", "1", SCRIPT, "--out", ".", "--epochs", "1")
        done = job.finish()
        assert done.code == 0, done.text
        (log,) = (tmp_path / "stoker-logs").glob("*/events.db")
        told = [event.why for event in read_events(log) if event.kind == "snapshot-failed"]
        assert len(told) == 1
        assert "no room for a snapshot of" in told[0]
    finally:
        tool("umount", "--lazy", str(disk))


def test_two_jobs_side_by_side_and_what_a_killed_agent_left(tmp_path: Path, memory: Path) -> None:
    """1. Two jobs train. 2. One's agent is killed. 3. A third job sweeps its folder, and not that of the other."""
    folders = [tmp_path / name for name in ("one", "other", "third")]
    for folder in folders:
        folder.mkdir()
    flags = ("--nproc-per-node", "1", SCRIPT, "--out", ".")
    one, other = (start(folder, memory, *flags, "--epochs", "100000") for folder in folders[:2])
    for folder in folders[:2]:
        wait_for_commit(folder, 12)
    before = set(memory.iterdir())
    assert len(before) == 2
    workers = [worker.pid for worker in one.workers()]
    kill_all(one)
    wait_for(lambda: not alive(workers), why="the end of its workers")
    assert set(memory.iterdir()) == before
    third = start(folders[2], memory, *flags, "--epochs", "1")
    done = third.finish()
    assert done.code == 0, done.text
    assert "the process that it belonged to has ended" in done.err
    left = set(memory.iterdir())
    assert len(left) == 1
    assert left < before
    kill_workers(other)
    wait_for(lambda: worlds(folders[1])[-1]["commits"] >= 10, why="a world that goes on")
    other.interrupt()
    other.finish()
