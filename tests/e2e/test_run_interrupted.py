"""Ctrl-C at awkward moments: twice in a row, and before the command has begun."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.run_helpers import TOY, Stoker, free_port, ledger, own_environment, wait_for

pytestmark = pytest.mark.real


@pytest.mark.parametrize("pause_s", [0.02, 0.3])
def test_a_second_ctrl_c_ends_it_at_once_and_says_no_more(tmp_path: Path, pause_s: float) -> None:
    job = Stoker(
        tmp_path, "run", "--no-cache", "--audit", TOY, "--out", ".", "--epochs", "99", "--step-s", "2"
    )
    wait_for(lambda: ledger(tmp_path, "read"), why="work")
    job.interrupt(signal.SIGINT)
    time.sleep(pause_s)
    job.interrupt(signal.SIGINT)
    done = job.finish()
    assert done.code == 130, done.text
    assert "Traceback" not in done.err, done.text


def test_two_ctrl_c_while_no_master_answers(tmp_path: Path) -> None:
    job = Stoker(tmp_path, "run", "--no-cache", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint",
                 f"127.0.0.1:{free_port()}", TOY)  # fmt: skip
    wait_for(lambda: list(tmp_path.glob("stoker-logs/*/events.db")), why="a master")
    master = wait_for(job.master, why="master")
    master.suspend()
    job.interrupt(signal.SIGINT)
    time.sleep(0.1)
    job.interrupt(signal.SIGINT)
    done = job.finish()
    assert done.code == 130, done.text
    assert "Traceback" not in done.err, done.text


def test_ctrl_c_while_python_still_imports(tmp_path: Path) -> None:
    with subprocess.Popen(
        # As the installed command: with -m, Python 3.11 forgets an exit code after an interrupted `exec` of a string.
        [
            sys.executable,
            "-X",
            "importtime",
            str(Path(sys.executable).with_name("stoker")),
            "run",
            "--no-cache",
            TOY,
        ],
        cwd=tmp_path,
        env=own_environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stderr is not None
        # It waits until it is read, and so has not imported much more than is read here.
        fcntl.fcntl(job.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        for line in job.stderr:
            if line.endswith(" msgspec\n"):
                break
        job.send_signal(signal.SIGINT)
        rest = job.stderr.read()
        code = job.wait(60)
    assert "Traceback" not in rest
    assert (code, rest.splitlines()[-1]) == (130, "stoker: interrupted")


@pytest.mark.parametrize(("flags", "saved"), [((), True), (("--shutdown-timeout", "1s"), False)])
def test_a_script_has_the_time_to_save_its_work(tmp_path: Path, flags: tuple[str, ...], saved: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(6.5)\n"
        "    pathlib.Path('saved').touch()\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path('began').touch()\n"
        "time.sleep(60)\n"
    )
    job = Stoker(tmp_path, "run", "--no-cache", *flags, str(script))
    wait_for((tmp_path / "began").exists, why="the script")
    job.interrupt(signal.SIGTERM)
    done = job.finish()
    assert done.code == 143, done.text
    assert (tmp_path / "saved").exists() == saved, done.text
