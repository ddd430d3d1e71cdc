"""Elastic scripts under `stoker run`: real processes, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.cli.job_events import read_events
from tests.e2e.faults import is_by_beats, kill_at_once
from tests.e2e.run_helpers import (
    TOY,
    TOY_STEPS,
    UNTIL_TOLD,
    Stoker,
    copies,
    end_toy,
    free_port,
    kill_all,
    ledger,
    run,
    said,
    wait_for,
)

pytestmark = pytest.mark.real


def assert_one_state(workers: list[dict[str, object]]) -> None:
    weights = [w["weights"] for w in workers]
    assert all(w == weights[0] for w in weights), weights


def test_a_killed_worker_is_replaced_and_the_survivors_go_on(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "3", "--audit", TOY, "--out", ".", *UNTIL_TOLD,
                 "--step-s", "0.05", "--batch-norm")  # fmt: skip
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 30, why="commits")
    before = {w.pid for w in job.workers()}
    victim = sorted(before)[1]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: [e["generation"] for e in ledger(tmp_path, "world")].count(3) == 3, why="the newcomer")
    epochs = end_toy(tmp_path)
    done = job.finish()
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    workers = said(tmp_path)
    pids = {w["pid"] for w in workers}
    assert before - {victim} <= pids, "survivors keep their processes"
    assert len(pids) == 3, done.text
    assert {w["world_size"] for w in workers} == {3}
    assert {w["commits"] for w in workers} == {epochs * TOY_STEPS}
    assert_one_state(workers)
    survivors, together = copies(tmp_path, 2), copies(tmp_path, 3)
    assert len(survivors) == 2
    assert all(copied == lagged for copied, lagged in survivors), "equal survivors copy nothing"
    assert (False, False) in survivors
    assert sorted(together) == [(False, False), (False, False), (True, True)], "the newcomer copies"


@pytest.mark.parametrize("how", ["first", "last"])
def test_rank_zero_or_the_last_may_die(tmp_path: Path, how: str) -> None:
    rank = "0" if how == "first" else "2"
    done = run(tmp_path, "run", "--nproc-per-node", "3", "--max-restarts", "0", "--audit", TOY, "--out", ".",
               "--fail-at", f"{rank}:7:kill", "--batch", "23")  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    workers = said(tmp_path)
    assert [w["rank"] for w in workers] == [0, 1]
    assert_one_state(workers)


def test_a_step_that_nobody_can_undo_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--audit", "--checkpoint-dir", "ckpt",
               "--checkpoint-every", "5", TOY, "--metric", "--out", ".", "--fail-at", "1:12:kill")  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    assert {w["commits"] for w in said(tmp_path)} == {40}


def test_all_workers_killed_start_again_from_the_checkpoint(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "2", "--audit", "--checkpoint-dir", "ckpt",
                 "--checkpoint-every", "10", TOY, "--out", ".", "--epochs", "3", "--step-s", "0.05",
                 "--hold", "go", "--hold-at", "27")  # fmt: skip
    wait_for(lambda: any(e["step"] >= 25 for e in ledger(tmp_path, "commit")), why="25 commits")
    kill_at_once(*job.workers())
    (tmp_path / "go").touch()
    done = job.finish()
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    second = [e for e in ledger(tmp_path, "world") if e["commits"] > 0]
    assert second, "no world began from a checkpoint"
    assert all(e["commits"] % 10 == 0 for e in second)
    assert_one_state(said(tmp_path))


def test_the_gradient_is_the_global_batch_mean_at_every_world_size(tmp_path: Path) -> None:
    results = []
    for size in ("1", "2", "3"):
        folder = tmp_path / size
        folder.mkdir()
        done = run(folder, "run", "--nproc-per-node", size, TOY, "--out", ".", "--records", "61", "--batch", "10",
                   "--step-s", "0")  # fmt: skip
        assert done.code == 0, done.text
        results.append(said(folder)[0]["weights"])
    for weights in results[1:]:
        assert weights == pytest.approx(results[0], abs=1e-4)


def test_a_world_larger_than_the_last_batch(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "3", "--audit", TOY, "--out", ".", "--records", "41",
               "--batch", "20", "--step-s", "0")  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    assert_one_state(said(tmp_path))


def test_a_second_agent_joins_and_leaves(tmp_path: Path) -> None:
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
    script = (TOY, "--out", ".", "--last-epoch", str(tmp_path / "last-epoch"), "--step-s", "0.05")
    first = Stoker(tmp_path, *flags, "--audit", *script)
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 10, why="commits")
    other = tmp_path / "other"
    other.mkdir()
    second = Stoker(other, *flags, *script, environment={"XDG_RUNTIME_DIR": str(tmp_path / "runtime")})
    wait_for(lambda: any(e["world_size"] == 2 for e in ledger(tmp_path, "world")), why="world of two")
    second.interrupt()
    left = second.finish()
    assert left.code == 0, left.text
    assert "left the job" in left.err
    wait_for(lambda: ledger(tmp_path, "world")[-1]["world_size"] == 1, why="world without it")
    end_toy(tmp_path)
    done = first.finish()
    assert done.code == 0, done.text
    assert "bring" in done.err, "an audit of one node of two says what it lacks"
    sizes = [e["world_size"] for e in ledger(tmp_path, "world")]
    assert sizes == [1, 2, 1], done.text
    steps = [e["step"] for e in ledger(tmp_path, "commit")]
    assert len(steps) == len(set(steps)), "no step was done twice"


PLACES = """
import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
told = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"]
(folder / f"started-{os.getpid()}").write_text(" ".join(told))

import torch
import torch.distributed as dist

import stoker

ctx = stoker.init()
state = stoker.State(model=torch.nn.Linear(1, 1), worlds=0)


@stoker.elastic
def train(state):
    while True:
        enough = torch.tensor([(folder / "enough").exists()], dtype=torch.int)
        dist.all_reduce(enough, dist.ReduceOp.MAX)
        time.sleep(0.02)
        state.commit()
        (folder / f"place-{os.getpid()}").write_text(f"{ctx.rank} {ctx.world_size}")
        if enough.item():
            return


train(state)
"""


def test_a_worker_is_told_the_rank_that_it_will_have(tmp_path: Path) -> None:
    """Of RANK 0 there is one, also among workers that come later: a script may do there what is to be done once."""
    (tmp_path / "places.py").write_text(PLACES)
    (tmp_path / "other").mkdir()
    flags = (
        *("run", "--nnodes", "1:2", "--nproc-per-node", "2", "--no-cache"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", str(tmp_path / "places.py"), str(tmp_path)),
    )

    def told(pid: int) -> str:
        path = tmp_path / f"started-{pid}"
        return path.read_text() if path.exists() else ""

    def newest(command: Stoker, before: set[int]) -> int:
        wait_for(lambda: {w.pid for w in command.workers()} - before, why="a replacement")
        return ({w.pid for w in command.workers()} - before).pop()

    def trains(pid: int, place: str) -> bool:
        path = tmp_path / f"place-{pid}"
        return path.exists() and path.read_text() == place

    first = Stoker(tmp_path, *flags)
    wait_for(lambda: len(list(tmp_path.glob("place-*"))) == 2, why="a world of two")
    second = Stoker(tmp_path / "other", *flags, environment={"XDG_RUNTIME_DIR": str(tmp_path / "runtime")})
    wait_for(lambda: len(list(tmp_path.glob("place-*"))) == 4, why="a world of four")
    assert sorted(told(w.pid) for w in second.workers()) == ["2 4 1", "3 4 1"]
    for command, place in ((second, "2 4"), (first, "0 4")):
        before = {w.pid: w for w in command.workers()}
        victim = next(pid for pid in before if told(pid).startswith(place[0]))
        os.kill(victim, signal.SIGKILL)
        replacement = newest(command, set(before))
        wait_for(lambda pid=replacement, place=place: trains(pid, place), why=f"place {place} taken")  # type: ignore[misc]
        assert told(replacement).startswith(place)
    (tmp_path / "enough").touch()
    done, also = first.finish(), second.finish()
    assert (done.code, also.code) == (0, 0), done.text + also.text


TRACE = """
import ctypes, os, sys

ATTACH, ALL_THREADS = 16, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    if libc.ptrace(ATTACH, int(thread), None, None) != 0:
        sys.exit(print(os.strerror(ctypes.get_errno())))
print("attached", flush=True)
try:
    while True:
        os.waitpid(-1, ALL_THREADS)
except ChildProcessError:  # whoever was attached has ended
    pass
"""
"""Stops a process as debuggers do: it is in state t, and its parent is not told."""


def test_stopped_workers_cost_the_beat_timeout(tmp_path: Path) -> None:
    """One by a signal, of which its agent hears at once; one by a debugger, which only beats that stop tell of."""
    job = Stoker(tmp_path, "run", "--nproc-per-node", "3", "--timeout", "60s", "--audit", TOY, "--out", ".",
                 "--epochs", "12", "--step-s", "0.05")  # fmt: skip
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 15, why="commits")
    _, by_signal, by_debugger = job.workers()
    with subprocess.Popen(
        [sys.executable, "-c", TRACE, str(by_debugger.pid)], stdout=subprocess.PIPE, text=True
    ) as debugger:
        assert debugger.stdout is not None
        if (word := debugger.stdout.readline()) != "attached\n":
            kill_all(job)
            pytest.skip(f"no process can be traced here: {word}")
        before = max(e["step"] for e in ledger(tmp_path, "commit"))
        os.kill(by_signal.pid, signal.SIGSTOP)
        wait_for(
            lambda: max(e["step"] for e in ledger(tmp_path, "commit")) > before + 2,
            60,
            "progress without them",
        )
        assert debugger.wait(60) == 0
    done = job.finish()
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    (log,) = tmp_path.glob("stoker-logs/*/events.db")
    stopped = {e.details["worker"]: e.why for e in read_events(log) if e.kind == "worker-stopped"}
    assert stopped.keys() == {"worker-1", "worker-2"}
    assert all(is_by_beats(why) for why in stopped.values()), stopped


def test_loader_processes(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--max-restarts", "0", "--audit", TOY, "--out", ".",
               "--num-workers", "2", "--fail-at", "0:5:kill")  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err


def test_the_script_runs_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, TOY, "--out", str(tmp_path), "--step-s", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert said(tmp_path)[0]["world_size"] == 1
