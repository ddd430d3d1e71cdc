"""`stoker run` itself is stopped, interrupted, or loses its console."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.run_helpers import TOY, UNTIL_TOLD, Stoker, end_toy, free_port, kill_all, ledger, wait_for

pytestmark = pytest.mark.real


def alone(call: str) -> tuple[str, ...]:
    """A prefix that has the command in a process group, or a session, of its own."""
    return (sys.executable, "-c", f"import os, sys; {call}; os.execv(sys.argv[1], sys.argv[1:])")


BETWEEN_STEPS = ("--hold", "go", "--hold-at", "10")
"""All workers wait for the file there. Who is stopped in a collective for longer than that may wait leaves it as broken
once it goes on, and the step is done again."""


def wait_until_between_steps(folder: Path) -> None:
    """Until both have the records of the step that waits."""
    wait_for(lambda: [e["step"] for e in ledger(folder, "read")].count(11) == 2, why="wait between two steps")


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_a_run_that_was_stopped_for_long_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z, then fg: the master's own absence is no sign that its node is gone."""
    job = Stoker(tmp_path, "run", "--no-cache", "--nproc-per-node", "2", "--timeout", "10s", "--audit", TOY,
                 "--out", ".", "--step-s", "0.05", *UNTIL_TOLD)  # fmt: skip
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 10, why="commits")
    job.interrupt(signal.SIGSTOP)
    time.sleep(7)
    job.interrupt(signal.SIGCONT)
    end_toy(tmp_path)
    done = job.finish()
    assert done.code == 0, done.text
    assert "generation 2" not in done.err, done.text


def test_ctrl_z_stops_all_of_it_and_it_goes_on(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--no-cache", "--nproc-per-node", "2", "--timeout", "8s", "--audit", TOY,
                 "--out", ".", *BETWEEN_STEPS, prefix=alone("os.setpgid(0, 0)"))  # fmt: skip
    wait_until_between_steps(tmp_path)
    processes = [psutil.Process(job.process.pid), job.master(), *job.workers()]
    job.interrupt(signal.SIGTSTP)
    wait_for(lambda: {p.status() for p in processes} == {psutil.STATUS_STOPPED}, why="stop of everything")
    time.sleep(10)
    job.interrupt(signal.SIGCONT)
    (tmp_path / "go").touch()
    done = job.finish()
    assert done.code == 0, done.text
    assert "in 1 generations, 0 done again; records missed 0, repeated 0" in done.err, done.text


def test_ctrl_z_where_no_shell_could_let_it_go_on(tmp_path: Path) -> None:
    """As after `ssh -t host stoker run …`."""
    job = Stoker(tmp_path, "run", "--no-cache", "--nproc-per-node", "2", "--timeout", "30s", "--audit", TOY,
                 "--out", ".", *BETWEEN_STEPS, prefix=alone("os.setsid()"))  # fmt: skip
    wait_until_between_steps(tmp_path)
    for _ in range(2):
        job.interrupt(signal.SIGTSTP)
        time.sleep(0.5)
    (tmp_path / "go").touch()
    done = job.finish()
    assert done.code == 0, done.text
    assert "in 1 generations, 0 done again; records missed 0, repeated 0" in done.err, done.text


def test_a_node_that_was_given_up_as_silent_comes_back_as_a_new_one(tmp_path: Path) -> None:
    flags = ("run", "--no-cache", "--nnodes", "1:2", "--timeout", "20s", "--rdzv-endpoint",
             f"127.0.0.1:{free_port()}")  # fmt: skip
    other = tmp_path / "other"
    other.mkdir()
    script = (TOY, "--out", ".", "--last-epoch", str(tmp_path / "last-epoch"), "--step-s", "0.05")
    first = Stoker(tmp_path, *flags, "--audit", *script)

    def sizes() -> list[int]:
        return [e["world_size"] for e in ledger(tmp_path, "world")]

    wait_for(lambda: sizes() == [1], why="world of one")
    second = Stoker(other, *flags, *script, environment={"XDG_RUNTIME_DIR": str(tmp_path / "runtime")})
    wait_for(lambda: sizes()[-1:] == [2], why="world of two")
    second.interrupt(signal.SIGSTOP)
    wait_for(lambda: sizes()[-1:] == [1], why="world without it")
    second.interrupt(signal.SIGCONT)
    wait_for(lambda: sizes()[-1:] == [2], why="world with it")
    end_toy(tmp_path)
    assert first.finish().code == 0
    assert second.finish().code == 0


def test_a_node_whose_master_falls_silent_gives_up_in_time(tmp_path: Path) -> None:
    timeout_s = 15.0
    flags = (
        "run",
        "--no-cache",
        "--nnodes",
        "2",
        "--timeout",
        f"{timeout_s}s",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
    )
    other = tmp_path / "other"
    other.mkdir()
    first = Stoker(tmp_path, *flags, "--audit", TOY, "--epochs", "9999")
    wait_for(lambda: list(tmp_path.glob("stoker-logs/*/events.db")), why="master")
    second = Stoker(
        other, *flags, TOY, "--epochs", "9999", environment={"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    )
    try:
        wait_for(lambda: len(ledger(tmp_path, "commit")) > 10, why="commits")
        first.master().suspend()
        stopped_at = time.time()
        wait_for(lambda: not second.workers(), why="end of its workers")
        assert time.time() - stopped_at < 2 * timeout_s
        done = second.finish()
        assert done.code == 3, done.text
        assert "no master answers" in done.err or "does not answer" in done.err
    finally:
        kill_all(first)


def test_ctrl_c_while_there_is_no_master(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--no-cache", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint",
                 f"127.0.0.1:{free_port()}", TOY)  # fmt: skip
    wait_for(lambda: catches(job.process.pid, signal.SIGTERM), why="a command that has begun")
    time.sleep(0.5)
    job.interrupt()
    assert "left the job" in job.finish().err


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for this signal."""
    (line,) = [found for found in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in found]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_console_that_goes_away_costs_no_more_than_its_lines(tmp_path: Path) -> None:
    text = (
        "import os, sys, time\nprint(1)\nwhile not os.path.exists('gone'): time.sleep(0.01)\n"
        "print(2)\nsys.stdout.write('the end')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "stoker.cli.main", "run", "--no-cache", script(tmp_path, text)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        assert job.stdout.readline() == "[rank 0] 1\n"
        job.stdout.close()
        (tmp_path / "gone").touch()
        err = job.stderr.read()
        assert job.wait(60) == 0, err
    assert err.count("not shown any more") == 1, err
    assert "Traceback" not in err
    (kept,) = tmp_path.glob("stoker-logs/*/*/*/stdout.log")
    assert kept.read_text() == "1\n2\nthe end"


def test_a_grandchild_that_writes_for_ever_does_not_hold_the_run(tmp_path: Path) -> None:
    text = "import subprocess, time\nsubprocess.Popen(['setsid', 'yes'])\ntime.sleep(0.3)\n"
    job = Stoker(tmp_path, "run", "--no-cache", "--redirects", "3", script(tmp_path, text))
    assert job.finish().code == 0
