"""`stoker demo`, as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.real
SHORT = ["--dataset", "digits", "--json", "--timeout", "60"]


def demo(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stoker.cli.main", "demo", "--dir", str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def last_object(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


class Sources(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {value}" for name, value in attrs if name in ("src", "href", "data")]


def test_a_killed_worker_costs_no_record(tmp_path: Path) -> None:
    done = demo(tmp_path / "d d", *SHORT, "--epochs", "18")
    assert done.returncode == 0, done.stderr
    found = last_object(done)
    assert found["ok"]
    assert (found["records_missed"], found["records_repeated"]) == (0, 0)
    assert found["accuracy"] > 0.8
    assert found["origin_bytes_ratio"] == 1.0
    assert 0 < found["recovery_s"] < 30
    assert found["steps_lost"] <= 1
    assert found["surviving_pids_unchanged"]
    assert found["killed_pid"] not in found["joined_pids"]
    assert found["joined"] == bool(found["joined_pids"]) == (found["generations"] >= 3)
    assert "SIGKILL" in done.stderr
    page = Path(found["report"]).read_text()
    sources = Sources()
    sources.feed(page)
    assert sources.found == []
    assert "$" not in page
    assert (tmp_path / "d d" / "report.html").read_text() == page
    assert not (tmp_path / "d d" / "cache").exists()


def test_undisturbed_and_on_a_kept_cache_nothing_is_read_from_the_origin_again(tmp_path: Path) -> None:
    flags = [*SHORT, "--no-kill", "--epochs", "1", "--workers", "2", "--origin-mbps", "100", "--keep-cache"]
    first, second = last_object(demo(tmp_path, *flags)), last_object(demo(tmp_path, *flags))
    assert first["ok"]
    assert second["ok"]
    assert (first["recovery_s"], first["killed_pid"], first["generations"]) == (None, None, 1)
    assert (first["origin_bytes_ratio"], first["cache_cold"]) == (1.0, True)
    assert (second["origin_bytes_ratio"], second["cache_cold"]) == (0.0, False)


def test_ctrl_c_ends_everything_in_seconds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stoker.cli.main", "demo", "--dir", str(tmp_path), "--dataset", "digits"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as running:
        try:
            assert running.stdout is not None
            while b"worker-2 starts" not in running.stdout.readline():
                assert running.poll() is None
            children = psutil.Process(running.pid).children(recursive=True)
            began_s = time.monotonic()
            os.kill(running.pid, signal.SIGINT)
            assert running.wait(timeout=60) == 130
            assert time.monotonic() - began_s < 25, "not the time that scripts have to save their work"
            _, left = psutil.wait_procs(children, timeout=30)
            assert left == []
        finally:
            running.kill()


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = demo(tmp_path, "--dataset", "digits")
    assert done.returncode == 5
    assert "another demo is using" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_flags_are_refused(tmp_path: Path) -> None:
    done = demo(tmp_path, "--workers", "9")
    assert done.returncode == 2
    assert "--workers 9" in done.stderr
