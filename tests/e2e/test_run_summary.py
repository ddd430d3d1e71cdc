"""`stoker run` says at the end where the job's time went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.cache_helpers import fill
from tests.e2e.run_helpers import Stoker

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
SCRIPT = Path(__file__).with_name("summary_train.py")


def test_a_job_says_where_its_time_went(tmp_path: Path) -> None:
    fill(tmp_path / "origin", [f"{number:03}.bin" for number in range(128)], 20_000)
    url = f"file://{tmp_path}/origin/?stoker_mbps=2"
    run = Stoker(
        tmp_path,
        "run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(SCRIPT),
        url,
        environment={"STOKER_REPORT": "1"},
    )
    ended = run.finish(200)
    assert ended.code == 0, ended.err
    (line,) = (line for line in ended.err.splitlines() if " in all: " in line)
    assert "starting " in line, line
    assert "waiting for data " in line, line
    assert "the origin was the limit" in ended.err
    assert ended.err.count("stoker: loader train (rank ") == 1, ended.err
    assert "in its loops for data" not in ended.err  # a line of each rank is for the log
    asked = Stoker(tmp_path, "job", "summary", "--log-dir", "stoker-logs", "--json").finish(60)
    told = json.loads(asked.out)
    assert told["has_ended"]
    assert told["ranks"]["workers"] == 2
    assert told["ranks"]["records"] == 2 * 128
    ranks = told["ranks"]
    assert sum(ranks["waiting"].values()) == pytest.approx(ranks["waited_s"], abs=1e-4)
    assert ranks["waiting"]["origin_s"] > 0.6 * (ranks["waited_s"] - ranks["waiting"]["starting_s"]), told
    assert ranks["waited_s"] < told["training_s"] < told["total_s"]
