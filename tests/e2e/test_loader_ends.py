"""Loaders in whole processes: nothing hangs, and nothing is left behind, however a loop ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.cache_helpers import fill, served

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).with_name("loader_script.py")
HANG_S = 250
"""Sixteen processes that import PyTorch, beside much else, take their time."""


def start(folder: Path, *arguments: str, endpoint: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        cwd=folder,
        env={**os.environ, "STOKER_CACHE_ENDPOINT": endpoint} if endpoint else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and errors; a process that hangs is killed with all of its session, and fails the test."""
    try:
        out, errors = child.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return child.returncode, out, errors


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def assert_gone(pids: list[int]) -> None:
    until = time.monotonic() + HANG_S / 4
    while any(is_there(pid) for pid in pids):
        assert time.monotonic() < until, f"still there: {[pid for pid in pids if is_there(pid)]}"
        time.sleep(0.05)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exit", 3, ""),
        ("raise", 1, "LookupError: in the loop"),
        ("fall off", 0, ""),
        ("keep", 0, ""),
        ("hard exit", 4, ""),
    ],
)
def test_a_script_ends_in_the_middle_of_a_loop(
    tmp_path: Path, how: str, code: int, words: str, method: str
) -> None:
    ended, out, errors = finish(start(tmp_path, how, method, "2"))
    assert ended == code, errors
    assert (words in errors) if words else not errors
    pids = [int(word) for word in out.split()]
    assert len(pids) == 2
    assert_gone(pids)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_the_middle_of_a_loop(tmp_path: Path, number: signal.Signals, method: str) -> None:
    child = start(tmp_path, "go on", method, "3")
    assert child.stdout is not None
    pids = [int(word) for word in child.stdout.readline().split()]
    assert len(pids) == 3
    if number == signal.SIGINT:
        os.killpg(child.pid, number)  # as a terminal does
    else:
        child.send_signal(number)
    code, _, errors = finish(child)
    assert code == -number, errors
    assert errors.count("Traceback") == (1 if number == signal.SIGINT else 0), errors
    assert not (tmp_path / "finished").exists()
    assert_gone(pids)


@pytest.mark.parametrize(
    ("method", "workers"),
    [
        ("fork", 0),
        ("fork", 1),
        ("fork", 2),
        ("fork", 8),
        ("fork", 16),
        ("spawn", 3),
        ("forkserver", 2),
        ("spawn", 16),
    ],
)
@pytest.mark.parametrize("how", ["close", "leave"])
def test_records_are_read_beside_threads_by_a_client_that_was_used(
    tmp_path: Path, method: str, workers: int, how: str
) -> None:
    if how == "leave" and workers not in (2, 3):
        pytest.skip("as with two")
    (tmp_path / "data").mkdir()
    fill(tmp_path / "data", [f"{n:03}" for n in range(300)], 20_000)
    with served(tmp_path / "cache", {"b": str(tmp_path / "data")}) as cache:
        child = start(tmp_path, how, method, str(workers), "stoker://b/", endpoint=cache.url)
        code, out, errors = finish(child)
    assert (code, errors) == (0, ""), errors
    assert "read all" in out
