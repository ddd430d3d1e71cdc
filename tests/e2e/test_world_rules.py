"""What scripts do when the world changes: rules for the learning rate, callbacks, a copy of one rank's state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.run_helpers import SCRIPTS, run, said

pytestmark = pytest.mark.real
RULES = str(SCRIPTS / "world_rules.py")


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_the_learning_rate_follows_the_world_on_every_worker(tmp_path: Path, restarts: str) -> None:
    done = run(
        tmp_path,
        "run",
        "--nproc-per-node",
        "3",
        "--max-restarts",
        restarts,
        "--no-cache",
        "--audit",
        RULES,
        str(2 + int(restarts)),
    )
    assert done.code == 0, done.text
    assert "records missed 0, repeated 0" in done.err
    workers = said(tmp_path)
    size = 2 + int(restarts)
    assert {w["size"] for w in workers} == {size}
    assert [w["lr"] for w in workers] == pytest.approx([0.001 * size] * size)
    assert len({str(w["weights"]) for w in workers}) == 1
    stayed = [w for w in workers if w["rules"][0] == [3, 0, 0]]
    assert len(stayed) == 2
    for worker in stayed:
        assert [rule[:2] for rule in worker["rules"][:2]] == [[3, 0], [2, 3]]
        assert worker["resets"][0] == 2
    assert all(worker["rules"][-1][2] >= 10 for worker in workers)
    for worker in workers:
        if worker not in stayed:
            assert worker["rules"] == [[3, 2, worker["rules"][0][2]]]
            assert worker["resets"] == [], "its first world"
