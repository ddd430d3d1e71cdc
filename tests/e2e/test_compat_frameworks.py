"""Lightning and Hugging Face go on in the same processes when a worker dies and another one joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.framework_helpers import RECORDS
from tests.e2e.run_helpers import Finished, ledger, run

pytestmark = pytest.mark.real
HERE = Path(__file__).parent
STEPS_AN_EPOCH = 6
LAST_STEP = 8
"""Of the first world."""


def with_tests(folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }


def alone(folder: Path, script: str, *arguments: str) -> Any:
    """Run a script without Stoker's agent, to its end; what it said."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        cwd=folder,
        env={**os.environ, **with_tests(folder), "STOKER_REPORT": "0"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "said-0.json").read_text())


def run_and_lose_one(folder: Path, script: str) -> tuple[Finished, list[dict[str, Any]]]:
    """Three workers, of which the script kills one; what each said at its end, by rank."""
    done = run(folder, "run", "--nproc-per-node", "3", "--no-cache", "--audit", str(HERE / script),
               timeout_s=250, **with_tests(folder))  # fmt: skip
    assert done.code == 0, done.text
    said = [json.loads(path.read_text()) for path in sorted(folder.glob("said-*.json"))]
    assert [one["rank"] for one in said] == [0, 1, 2], done.text
    return done, said


def assert_went_on(folder: Path, done: Finished, said: list[dict[str, Any]], *, lost: int) -> None:
    """In the same processes but for the lost one's, with one state, and with every record read once an epoch."""
    first, *_, last = ledger(folder, "world")
    assert (first["world_size"], last["world_size"]) == (3, 3)
    assert {entry["world_size"] for entry in ledger(folder, "world")} == {3, 2}
    began = {int(path.name.removeprefix("began-")) for path in folder.glob("began-*")}
    assert len(began) == 3
    assert len(began & {one["pid"] for one in said}) == 2, "survivors keep their processes"
    for name in set(said[0]) - {"pid", "rank"}:
        assert all(one[name] == said[0][name] for one in said), name
    assert said[0]["global_step"] == said[0]["epochs"] * STEPS_AN_EPOCH
    assert "records missed 0, repeated 0" in done.err
    reads = [entry for entry in ledger(folder, "read") if entry["dataset"] == "train"]
    committed = {(entry["step"], entry["generation"]) for entry in ledger(folder, "commit")}
    counted = [
        r for entry in reads if (entry["step"], entry["generation"]) in committed for r in entry["records"]
    ]
    assert sorted(counted) == sorted(list(range(RECORDS)) * said[0]["epochs"])
    assert min(entry["commits"] for entry in ledger(folder, "world") if entry["generation"] > 1) >= lost


def test_lightning_goes_on_when_rank_0_dies_and_another_joins(tmp_path: Path) -> None:
    done, said = run_and_lose_one(tmp_path, "elastic_lightning.py")
    assert_went_on(tmp_path, done, said, lost=LAST_STEP)
    epochs = said[0]["epochs"]
    assert said[0]["learning_rate"] == pytest.approx(0.01 * 0.99 ** (epochs // 5))
    assert said[0]["checkpoint_step"] == said[0]["global_step"] // 7 * 7, (
        "the newest rank 0 writes checkpoints"
    )


def test_lightning_alone_trains_as_lightning_does(tmp_path: Path) -> None:
    elastic = alone(tmp_path, "elastic_lightning.py", "2")
    own = alone(tmp_path, "elastic_lightning.py", "2", "auto")
    assert {**elastic, "pid": 0} == {**own, "pid": 0}
