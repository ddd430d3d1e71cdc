"""`stoker.Checkpointer` at the end of a run, and of a script that runs alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from stoker.data.loader import Loader
from stoker.errors import EnvironmentProblem
from stoker.platform import shared_folders
from stoker.train.checkpoints import slots
from stoker.train.checkpoints.checkpointer import Checkpointer
from stoker.train.checkpoints.memory import MemorySlots
from stoker.train.checkpoints.slots import all_slots
from stoker.train.checkpoints.snapshots import SlotSnapshots
from stoker.train.checkpoints.storage_port import RunStorage
from stoker.train.elastic import elastic
from stoker.train.state import State
from tests.unit.checkpointer_runs import Numbers, begin_anew, finish, make, newest, step, train_until
from tests.unit.snapshot_helpers import newest_in_memory

pytestmark = pytest.mark.usefixtures("fresh_process", "node")


# -- alone -----------------------------------------------------------------------------------------------------

ALONE = """
import os, sys, torch, stoker
from stoker.platform import shared_folders
from pathlib import Path
shared_folders.SHARED_MEMORY = Path(sys.argv[1])
model = torch.nn.Linear(2, 2)
state = stoker.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                     checkpointer=stoker.Checkpointer(every_s=None, every_commits=1))

state.seal()
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.commit()
state._runtime.steps.close()
if os.fork() == 0:
    sys.exit(0)  # runs what was registered for the end of the process
os.wait()
(folder,) = Path(sys.argv[1]).iterdir()
print(sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.real
def test_a_script_alone_has_a_folder_that_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "STOKER_SNAPSHOT_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "memory")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "'owner'" in done.stdout
    assert "0-0.snapshot" in done.stdout
    assert [*(tmp_path / "memory").iterdir()] == []


def test_without_a_place_for_a_folder_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("STOKER_SNAPSHOT_DIR")
    monkeypatch.setattr(shared_folders, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    state = make(checkpointer=Checkpointer(every_s=None, every_commits=1))
    state.seal()
    for _ in range(3):
        step(state)
    assert caplog.text.count("no snapshots are taken") == 1


# -- the end of a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saver", ["1", "0"])
def test_the_last_state_of_a_run_is_kept_whether_it_was_due_or_not(
    node: Path, tmp_path: Path, saver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_SAVER", saver)
    url = str(tmp_path / "c")
    state = make(checkpointer=Checkpointer(url, every_s=None, every_commits=3))
    train_until(state, Loader(Numbers(), global_batch_size=4), 5)
    stored = RunStorage(url, keep=2).newest()
    assert newest(node) == (5 if saver == "1" else 3)
    assert (stored[0] if stored is not None else None) == (None if saver == "1" else 5)


@pytest.mark.parametrize("saver", ["1", "0"])
@pytest.mark.parametrize("undo_steps", [False, True])
def test_what_came_after_the_last_commit_is_not_kept(
    node: Path, tmp_path: Path, saver: str, undo_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_SAVER", saver)
    url = str(tmp_path / "c")

    def run(*, steps_on: bool) -> None:
        begin_anew()
        checkpointer = Checkpointer(url, every_s=None, every_commits=100)
        state = make(checkpointer=checkpointer, undo_steps=undo_steps)

        @elastic
        def train(state: State) -> None:
            state.epoch = 1
            step(state)
            state.epoch = 2
            if steps_on:
                state.model(torch.randn(4, 2)).sum().backward()
                state.optimizer.step()

        train(state)

    def kept() -> list[tuple[int, int]]:
        stored, image = RunStorage(url, keep=2).newest(), newest_in_memory(node, "run-1")
        found = [(stored.commits, stored.state["values"]["epoch"])] if stored is not None else []
        return found + ([(image.commits, image.state()["values"]["epoch"])] if image is not None else [])

    run(steps_on=True)
    assert kept() == [], "parameters are not as they were at the commit"
    run(steps_on=False)
    assert kept() == [(1, 1)]


def test_a_run_that_was_over_writes_nothing_anew(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_SAVER", "0")
    folder = tmp_path / "c"
    written = []
    for _ in range(3):
        begin_anew()
        state = make(checkpointer=Checkpointer(str(folder), every_s=None, every_commits=100, in_memory=False))

        @elastic
        def train(state: State) -> None:
            if state.commits == 0:
                step(state)

        train(state)
        written.append([(path.name, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())])
    assert written[0] == written[1] == written[2]
    assert [name for name, _ in written[0]] == ["step-000000000001"]


def test_where_the_last_snapshot_cannot_be_taken_the_storage_is_written_to(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_SAVER", "1")
    url = str(tmp_path / "c")
    state = make(checkpointer=Checkpointer(url, every_s=None, every_commits=100))
    monkeypatch.setattr(
        MemorySlots, "_begin", lambda *_: (_ for _ in ()).throw(EnvironmentProblem("it is full"))
    )

    @elastic
    def train(state: State) -> None:
        step(state)

    train(state)
    stored = RunStorage(url, keep=2).newest()
    assert stored is not None
    assert stored.commits == 1


def test_the_last_snapshot_waits_for_the_one_under_way_and_for_who_reads(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_SAVER", "1")
    state = make(checkpointer=Checkpointer(str(tmp_path / "c"), every_s=None, every_commits=1))
    state.seal()
    for _ in range(2):
        step(state)
        finish(state)
    source = SlotSnapshots(node, "run-1")
    with contextlib.ExitStack() as reading:
        for path in all_slots(node):
            reading.enter_context(slots.reading(path))
        step(state)  # its snapshot finds no slot that is free
        ending = threading.Thread(target=state._runtime.steps.keep_last, args=(state,))
        ending.start()
        ending.join(1.0)
        assert ending.is_alive()
        assert source.newest_commits() == 2
    ending.join(60.0)
    assert source.newest_commits() == 3
