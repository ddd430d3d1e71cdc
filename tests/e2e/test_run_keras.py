"""Keras 3 on its torch backend under `stoker run`: real processes, real kills."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.run_helpers import SCRIPTS, Stoker, ledger, run, said, wait_for

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed"),
]
TOY = str(SCRIPTS / "keras_toy.py")
STEPS = 20
START_S = 240.0
"""Keras alone takes many seconds of a busy machine's time to be imported."""


@pytest.mark.parametrize("fit", ["", "own-step"])
def test_a_killed_worker_is_replaced_and_all_have_the_same_model(tmp_path: Path, fit: str) -> None:
    job = Stoker(tmp_path, "run", "--nproc-per-node", "2", "--audit", TOY, "--epochs", "15", "--fit", fit)
    wait_for(lambda: len(ledger(tmp_path, "commit")) > 20, START_S, why="commits")
    os.kill(job.workers()[1].pid, signal.SIGKILL)
    done = job.finish(START_S)
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    first, second = said(tmp_path)
    assert first["commits"] == second["commits"] == 15 * STEPS
    worlds = {e["generation"]: [] for e in ledger(tmp_path, "world")}  # type: ignore[var-annotated]
    for entry in ledger(tmp_path, "world"):
        worlds[entry["generation"]].append(entry["copied"])
    assert sorted(worlds[3]) == [False, True], "the newcomer copies"
    assert first["weights"] == second["weights"], "moving statistics included"
    assert first["slots"] == second["slots"]
    assert first["slots"][0] == 15 * STEPS, "Keras counts each step once"


def test_fit_with_keras_own_step_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--nproc-per-node", "2", "--max-restarts", "0", TOY, "--fit", "plain",
               timeout_s=START_S)  # fmt: skip
    assert done.code != 0
    assert "gradients of this worker alone" in done.err, done.text


def test_the_gradient_is_the_global_batch_mean(tmp_path: Path) -> None:
    """Where nothing is left to chance: two workers train what one does."""
    kernels: list[list[list[float]]] = []
    for size in ("1", "2"):
        folder = tmp_path / size
        folder.mkdir()
        done = run(folder, "run", "--nproc-per-node", size, TOY, "--epochs", "1", "--step-s", "0", "--linear",
                   timeout_s=START_S)  # fmt: skip
        assert done.code == 0, done.text
        kernels.append([np.ravel(one).tolist() for one in said(folder)[0]["weights"]])
    for one, other in zip(*kernels, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
