"""Exact mode: the same bits at every world size, and whatever dies when."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.faults import kill_at_once
from tests.e2e.run_helpers import SCRIPTS, Stoker, ledger, own_environment, run, said, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
EXACT = str(SCRIPTS / "exact.py")
STEPS = 22


class Bits:
    """What a run computed."""

    def __init__(self, folder: Path) -> None:
        workers = said(folder)
        self.weights = {str(worker["digest"]) for worker in workers}
        self.seen = {worker["seen"] for worker in workers}
        self.commits = {worker["commits"] for worker in workers}
        self.losses: dict[tuple[int, int], set[str]] = {}
        self.sizes = set()
        for path in folder.glob("losses-*.jsonl"):
            for line in path.read_text().splitlines():
                commits, part, loss, size = json.loads(line)
                self.losses.setdefault((commits, part), set()).add(loss)
                self.sizes.add(size)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """The script alone, without an agent: a world of one."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, EXACT, "--num-workers", "1"]
    subprocess.run(command, cwd=folder, env=own_environment(folder), check=True, timeout=120)
    bits = Bits(folder)
    assert bits.commits == {STEPS}
    assert bits.seen == {STEPS}, "what a loop counts, it counts once a global batch"
    assert len(bits.losses) == STEPS * 4
    # The last batch of an epoch has three records, one of which keeps the fourth virtual rank in step.
    assert len({loss for losses in bits.losses.values() for loss in losses}) == STEPS * 4 - 2
    return bits


def assert_same(found: Bits, wanted: Bits) -> None:
    assert found.commits == wanted.commits
    assert found.seen == wanted.seen
    assert found.losses == wanted.losses
    assert found.weights == wanted.weights


@pytest.mark.parametrize(("size", "workers"), [(2, 2), (3, 0), (4, 0)])
def test_every_world_size_gives_the_same_bits(
    tmp_path: Path, undisturbed: Bits, size: int, workers: int
) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", str(size), "--no-cache", "--audit", EXACT,
               "--num-workers", str(workers))  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    bits = Bits(tmp_path)
    assert bits.sizes == {size}
    assert_same(bits, undisturbed)


@pytest.mark.parametrize("where", ["forward", "backward", "step", "commit"])
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_worker_is_killed_within_a_step_and_the_bits_are_the_same(
    tmp_path: Path, undisturbed: Bits, where: str, restarts: str
) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "3", "--max-restarts", restarts, "--no-cache", "--audit", EXACT,
               "--fail-at", f"1:7:{where}", "--once", str(tmp_path / "once"), "--step-s", "0.05")  # fmt: skip
    assert done.code == 0, done.text
    assert (tmp_path / "once").exists()
    assert "records missed 0, repeated 0" in done.err
    bits = Bits(tmp_path)
    assert bits.sizes >= {2, 3}
    assert_same(bits, undisturbed)


def test_all_workers_are_killed_and_the_bits_are_the_same(tmp_path: Path, undisturbed: Bits) -> None:
    """They begin again from a snapshot: cursor, schedulers and random generators are part of it."""
    job = Stoker(tmp_path, "run", "--nproc-per-node", "2", "--no-cache", "--audit", "--checkpoint-dir", "ckpt",
                 "--checkpoint-every", "5", EXACT, "--step-s", "0.05", "--hold", "go")  # fmt: skip
    wait_for(lambda: any(entry["step"] >= 13 for entry in ledger(tmp_path, "commit")), why="13 commits")
    kill_at_once(*job.workers())
    (tmp_path / "go").touch()
    done = job.finish()
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    assert any(entry["commits"] >= 10 for entry in ledger(tmp_path, "world"))
    assert_same(Bits(tmp_path), undisturbed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--misuse", "two"], "each micro-batch takes one backward()"),
        (["--misuse", "optimizer"], "state.optimizer.step(), which steps once a global batch"),
        (["--misuse", "scheduler"], "state.scheduler.step(), which steps once a global batch"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = subprocess.run(
        [sys.executable, EXACT, *arguments],
        cwd=tmp_path,
        env=own_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


def test_a_world_of_more_workers_than_virtual_ranks_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "3", "--no-cache", EXACT, "--virtual-ranks", "2")
    assert done.code != 0
    assert "has virtual_ranks=2, too few for a world of 3" in done.err
