"""`stoker run` with --auto-tune and --accelerator, warm-ups and lost devices: real processes."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.run_helpers import Stoker, alive, free_port, ledger, run, wait_for

pytestmark = pytest.mark.real
TUNED = str(Path(__file__).parents[1] / "scripts" / "tuned.py")


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What workers wrote, in the order of time."""
    entries = [json.loads(path.read_text()) for path in folder.glob(f"{kind}-*.json")]
    return sorted(entries, key=lambda entry: entry["wall_s"])


def test_loader_processes_are_found_by_trying_and_all_that_is_decided_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--auto-tune", "--accelerator", "cpu", "--no-cache", "--audit",
               TUNED, "--out", ".", "--records", "480", "--decode-s", "0.02", "--micro", "2")  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    words = [line.partition("auto-tune: ")[2] for line in done.err.splitlines() if "auto-tune: " in line]
    assert words[0] == "measuring 0 loader workers"
    assert words[1].startswith("trying loader workers 0 → "), words
    assert "of the step is waiting for data" in words[1]
    assert all(line.startswith("[rank 0] stoker: ") for line in done.err.splitlines() if "auto-tune" in line)
    ends = told(tmp_path, "end")
    assert [e["commits"] for e in ends] == [60, 60]
    assert ends[0]["weights"] == ends[1]["weights"]
    assert ends[0]["num_workers"] == ends[1]["num_workers"], "the ranks run the same"
    assert {(e["device"], e["accelerator"]) for e in ends} == {("cpu", "cpu")}


def test_loader_processes_that_fail_on_one_rank_are_taken_back_on_all(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--auto-tune", "--no-cache", "--audit", TUNED, "--out", ".",
               "--records", "480", "--decode-s", "0.02", "--one-process", "1")  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    words = [line.partition("auto-tune: ")[2] for line in done.err.splitlines() if "auto-tune: " in line]
    assert words[2].endswith(
        " taken back: ValueError: this handle belongs to another process; not tried again"
    )
    assert words[3] == "measuring 0 loader workers"
    assert words[4].startswith("loader workers stay at 0: ")
    assert [(e["commits"], e["num_workers"]) for e in told(tmp_path, "end")] == [(60, 0), (60, 0)]


def test_tuning_goes_on_in_the_next_worlds_and_newcomers_take_part(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "2", "--auto-tune", "--no-cache", "--audit",
                 TUNED, "--out", ".", "--records", "4000", "--decode-s", "0.01")  # fmt: skip

    def commits(generation: int) -> int:
        return [e["generation"] for e in ledger(tmp_path, "commit")].count(generation)

    try:
        wait_for(lambda: commits(1) > 50, why="commits")
        job.workers()[0].kill()
        wait_for(lambda: commits(3) > 60, why="commits of a newcomer and a survivor")
    finally:
        job.interrupt()
        done = job.finish()
    measured = [line for line in done.err.splitlines() if "auto-tune: measuring " in line]
    assert len(measured) == 3, "it is measured anew in each world"


def test_a_newcomer_warms_up_while_the_others_train(tmp_path: Path) -> None:
    flags = (
        "run",
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--no-cache",
    )
    warm = tmp_path / "warm"
    warm.touch()
    script = (TUNED, "--out", str(tmp_path), "--epochs", "1000", "--step-s", "0.05", "--warm-up-s", "1",
              "--warm-up-until", str(warm))  # fmt: skip
    first = Stoker(tmp_path, *flags, "--audit", *script)
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 5, why="commits")
    warm.unlink()
    other = tmp_path / "other"
    other.mkdir()
    second = Stoker(other, *flags, *script, environment={"XDG_RUNTIME_DIR": str(tmp_path / "runtime")})
    try:
        wait_for(lambda: len(told(tmp_path, "warm-up-begin")) == 2, why="begin of a second warm-up")
        before = len(ledger(tmp_path, "commit"))
        wait_for(lambda: len(ledger(tmp_path, "commit")) > before + 20, why="commits meanwhile")
        warm.touch()
        wait_for(lambda: len(told(tmp_path, "warm-up-end")) == 2, why="a second warm-up")
        wait_for(lambda: any(e["world_size"] == 2 for e in ledger(tmp_path, "world")), why="world of two")
    finally:
        second.interrupt()
        second.finish()
        first.interrupt()
        first.finish()
    began, ended = (told(tmp_path, kind)[1] for kind in ("warm-up-begin", "warm-up-end"))
    own, newcomer = (e["pid"] for e in told(tmp_path, "warm-up-begin"))
    assert (began["pid"], ended["pid"]) == (newcomer, newcomer) != (own, own)
    assert (began["commits"], ended["commits"]) == (0, 0)
    commits = [e for e in ledger(tmp_path, "commit") if e["generation"] == 1]
    meanwhile = [e for e in commits if began["wall_s"] < e["wall_s"] < ended["wall_s"]]
    assert len(meanwhile) >= 10, "the other goes on committing"
    (interrupted,) = (e for e in ledger(tmp_path, "world") if e["generation"] == 2)
    assert ended["wall_s"] < interrupted["wall_s"]
    assert not alive([own, newcomer])


def test_a_warm_up_leaves_the_training_as_it_was(tmp_path: Path) -> None:
    weights = []
    for warm_up_s in ("0", "0.1"):
        folder = tmp_path / warm_up_s
        folder.mkdir()
        done = run(folder, "run", "--nproc-per-node", "1", "--no-cache", TUNED, "--out", ".", "--records", "80",
                   "--step-s", "0", "--warm-up-s", warm_up_s)  # fmt: skip
        assert done.code == 0, done.text
        (end,) = told(folder, "end")
        assert end["commits"] == 10
        weights.append(end["weights"])
    assert weights[0] == weights[1]
    assert len(told(tmp_path / "0.1", "warm-up-end")) == 1


def test_a_worker_whose_device_is_lost_is_replaced_by_a_new_process(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "2", "--no-cache", "--audit", TUNED, "--out", ".",
                 "--lose-device-at", "10", "--step-s", "0.05", "--epochs", "40")  # fmt: skip
    try:
        wait_for(lambda: len(ledger(tmp_path, "commit")) > 4, why="commits")
        before = {w.pid for w in job.workers()}
        wait_for(lambda: [e["generation"] for e in ledger(tmp_path, "world")].count(3) == 2, why="newcomer")
        after = {w.pid for w in job.workers()}
    finally:
        job.interrupt()
        job.finish()
    worlds = [(e["generation"], e["world_size"]) for e in ledger(tmp_path, "world")]
    assert sorted(worlds) == [(1, 2), (1, 2), (2, 1), (3, 2), (3, 2)]
    assert len(before) == len(after) == 2
    assert len(before & after) == 1, "the survivor keeps its process, the other gets a new one"
    (events,) = tmp_path.glob("stoker-logs/*/events.db")
    with sqlite3.connect(events) as journal:
        told_why = " ".join(why for (why,) in journal.execute("SELECT why FROM entry"))
    assert (
        "its device in a state that cannot be trusted: RuntimeError: CUDA error: device-side assert"
        in told_why
    )


def test_a_kind_of_device_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--accelerator", "npu", TUNED, "--out", ".")
    assert done.code == 2, done.text
    assert "no npu device is visible" in done.err
    assert not list(tmp_path.glob("stoker-logs/*"))
