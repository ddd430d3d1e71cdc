"""Models that FSDP2 divides over the workers, under `stoker run`: real processes, real kills."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults import kill_at_once
from tests.e2e.run_helpers import SCRIPTS, Stoker, free_port, kill_all, ledger, run, said, wait_for
from tests.s3_server import BUCKET, KEYS, s3_client, s3_server

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


def test_pieces_of_batches_steps_taken_back_and_a_warm_up_with_shares_that_differ(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "3", "--max-restarts", "0", "--audit", TOY, "--uses",
               "--fail-at", "1:11:backward", timeout_s=START_S)  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    workers = said(tmp_path)
    assert [w["worlds"][1][2:] for w in workers] == [[2, 11]] * 2
    assert_as_if_undisturbed(workers)


def test_all_workers_of_a_node_end_at_once_and_no_step_is_lost(tmp_path: Path) -> None:
    """Two nodes of two: each part has its second copy with the other node."""
    flags = ("run", "--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
             "--no-cache", "--audit", TOY, "--step-s", "0.5", "--first-step-s", "3")  # fmt: skip
    first = Stoker(tmp_path, *flags)
    wait_for(lambda: ledger(tmp_path, "world"), START_S, why="world of one node")
    other = tmp_path / "other"
    other.mkdir()
    second = Stoker(other, *flags, environment={"XDG_RUNTIME_DIR": str(tmp_path / "runtime")})
    wait_for(
        lambda: any(e["world_size"] == 4 for e in ledger(tmp_path, "world")), START_S, why="world of four"
    )
    joined = max(e["step"] for e in ledger(tmp_path, "commit"))
    wait_for(lambda: max(e["step"] for e in ledger(tmp_path, "commit")) > joined + 4, START_S, why="steps")
    kill_all(second)
    done = first.finish(START_S)
    assert done.code == 0, done.text
    steps = [e["step"] for e in ledger(tmp_path, "commit") if e["rank"] == 0]
    assert len(steps) == len(set(steps)) == 2 * STEPS, "no step was done twice"
    workers = said(tmp_path)
    assert [w["world_size"] for w in workers] == [2, 2]
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
    assert names == ["sharded-0", *(f"step-{n:012d}" for n in (12, 18))]
    parts = sorted(path.name for path in (tmp_path / "ckpt" / "sharded-0").iterdir())
    assert parts == [f"step-{n:012d}" for n in (12, 18)]
    for path in tmp_path.glob("*.json"):
        path.unlink()
    then = run(tmp_path, "run", "--nproc-per-node", size, *saved, TOY, timeout_s=START_S)
    assert then.code == 0, then.text
    workers = said(tmp_path)
    assert [w["worlds"][0][2:] for w in workers] == [[int(size), 18]] * int(size)
    assert_as_if_undisturbed(workers)


def test_pieces_are_kept_in_s3_and_read_by_another_number(tmp_path: Path) -> None:
    with s3_server(tmp_path) as endpoint:
        url = f"s3://{BUCKET}/fsdp?endpoint={endpoint}"
        saved = ("--checkpoint-dir", url, "--checkpoint-every", "6")
        first = run(
            tmp_path, "run", "--nproc-per-node", "2", *saved, TOY, "--epochs", "1", timeout_s=START_S, **KEYS
        )
        assert first.code == 0, first.text
        listed = s3_client(endpoint).list_objects_v2(Bucket=BUCKET, Prefix="fsdp/")["Contents"]
        folders = {"/".join(one["Key"].split("/")[1:-1]) for one in listed}
        wholes = {folder.rpartition("-")[0] for folder in folders if "/" not in folder}
        assert wholes == {f"step-{n:012d}" for n in (12, 18)}
        parts = sorted(folder for folder in folders if "/" in folder)
        assert [name.rpartition("-")[0] for name in parts] == [f"sharded-0/step-{n:012d}" for n in (12, 18)]
        for path in tmp_path.glob("*.json"):
            path.unlink()
        then = run(tmp_path, "run", "--nproc-per-node", "3", *saved, TOY, timeout_s=START_S, **KEYS)
    assert then.code == 0, then.text
    workers = said(tmp_path)
    assert [w["worlds"][0][2:] for w in workers] == [[3, 18]] * 3
    assert_as_if_undisturbed(workers)


def test_neighbours_that_end_at_once_cost_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "3", "--audit", "--checkpoint-dir", "ckpt",
                 "--checkpoint-every", "5", TOY, "--step-s", "0.5")  # fmt: skip
    wait_for(lambda: any(e["step"] >= 8 for e in ledger(tmp_path, "commit")), START_S, why="commits")
    kill_at_once(*job.workers()[:2])
    done = job.finish(START_S)
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    again = [e["commits"] for e in ledger(tmp_path, "world") if e["generation"] > 1]
    assert again
    assert all(commits % 5 == 0 for commits in again), "a checkpoint's"
    assert_as_if_undisturbed(said(tmp_path))
