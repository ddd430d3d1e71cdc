"""`stoker.Checkpointer`: when it takes snapshots, and of what."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.errors import ConfigError
from stoker.train.checkpoints.checkpointer import Checkpointer
from stoker.train.checkpoints.copying import Copy
from stoker.train.checkpoints.due import Due
from tests.unit.checkpointer_runs import finish, make, newest, step
from tests.unit.snapshot_helpers import newest_in_memory, same

pytestmark = pytest.mark.usefixtures("fresh_process", "node")


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
