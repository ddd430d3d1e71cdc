"""Models that FSDP2 divides over the workers, under `stoker run`: real processes, real kills."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.run_helpers import SCRIPTS, Stoker, ledger, run, said, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
TOY = str(SCRIPTS / "fsdp_toy.py")
START_S = 240.0
STEPS = 20


@functools.cache
def weights_of_one_worker() -> dict[str, Any]:
    """Of two epochs that nothing disturbed."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(Path(folder), "run", "--nproc-per-node", "1", TOY, "--step-s", "0", timeout_s=START_S)
        assert done.code == 0, done.text
        (alone,) = said(Path(folder))
    return alone


def assert_as_if_undisturbed(workers: list[dict[str, Any]]) -> None:
    alone = weights_of_one_worker()
    for worker in workers:
        assert worker["commits"] == 2 * STEPS
        assert worker["slots"] == pytest.approx(alone["slots"], abs=1e-4)
        for name, value in worker["weights"].items():
            rows, others = ([v] if not isinstance(v[0], list) else v for v in (value, alone["weights"][name]))
            for row, other in zip(rows, others, strict=True):
                assert row == pytest.approx(other, abs=1e-4), name


@pytest.mark.parametrize("where", ["backward", "commit"])
@pytest.mark.parametrize("rank", [0, 1])
def test_survivors_put_together_what_a_dead_worker_had(tmp_path: Path, rank: int, where: str) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "3", "--max-restarts", "0", "--audit", TOY,
               "--fail-at", f"{rank}:11:{where}", timeout_s=START_S)  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    workers = said(tmp_path)
    assert [w["world_size"] for w in workers] == [2, 2]
    assert all(w["worlds"][1][3] == 11 for w in workers), "only the step in flight is done again"
    assert_as_if_undisturbed(workers)


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "2", "--audit", TOY, "--step-s", "1")
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 6, START_S, why="commits")
    before = {w.pid for w in job.workers()}
    victim = job.workers()[1].pid
    os.kill(victim, signal.SIGKILL)
    done = job.finish(START_S)
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    workers = said(tmp_path)
    assert {w["world_size"] for w in workers} == {2}, "the newcomer has its part"
    assert before - {victim} < {w["pid"] for w in workers}, "the survivor keeps its process"
    assert_as_if_undisturbed(workers)


@pytest.mark.parametrize("size", ["1", "3", "4"])
def test_what_two_have_saved_is_read_by_any_number(tmp_path: Path, size: str) -> None:
    saved = ("--checkpoint-dir", "ckpt", "--checkpoint-every", "6")
    first = run(tmp_path, "run", "--nproc-per-node", "2", *saved, TOY, "--epochs", "1", timeout_s=START_S)
    assert first.code == 0, first.text
    names = sorted(path.name for path in (tmp_path / "ckpt").iterdir())
    parts, steps = [f"commit-{n:012d}.parts" for n in (12, 18)], [f"step-{n:012d}" for n in (12, 18)]
    assert names == [*parts, *steps]
    for path in tmp_path.glob("*.json"):
        path.unlink()
    then = run(tmp_path, "run", "--nproc-per-node", size, *saved, TOY, timeout_s=START_S)
    assert then.code == 0, then.text
    workers = said(tmp_path)
    assert [w["worlds"][0][2:] for w in workers] == [[int(size), 18]] * int(size)
    assert_as_if_undisturbed(workers)


def test_neighbours_that_end_at_once_cost_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "3", "--audit", "--checkpoint-dir", "ckpt",
                 "--checkpoint-every", "5", TOY, "--step-s", "0.5")  # fmt: skip
    wait_for(lambda: any(e["step"] >= 8 for e in ledger(tmp_path, "commit")), START_S, why="commits")
    for worker in job.workers()[:2]:
        worker.kill()
    done = job.finish(START_S)
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    again = [e["commits"] for e in ledger(tmp_path, "world") if e["generation"] > 1]
    assert again
    assert all(commits % 5 == 0 for commits in again), "a checkpoint's"
    assert_as_if_undisturbed(said(tmp_path))
