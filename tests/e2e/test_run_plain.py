"""Unmodified torchrun scripts under `stoker run`, and how runs end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from stoker.cli.job_events import read_events
from tests.e2e.run_helpers import PLAIN, TOY, Stoker, alive, free_port, ledger, run, wait_for

pytestmark = pytest.mark.real


def test_a_torchrun_script_runs_unmodified(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc_per_node", "3", "--standalone", PLAIN)
    assert done.code == 0, done.text
    for rank in range(3):
        line = (
            f"[rank {rank}] sum 6 RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 GROUP_RANK=0"
        )
        assert line in done.out, done.text


def test_two_agents_run_a_torchrun_script(tmp_path: Path) -> None:
    """The one that is not to host the master comes first, and waits for it."""
    where = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--no-cache")
    shared = {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    (tmp_path / "runtime").mkdir(mode=0o700)

    def start(node_rank: str) -> Stoker:
        folder = tmp_path / node_rank
        folder.mkdir()
        flags = ("run", "--nnodes", "2", "--node-rank", node_rank, "--timeout", "60s", *where)
        return Stoker(folder, *flags, PLAIN, environment=shared)

    second = start("1")
    assert second.process.stderr is not None
    said = iter(second.process.stderr.readline, "")
    assert any("waiting for the master: " in line for line in said), "it has ended"
    done = [job.finish() for job in (start("0"), second)]
    assert [d.code for d in done] == [0, 0], done[0].text + done[1].text
    assert "[rank 0] sum 3 RANK=0 LOCAL_RANK=0 WORLD_SIZE=2" in done[0].out
    assert "[rank 1] sum 3 RANK=1 LOCAL_RANK=0 WORLD_SIZE=2" in done[1].out


def test_one_worker_per_processor_that_this_run_may_use(tmp_path: Path) -> None:
    core = str(min(os.sched_getaffinity(0)))
    done = Stoker(
        tmp_path,
        "run",
        "--no-cache",
        "--nproc-per-node",
        "cpu",
        PLAIN,
        prefix=("taskset", "--cpu-list", core),
    ).finish()
    assert done.code == 0, done.text
    assert "WORLD_SIZE=1 LOCAL_WORLD_SIZE=1" in done.out


def test_max_restarts_restarts_every_worker(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--max-restarts", "1", PLAIN, "--fail-first")
    assert done.code == 0, done.text
    assert "[rank 0] sum 3" in done.out
    assert "TORCHELASTIC_RESTART_COUNT=1" in done.out


def test_without_restarts_the_first_error_is_what_one_sees(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "-m", "tests.scripts.plain_torchrun", "--fail-first",
               PYTHONPATH=str(Path(__file__).parents[2]))  # fmt: skip
    # A thread of torch's own sometimes ends an interpreter that has said its last word by SIGABRT.
    is_aborted = "terminate called without an active exception" in done.text
    assert done.code == 1 or (is_aborted and done.code == 134), done.text
    tail = done.err[done.err.rindex("Traceback") :]
    assert "RuntimeError: the first attempt fails" in tail
    assert "the run failed: rank 1" in tail


def test_an_elastic_script_that_raises_stops_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "3", TOY, "--fail-at", "1:4:raise")
    assert done.code == 1, done.text
    tail = done.err[done.err.rindex("Traceback") :]
    assert "ValueError: this script is wrong" in tail
    assert "the run failed: rank 1" in tail


def test_the_exit_code_is_the_scripts_own(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", TOY, "--fail-at", "0:4:exit7")
    assert done.code == 7, done.text


def test_output_is_kept_in_files_and_redirects_hide_it(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--redirects", "1:3", "--log-dir", "logs", PLAIN)
    assert done.code == 0, done.text
    assert "[rank 0] sum" in done.out
    assert "[rank 1] sum" not in done.out
    kept = [p.read_text() for p in sorted(tmp_path.glob("logs/*/*/worker-*/stdout.log"))]
    assert len(kept) == 2
    assert all("sum 3" in text for text in kept)


def test_ctrl_c_ends_everything_in_seconds(tmp_path: Path) -> None:
    job = Stoker(
        tmp_path, "run", "--nproc-per-node", "3", "--audit", TOY, "--epochs", "1000", "--num-workers", "1"
    )
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 5, why="commits")
    import psutil

    pids = [p.pid for p in psutil.Process(job.process.pid).children(recursive=True)]
    assert len(pids) >= 7, "three workers, their loader processes, the cache"
    began = time.monotonic()
    job.interrupt(signal.SIGINT)
    done = job.finish()
    assert done.code == 130, done.text
    assert time.monotonic() - began < 25, "not the time that scripts have to save their work"
    assert wait_for(lambda: not alive(pids), why="end of all processes")
    assert "Traceback" not in done.err, done.text


def test_a_killed_agent_takes_its_workers_with_it(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "2", "--audit", TOY, "--epochs", "1000")
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 5, why="commits")
    import psutil

    pids = [p.pid for p in psutil.Process(job.process.pid).children(recursive=True)]
    job.process.kill()
    job.finish()
    assert wait_for(lambda: not alive(pids), why="end of all processes")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["no_such.py"], 2, "there is no script 'no_such.py'"),
        (["--nnodes", "3:2", PLAIN], 2, "MIN must be at least 1 and at most MAX"),
        (["--nproc-per-node", "0", PLAIN], 2, "--nproc-per-node '0'"),
        (["--nproc-per-node", "gpu", PLAIN], 2, "no GPU"),
        (["--timeout", "soon", PLAIN], 2, "'soon' is not a duration"),
        (["--tee", "9", PLAIN], 2, "--tee '9'"),
        (["--bucket", "fashion", PLAIN], 2, "write NAME=ORIGIN_URL"),
        (["--rdzv-endpoint", "host:port", PLAIN], 2, "write HOST:PORT"),
        (["--nnodes", "1:2", "--rdzv-endpoint", "0.0.0.0:29999", PLAIN], 2, "export STOKER_JOB_TOKEN="),
        (["--job-token-file", "absent", PLAIN], 2, "--job-token-file absent"),
    ],
)
def test_wrong_usage_gets_one_clear_message(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    done = run(tmp_path, "run", *arguments, timeout_s=60)
    assert done.code == code, done.text
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_script_that_raises_at_import(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import stoker\nimport no_such_module\n")
    done = run(tmp_path, "run", "--nproc-per-node", "2", "broken.py")
    assert done.code == 1, done.text
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.err[done.err.rindex("Traceback") :]


def test_a_port_in_use_by_something_else(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(tmp_path, "run", "--rdzv-endpoint", f"127.0.0.1:{port}", PLAIN, timeout_s=60)
    assert done.code == 5, done.text
    assert f"cannot listen on 127.0.0.1:{port}" in done.err
    assert "--rdzv-endpoint" in done.err


def test_a_world_that_stays_under_the_minimum_gives_up_in_time(tmp_path: Path) -> None:
    where = f"127.0.0.1:{free_port()}"
    done = run(tmp_path, "run", "--nnodes", "2", "--rdzv-endpoint", where, "--timeout", "8s", PLAIN)
    assert done.code == 3, done.text
    assert "waiting for nodes: 1 of at least 2 are here; giving up after 8 s" in done.err
    assert "only 1 of at least 2 nodes" in done.err
    (log,) = tmp_path.glob("stoker-logs/*/events.db")
    at = {event.kind: event.wall_s for event in read_events(log)}
    # A master that stood still for a moment begins to count anew.
    assert 8.0 <= at["ended"] - at["waiting"] < 30.0


def test_no_master_at_the_endpoint(tmp_path: Path) -> None:
    where = f"127.0.0.1:{free_port()}"
    flags = ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", where, "--timeout", "2s")
    done = run(tmp_path, "run", *flags, PLAIN)
    assert done.code == 3, done.text
    assert f"no master answers at {where}" in done.err


def test_another_jobs_master_refuses(tmp_path: Path) -> None:
    flags = ("run", "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--no-cache")
    first = Stoker(tmp_path, *flags, "--rdzv-id", "one", "--audit", TOY, "--epochs", "1000")
    wait_for(lambda: ledger(tmp_path, "commit"), why="commits")
    other = tmp_path / "other"
    other.mkdir()
    shared = {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    second = Stoker(other, *flags, "--rdzv-id", "two", TOY, environment=shared).finish()
    wrong = Stoker(other, *flags, TOY, environment={**shared, "STOKER_JOB_TOKEN": "guessed"}).finish()
    first.interrupt()
    assert first.finish().code == 130
    assert "wants job 'two'" in second.err, second.text
    assert second.code == 1
    assert "refuses the job token" in wrong.err, wrong.text


def test_the_event_log_tells_the_story(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--max-restarts", "0", TOY, "--fail-at", "1:4:kill")
    assert done.code == 0, done.text
    import sqlite3

    (path,) = tmp_path.glob("stoker-logs/*/events.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT kind, why, details FROM entry ORDER BY seq").fetchall()
    database.close()
    kinds = [kind for kind, _, _ in rows]
    assert kinds.count("world") == 2
    assert "worker-shrink" in kinds
    assert kinds[-1] in ("ended", "node-lost")
    worlds = [json.loads(details)["workers"] for kind, _, details in rows if kind == "world"]
    assert worlds == [["worker-0", "worker-1"], ["worker-0"]]
    assert os.environ.get("RANK") is None
