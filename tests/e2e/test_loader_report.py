"""Where the time of a loop went: each second is put where it was spent, and told at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.data.loader import Loader
from stoker.data.loader_report import Epoch, Report
from tests.e2e.cache_helpers import fill, wait_until_held
from tests.e2e.data_helpers import behind

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
SCRIPT = Path(__file__).with_name("report_script.py")
NAMES = [f"{number:03}.bin" for number in range(128)]


class Decode:
    """As views, in its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, data: bytes) -> Any:
        time.sleep(self.seconds)
        return np.frombuffer(data, np.uint8)


def looped(
    tmp_path: Path, workers: int, *, origin: str = "", decode_s: float = 0.0, step_s: float = 0.0
) -> Report:
    """Of two epochs."""
    fill(tmp_path / "origin", NAMES, 20_000)
    with behind(tmp_path, origin) as cache:
        data = cache.dataset(decode=Decode(decode_s))
        with Loader(data, global_batch_size=16, shuffle=True, num_workers=workers, name="train") as loader:
            for _ in range(2):
                for _ in loader:
                    time.sleep(step_s)
                wait_until_held(cache.client, len(NAMES))
            report = loader.report()
    for epoch in report.epochs:
        assert (epoch.steps, epoch.records, epoch.size_bytes) == (8, 128, 128 * 20_000)
        assert sum(epoch.waiting.values()) == pytest.approx(epoch.waited_s)
        assert epoch.computed_s + epoch.waited_s == pytest.approx(epoch.wall_s)
        assert epoch.computed_s >= 8 * step_s
    return report


def share(epoch: Epoch, cause: str) -> float:
    """Of what was waited for once all was started."""
    return epoch.settled()[cause] / (epoch.waited_s - epoch.waiting["starting_s"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_slow_origin_is_what_the_first_epoch_waits_for(tmp_path: Path, workers: int) -> None:
    report = looped(tmp_path, workers, origin="?stoker_mbps=3&stoker_latency_ms=5")
    cold, warm = report.epochs
    assert share(cold, "origin_s") > 0.7, report
    assert report.verdict.startswith("the origin was the limit: "), report
    assert "later epochs did not need it" in report.verdict
    assert cold.cache is not None
    assert cold.cache.origin_bytes >= 128 * 20_000
    assert 0.075e6 < cold.origin_bytes_per_s < 0.4e6, report  # 0.375 MB/s
    assert (warm.hit_ratio, warm.settled()["origin_s"]) == (1.0, 0.0), report


@pytest.mark.parametrize("workers", [0, 2])
def test_slow_decoding_is_what_every_epoch_waits_for(tmp_path: Path, workers: int) -> None:
    report = looped(tmp_path, workers, decode_s=0.04)
    for epoch in report.epochs:
        assert share(epoch, "decoding_s") > 0.7, report
    assert report.verdict.startswith("decoding was the limit"), report


def test_a_loop_that_is_slow_itself_waits_for_little(tmp_path: Path) -> None:
    report = looped(tmp_path, 2, step_s=0.6)
    warm = report.epochs[1]
    assert warm.waited_s < 0.2 * warm.wall_s, report


def finished(tmp_path: Path, how: str, **environment: str) -> subprocess.CompletedProcess[str]:
    fill(tmp_path / "origin", NAMES, 2000)
    url = f"file://{tmp_path}/origin/?stoker_mbps=2"
    return subprocess.run(
        [sys.executable, SCRIPT, url, how],
        cwd=tmp_path,
        env={**os.environ, "STOKER_CACHE_DIR": str(tmp_path / "cache"), "STOKER_REPORT": "1", **environment},
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )


def test_a_script_says_at_its_end_where_its_time_went(tmp_path: Path) -> None:
    ended = finished(tmp_path, "plain")
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    # What Python says of objects that are torn down late is not this report's.
    lines = ended.stderr.partition("stoker: ")[2].splitlines()
    assert lines[0].startswith("loader loader-0: 16 steps, 256 records, "), ended.stderr
    head = lines[1].split()
    assert head[:4] == ["epoch", "wall", "computed", "waited"]
    assert {"starting", "origin"} <= set(head), ended.stderr
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "all"], ended.stderr
    assert "256 KB" in lines[2], ended.stderr
    assert lines[3].endswith("100%"), ended.stderr
    assert lines[5].split(" was ")[0] in ("  the origin", "  starting"), ended.stderr


@pytest.mark.parametrize(
    ("how", "code", "reports"),
    [("off", 0, 0), ("raise", 1, 0), ("exit", 3, 1), ("told", 0, 0), ("left", 0, 1)],
)
def test_when_a_script_is_to_say_it(tmp_path: Path, how: str, code: int, reports: int) -> None:
    ended = finished(tmp_path, how)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("stoker: loader") == reports, ended.stderr
    assert ("LookupError: in the script" in ended.stderr) == (how == "raise")
    assert ended.stdout.count("loader loader-0: 16 steps") == (how == "told")


def test_the_environment_keeps_scripts_from_saying_it(tmp_path: Path) -> None:
    ended = finished(tmp_path, "plain", STOKER_REPORT="0")
    assert ended.returncode == 0
    assert "loader" not in ended.stderr
