"""A worker dies in a backward pass, when an optimizer has stepped already: real processes, a real kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.run_helpers import SCRIPTS, run, said

pytestmark = pytest.mark.real
TWO_STEPS = str(SCRIPTS / "two_steps.py")


def test_with_undo_steps_only_the_step_in_flight_is_done_again(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "three").mkdir()
    alone = run(tmp_path / "alone", "run", "--nproc-per-node", "1", "--no-cache", TWO_STEPS)
    assert alone.code == 0, alone.text
    done = run(tmp_path / "three", "run", "--nproc-per-node", "3", "--max-restarts", "0", "--no-cache", "--audit",
               TWO_STEPS, "--fail-at", "1:7")  # fmt: skip
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    (undisturbed,) = said(tmp_path / "alone")
    workers = said(tmp_path / "three")
    assert [worker["worlds"] for worker in workers] == [[[3, 0], [2, 7]]] * 2
    assert len({str(worker["weights"]) for worker in workers}) == 1
    assert workers[0]["commits"] == undisturbed["commits"]
    for name, weights in workers[0]["weights"].items():
        assert weights == pytest.approx(undisturbed["weights"][name], abs=1e-3), name
