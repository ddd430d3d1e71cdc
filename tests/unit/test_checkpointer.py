"""`stoker.Checkpointer`: when it takes snapshots, and from where a run goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.data.loader import Loader
from stoker.data.session import session
from stoker.errors import ConfigError, EnvironmentProblem
from stoker.platform import shared_folders
from stoker.train.checkpoints import slots
from stoker.train.checkpoints.checkpointer import Checkpointer
from stoker.train.checkpoints.copying import Copy
from stoker.train.checkpoints.due import Due
from stoker.train.checkpoints.memory import MemorySlots
from stoker.train.checkpoints.slots import all_slots
from stoker.train.checkpoints.snapshots import SlotSnapshots
from stoker.train.checkpoints.storage_port import Loaded, RunStorage
from stoker.train.elastic import elastic
from stoker.train.runtime import runtime
from stoker.train.state import State
from tests.unit.snapshot_helpers import newest_in_memory, same
from tests.unit.test_snapshot_slots import damage

pytestmark = pytest.mark.usefixtures("fresh_process", "node")
WIDE = 40_000
"""Parameters of so many elements are copied while the next step runs."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An agent's folder for snapshots."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setenv("STOKER_SNAPSHOT_DIR", str(folder))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run-1")
    return folder


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, record: int) -> int:
        return record


def begin_anew() -> None:
    """As another process would."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    runtime.cache_clear()
    session.cache_clear()


def make(seed: int = 0, **more: Any) -> State:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, WIDE), torch.nn.BatchNorm1d(WIDE))
    return State(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), epoch=0, **more
    )


def step(state: State) -> None:
    state.optimizer.zero_grad()
    state.model(torch.randn(4, 2)).sum().backward()
    state.optimizer.step()
    state.commit()


def finish(state: State) -> None:
    """All snapshots that were begun are done."""
    checkpointer = state._runtime.steps._checkpointer
    assert checkpointer is not None
    assert checkpointer.slots is not None
    checkpointer.slots.finish()


def newest(folder: Path) -> int | None:
    image = newest_in_memory(folder, "run-1")
    return image.commits if image is not None else None


def train_until(state: State, loader: Loader, stop: int) -> list[int]:
    """Commits until `stop`; which records that took."""
    seen: list[int] = []

    @elastic
    def train(state: State) -> None:
        while state.epoch < 2:
            for batch in loader:
                seen.extend(batch.tolist())
                state.ddp(torch.randn(4, 2)).sum().backward()
                state.optimizer.step()
                state.optimizer.zero_grad()
                state.commit()
                finish(state)
                if state.commits == stop:
                    return
            state.epoch += 1

    train(state)
    return seen


# -- when ------------------------------------------------------------------------------------------------------


def test_due_by_commits_by_time_or_by_what_comes_first() -> None:
    by_commits = Due(None, 3, now=0.0)
    assert [n for n in range(1, 10) if by_commits.is_due(n, now=n * 1000.0)] == [3, 6, 9]
    by_time = Due(10.0, None, now=0.0)
    assert [now for now in range(60) if by_time.is_due(1, now=float(now))] == [10, 20, 30, 40, 50]
    slow = Due(10.0, None, now=0.0)
    assert [now for now in range(0, 60, 7) if slow.is_due(1, now=float(now))] == [14, 28, 42, 56]
    both = Due(10.0, 4, now=0.0)
    assert [n for n in range(1, 13) if both.is_due(n, now=n * 5.0)] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every_s": 0}, r"every_s=…\) must be above 0"),
        ({"every_s": float("nan")}, r"every_s=…\) must be above 0"),
        ({"every_commits": 0}, r"every_commits=…\) must be at least 1 commit"),
        ({"every_s": None}, "needs every_s or every_commits"),
        ({"keep": 0}, r"keep=…\) must be at least 1"),
        ({"url": "nonsense://bucket/x"}, "cannot open nonsense://"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Checkpointer(**options)


def test_a_checkpointer_and_a_folder_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"State\(checkpointer=…\) says where"):
        make(checkpointer=Checkpointer(), checkpoint_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"State\(checkpointer=…\) says where"):
        make(checkpointer=Checkpointer(), checkpoint_every=3)
    with pytest.raises(ConfigError, match=r"takes a stoker\.Checkpointer, not a str"):
        make(checkpointer="somewhere")


def test_snapshots_are_taken_at_their_commits(node: Path) -> None:
    assert stoker.Checkpointer is Checkpointer
    state = make(checkpointer=Checkpointer(every_s=None, every_commits=2))
    state.seal()
    found = []
    for _ in range(5):
        step(state)
        finish(state)
        found.append(newest(node))
    assert found == [None, 2, 2, 4, 4]
    image = newest_in_memory(node, "run-1")
    assert image is not None
    assert image.state()["values"] == {"epoch": 0}


def test_only_the_first_worker_of_a_node_takes_them(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    state = make(checkpointer=Checkpointer(every_s=None, every_commits=1))
    state.seal()
    step(state)
    assert [*node.iterdir()] == []


def test_none_are_taken_unless_asked_for(node: Path) -> None:
    for state in (make(), make(checkpointer=Checkpointer(every_s=None, every_commits=1, in_memory=False))):
        state.seal()
        step(state)
        assert [*node.iterdir()] == []


def test_a_folder_for_checkpoints_brings_snapshots_along(node: Path, tmp_path: Path) -> None:
    state = make(checkpoint_dir=str(tmp_path / "c"), checkpoint_every=2)
    state.seal()
    for _ in range(5):
        step(state)
        finish(state)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "step-000000000002",
        "step-000000000004",
    ]
    assert newest(node) == 4


def test_one_that_is_due_while_the_last_is_under_way_comes_later(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, goes_on = Copy.look, threading.Event()

    def wait_and_look(copy: Copy, **options: Any) -> bool:
        if threading.current_thread() is not threading.main_thread() and copy._copied.is_set():
            goes_on.wait()
        return look(copy, **options)

    monkeypatch.setattr(Copy, "look", wait_and_look)
    state = make(checkpointer=Checkpointer(every_s=None, every_commits=2))
    state.seal()
    for _ in range(4):
        step(state)
    goes_on.set()
    finish(state)
    assert newest(node) == 2
    step(state)
    finish(state)
    assert newest(node) == 5


# -- what ------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_the_state_of_its_commit_whatever_the_next_step_does(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is held up until the optimizer waits for it; by then buffers and values have changed."""
    run, settle, goes_on = Copy.run, Copy.settle, threading.Event()

    def wait_and_run(copy: Copy) -> None:
        goes_on.wait()
        run(copy)

    def go_on(copy: Copy) -> None:
        goes_on.set()
        settle(copy)

    monkeypatch.setattr(Copy, "run", wait_and_run)
    monkeypatch.setattr(Copy, "settle", go_on)
    state = make(checkpointer=Checkpointer(every_s=None, every_commits=2))
    state.seal()
    step(state)
    goes_on.clear()
    step(state)
    expected = {kind: held for kind, held in state.export().items() if kind != "random"}
    expected = {
        **expected,
        "modules": {"model": {k: v.clone() for k, v in expected["modules"]["model"].items()}},
    }
    momentum = state.optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    state.epoch = 5
    step(state)
    finish(state)
    image = newest_in_memory(node, "run-1")
    assert image is not None
    assert image.commits == 2
    found = image.state()
    assert same(found["modules"], expected["modules"])
    assert torch.equal(found["optimizers"]["optimizer"]["state"][0]["momentum_buffer"], momentum)
    assert found["values"] == {"epoch": 0}
    assert not torch.equal(found["modules"]["model"]["1.running_mean"], state.model[1].running_mean)


def test_a_step_that_is_undone_meanwhile_does_not_show(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The world changes in the step after a snapshot was begun: buffers, values and generators are put back."""
    run, goes_on = Copy.run, threading.Event()
    monkeypatch.setattr(Copy, "run", lambda copy: (goes_on.wait(), run(copy)))
    state = make(checkpointer=Checkpointer(every_s=None, every_commits=1))
    state.seal()
    before = {name: held.clone() for name, held in state.model.state_dict().items()}
    state.commit()
    state.epoch = 4
    state.model(torch.randn(4, 2)).sum().backward()
    state.roll_back()
    goes_on.set()
    finish(state)
    image = newest_in_memory(node, "run-1")
    assert image is not None
    assert same(image.state()["modules"]["model"], before)
    assert image.state()["values"] == {"epoch": 0}
    assert same(dict(state.model.state_dict()), before)


def test_what_hinders_snapshots_is_remarked_once_and_so_is_its_end(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make(checkpointer=Checkpointer(every_s=None, every_commits=1))
    state.seal()
    remarks = []
    monkeypatch.setattr(state._runtime.link, "remark", remarks.append)
    away = node.rename(node.with_name("away"))
    for _ in range(3):
        step(state)
        finish(state)
    away.rename(node)
    for _ in range(3):
        step(state)
        finish(state)
    assert [remark.kind for remark in remarks] == ["snapshot-failed", "snapshot-taken-again"]
    assert "No such file or directory" in remarks[0].text


def test_a_state_that_is_loaded_meanwhile_waits_for_the_copy(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the world changes and a newer state is copied from a peer."""
    run, settle, goes_on = Copy.run, Copy.settle, threading.Event()
    monkeypatch.setattr(Copy, "run", lambda copy: (goes_on.wait(), run(copy)))
    monkeypatch.setattr(Copy, "settle", lambda copy: (goes_on.set(), settle(copy)))
    state = make(checkpointer=Checkpointer(every_s=None, every_commits=1))
    state.seal()
    before = {name: held.clone() for name, held in state.model.state_dict().items()}
    state.commit()
    other = {**state.export(), "modules": {"model": {k: torch.zeros_like(v) for k, v in before.items()}}}
    state.load(other)
    finish(state)
    image = newest_in_memory(node, "run-1")
    assert image is not None
    assert same(image.state()["modules"]["model"], before)


# -- from where ------------------------------------------------------------------------------------------------


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


def test_what_is_loaded_from_a_storage_has_a_fingerprint_of_its_content(tmp_path: Path) -> None:
    """Workers that have the same copy nothing from each other."""
    begin_anew()

    def loaded(folder: str, fill: float, epoch: int = 1) -> str:
        stored = RunStorage(str(tmp_path / folder), 3)
        stored.save(3, {"modules": {"m": {"w": torch.full((9,), fill)}}, "values": {"epoch": epoch}})
        found: list[Loaded] = []
        Checkpointer(str(tmp_path / folder)).load_newest(found.append)
        return found[0].fingerprint

    first = loaded("a", 1.0)
    assert first
    assert loaded("b", 1.0) == first
    assert loaded("c", 2.0) != first
    assert loaded("d", 1.0, epoch=2) != first


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
    assert (first.folder, second.folder) == (tmp_path / "a b", Path("some/where"))


def test_more_checkpoints_are_kept_where_asked_for(tmp_path: Path, node: Path) -> None:
    state = make(checkpointer=Checkpointer(str(tmp_path / "c"), every_s=None, every_commits=1, keep=3))
    state.seal()
    for _ in range(5):
        step(state)
    assert len([*(tmp_path / "c").iterdir()]) == 3


# -- random generators -----------------------------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_a_restored_rank_goes_on_with_its_random_generators() -> None:
    state = make()
    random.seed(5)
    np.random.seed(5)
    np.random.randn()  # it keeps a second one
    exported = state.export()
    expected = (*draw(), np.random.randn())
    draw()
    state.restore_random(exported)
    assert (*draw(), np.random.randn()) == expected


def test_each_rank_keeps_its_own_random_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make()
    exported = state.export()
    random.seed(1)
    before = random.getstate()
    state.load(exported)
    assert random.getstate() == before, "a newcomer that copies from a peer"
    session().rank = 1
    state.restore_random(exported)
    assert random.getstate() == before, "another rank that reads the snapshot"
    session().rank = 0
    state.restore_random({kind: held for kind, held in exported.items() if kind != "random"})
    assert random.getstate() == before, "a checkpoint that has none"
    state.load({kind: held for kind, held in exported.items() if kind != "random"})


def test_another_generator_of_numpy_and_other_devices_are_left_alone() -> None:
    state = make()
    exported = state.export()
    exported["random"]["numpy"]["bit_generator"] = "Another"
    exported["random"]["device"] = [torch.zeros(16, dtype=torch.uint8)]
    expected = torch.rand(1)
    np.random.seed(1)
    state.restore_random(exported)
    assert torch.equal(torch.rand(1), expected)
    assert np.random.rand() == np.random.RandomState(1).rand()


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
