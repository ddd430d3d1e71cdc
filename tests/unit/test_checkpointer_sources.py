"""Where a run goes on from: the newest of memory and storage."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.data.loader import Loader
from stoker.errors import EnvironmentProblem
from stoker.settings import worker_settings
from stoker.train.checkpoints.checkpointer import Checkpointer
from stoker.train.checkpoints.memory import MemorySlots
from stoker.train.checkpoints.storage import CheckpointStorage
from stoker.train.checkpoints.storage_port import Loaded, RunStorage
from tests.unit.checkpoint_states import flip
from tests.unit.checkpointer_runs import Numbers, begin_anew, finish, make, step, train_until
from tests.unit.snapshot_helpers import a_state, same
from tests.unit.snapshot_helpers import take as snapshot
from tests.unit.test_snapshot_slots import damage

pytestmark = pytest.mark.usefixtures("fresh_process", "node")


def test_a_run_goes_on_from_its_snapshot_as_if_nothing_had_happened(node: Path) -> None:
    """With the position in the data, and with the random generators of this rank."""

    def train(seed: int, *stops: int) -> tuple[list[int], dict[str, torch.Tensor], float, float]:
        seen: list[int] = []
        for turn, stop in enumerate(stops):
            begin_anew()
            random.seed(seed + turn)
            np.random.seed(seed + turn)
            state = make(seed + turn, checkpointer=Checkpointer(every_s=None, every_commits=3))
            loader = Loader(Numbers(), global_batch_size=4, shuffle=True, seed=1)
            part = train_until(state, loader, stop)
            kept = 4 * (stop // 3 * 3) if stop < stops[-1] else len(seen) + len(part)
            seen = (seen + part)[:kept]
        return seen, state.model.state_dict(), random.random(), float(np.random.rand())

    through = train(0, 10)
    for path in node.iterdir():
        path.unlink()
    again = train(0, 4, 8, 10)
    assert again[0] == through[0]
    assert same(dict(again[1]), dict(through[1]))
    assert again[2:] == through[2:]


def test_the_newest_of_memory_and_storage_is_taken(
    node: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "c"
    stored = RunStorage(str(folder), keep=2)

    def start() -> int:
        begin_anew()
        state = make(checkpointer=Checkpointer(str(folder), every_s=None, every_commits=3))
        state._runtime.steps.load_checkpoint(state)
        return state.commits

    begin_anew()
    state = make(checkpointer=Checkpointer(every_s=None, every_commits=3))
    state.seal()
    for _ in range(3):
        step(state)
        finish(state)
    assert start() == 3
    assert "state loaded from the snapshot of commit 3 in this node's memory" in caplog.text
    stored.save(2, state.export())
    assert start() == 3
    stored.save(7, state.export())
    assert start() == 7
    assert f"state loaded from the checkpoint of commit 7 in {folder}" in caplog.text
    (folder / "step-000000000007" / "manifest.json").write_bytes(b"broken")
    assert start() == 3
    (folder / "step-000000000002" / "manifest.json").write_bytes(b"broken")
    assert start() == 3, "one of memory is enough"
    assert "going on from this node's memory" in caplog.text
    damage(node / "0-0.snapshot")
    begin_anew()
    with pytest.raises(EnvironmentProblem, match="can be read"):
        Checkpointer(str(folder)).load_newest(lambda saved: None)


@pytest.mark.parametrize("saved", [0, 2, 7])
def test_snapshots_are_taken_while_a_storage_keeps_a_newcomer_waiting(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    """Whatever it is asked, and however long it takes: nobody waits for it but who asks."""
    url = str(tmp_path / "c")
    slots = MemorySlots(node, "run-1", 0)
    snapshot(slots, 3)
    for commits in range(1, saved + 1):
        RunStorage(url, 2).save(commits, a_state(float(commits)))
    asked: list[str] = []

    def slow(method: str) -> Any:
        real = getattr(CheckpointStorage, method)

        def answer(storage: CheckpointStorage, *args: Any, **more: Any) -> Any:
            asked.append(method)
            for _ in range(2):
                snapshot(slots, 3)
            return real(storage, *args, **more)

        return answer

    for method in ("newest", "read_newest"):
        monkeypatch.setattr(CheckpointStorage, method, slow(method))
    found: list[Loaded] = []
    checkpointer = Checkpointer(url)
    checkpointer.connect(worker_settings())
    checkpointer.load_newest(found.append)
    slots.close()
    assert [loaded.commits for loaded in found] == [max(3, saved)]
    assert ("read_newest" in asked) == (saved == 7)
    assert (slots.skipped, slots.failed) == (0, 0)


def test_where_what_a_storage_has_cannot_be_read_after_all_memory_is_enough(
    node: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its newest looks whole until its tensors are read."""
    slots = MemorySlots(node, "run-1", 0)
    snapshot(slots, 3)
    slots.close()
    RunStorage(str(tmp_path / "c"), 2).save(7, a_state(7.0))
    path = tmp_path / "c" / "step-000000000007" / "__0_0.distcp"
    flip(path, path.stat().st_size // 2)
    found: list[Loaded] = []
    checkpointer = Checkpointer(str(tmp_path / "c"))
    checkpointer.connect(worker_settings())
    checkpointer.load_newest(found.append)
    assert [loaded.commits for loaded in found] == [3]
    assert "going on from this node's memory" in caplog.text


def test_alone_the_folder_that_is_named_is_made_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_SNAPSHOT_DIR", str(tmp_path / "a" / "b"))
    for expected in (0, 2):
        begin_anew()
        state = make(checkpointer=Checkpointer(every_s=None, every_commits=1))
        state._runtime.steps.load_checkpoint(state)
        assert state.commits == expected
        for _ in range(2):
            step(state)
            finish(state)


def test_folders_by_url(tmp_path: Path) -> None:
    first, second = Checkpointer(f"file://{tmp_path}/a%20b").storage, Checkpointer("some/where").storage
    assert first is not None
    assert second is not None
    assert (first.folder, second.folder) == (tmp_path / "a b", Path.cwd() / "some/where")


def test_more_checkpoints_are_kept_where_asked_for(tmp_path: Path, node: Path) -> None:
    state = make(checkpointer=Checkpointer(str(tmp_path / "c"), every_s=None, every_commits=1, keep=3))
    state.seal()
    for _ in range(5):
        step(state)
    assert len([*(tmp_path / "c").iterdir()]) == 3
