"""Loaders in worlds that other frameworks make: each process reads its share, all of them every record once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.framework_helpers import BATCH, RECORDS, noted

pytestmark = pytest.mark.real
HERE = Path(__file__).parent
HANG_S = 200


def launch(folder: Path, script: str, *arguments: str, processes: int = 0) -> tuple[int, str]:
    """Exit code and errors. By torchrun where it is to start several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    child = subprocess.Popen(
        [sys.executable, *(torchrun if processes else []), str(HERE / script), *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = child.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return child.returncode, errors


def run(folder: Path, script: str, *arguments: str, processes: int = 0) -> None:
    code, errors = launch(folder, script, *arguments, processes=processes)
    assert code == 0, errors


def assert_read(folder: Path, what: str, records: Counter[int], ranks: int = 2) -> None:
    """All ranks together have read exactly these, and each its share."""
    reads = [noted(folder, rank).get(what, Counter()) for rank in range(ranks)]
    assert sum(reads, Counter()) == records
    assert max(one.total() for one in reads) <= records.total() / ranks * 1.1


EACH = Counter(range(RECORDS))
THREE_EPOCHS = Counter(dict.fromkeys(range(RECORDS), 3))


def test_lightning(tmp_path: Path) -> None:
    """Starts the second process itself; is stopped in the second epoch, and goes on under torchrun."""
    run(tmp_path, "framework_lightning.py")
    run(tmp_path, "framework_lightning.py", "resume", processes=2)
    assert_read(tmp_path, "train", THREE_EPOCHS)
    for epoch in range(3):
        assert_read(tmp_path, f"validate {epoch}", EACH)
    assert_read(tmp_path, "sanity", Counter(range(2 * BATCH)))


def test_trainer_of_hugging_face(tmp_path: Path) -> None:
    run(tmp_path, "framework_trainer.py", processes=2)
    code, errors = launch(tmp_path, "framework_trainer.py", "resume", "skip", processes=2)
    assert code != 0, "Trainer would have read other records than were left"
    assert "ignore_data_skip=True" in errors
    run(tmp_path, "framework_trainer.py", "resume", processes=2)
    assert_read(tmp_path, "train", THREE_EPOCHS)


def test_ddp_that_goes_on_in_a_larger_world(tmp_path: Path) -> None:
    run(tmp_path, "framework_ddp.py", "15", processes=2)
    run(tmp_path, "framework_ddp.py", "24", "resume", processes=3)
    assert len(list(tmp_path.glob("ended-*-of-3"))) == 3
    reads = [noted(tmp_path, rank)["train"] for rank in range(3)]
    assert sum(reads, Counter()) == THREE_EPOCHS
