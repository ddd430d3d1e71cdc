"""Every example runs as its first lines say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.run_helpers import run

pytestmark = pytest.mark.real
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["01-train-alone.py", "02-read-through-the-cache.py"])
def test_alone(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        env={**os.environ, "STOKER_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 3: loss" in done.stdout


@pytest.mark.parametrize("name", ["04-lightning.py", "05-hugging-face-trainer.py"])
def test_frameworks_read_every_record_once_an_epoch(tmp_path: Path, name: str) -> None:
    """Also where a run is taken up again in the middle of an epoch."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        env={**os.environ, "STOKER_CACHE_DIR": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "each read {3} times in 3 epochs" in done.stdout


def test_elastic(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", str(EXAMPLES / "01-train-alone.py"))
    assert done.code == 0, done.text
    assert "[rank 0] epoch 5: loss" in done.out
    assert "world of 2" in done.out


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
def test_keras(tmp_path: Path) -> None:
    """It takes many seconds of a busy machine's time to import."""
    done = run(tmp_path, "run", "--nproc-per-node", "2", str(EXAMPLES / "10-keras.py"), timeout_s=240)
    assert done.code == 0, done.text
    assert "[rank 0] epoch 5: loss" in done.out
    assert "world of 2" in done.out


def test_torchrun_script(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "run",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        str(EXAMPLES / "03-torchrun-script.py"),
    )
    assert done.code == 0, done.text
    assert "with 2 workers" in done.out


def test_workers_of_uneven_speed_share_a_dataset(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "3", str(EXAMPLES / "06-sharded-dataset.py"))
    assert done.code == 0, done.text
    read = {int(w): int(n) for w, n in re.findall(r"worker (\d) has read (\d+) of 3000 records", done.out)}
    assert (sorted(read), sum(read.values())) == ([0, 1, 2], 3000)
    assert read[2] < read[0]


ELASTIC = ["08-lightning-elastic.py", "09-hugging-face-elastic.py"]


@pytest.mark.parametrize("name", ELASTIC)
def test_frameworks_train_alone(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        env={**os.environ, "STOKER_CACHE_DIR": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 3: step 48, world of 1" in done.stdout


@pytest.mark.parametrize("name", ELASTIC)
def test_frameworks_lose_a_worker_and_go_on(tmp_path: Path, name: str) -> None:
    done = run(
        tmp_path,
        "run",
        "--nproc-per-node",
        "3",
        "--no-cache",
        "--audit",
        str(EXAMPLES / name),
        "--lose-one",
        timeout_s=200,
        HF_HUB_OFFLINE="1",
    )
    assert done.code == 0, done.text
    assert "epoch 1: step 16, world of 3" in done.out
    assert "[rank 0] epoch 3: step 48, world of" in done.out
    assert "was killed by SIGKILL" in done.err
    assert "48 steps in" in done.err
    assert "records missed 0, repeated 0" in done.err


def test_an_elastic_horovod_script(tmp_path: Path) -> None:
    script = str(EXAMPLES / "07-horovod-elastic.py")
    done = run(tmp_path, "run", "--horovod", "--nproc-per-node", "2", script)
    assert done.code == 0, done.text
    assert re.search(r"\[rank 0\] epoch 2: loss [\d.]+ with 2 workers", done.out)


def test_every_example_is_run() -> None:
    text = Path(__file__).read_text()
    assert all(path.name in text for path in EXAMPLES.glob("*.py"))
