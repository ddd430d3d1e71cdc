"""What workers must have alike when they have loaded a run's state, and what each has of its own: random generators."""

from __future__ import annotations

import gc
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.data.loader import Loader
from stoker.data.session import session
from stoker.settings import worker_settings
from stoker.train.checkpoints.checkpointer import Checkpointer
from stoker.train.checkpoints.image import image_of
from stoker.train.checkpoints.memory import MemorySlots
from stoker.train.checkpoints.storage_port import Loaded, RunStorage
from stoker.train.state import State
from tests.unit.checkpointer_runs import Numbers, begin_anew, make

pytestmark = pytest.mark.usefixtures("fresh_process", "node")


def a_training(rank: int, monkeypatch: pytest.MonkeyPatch) -> State:
    """As another rank has it: all is the same but its generators."""
    begin_anew()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, epoch=1)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    random.seed(rank)
    random.gauss(0.0, 1.0)  # which keeps another one for later, on some
    np.random.seed(rank)
    torch.manual_seed(rank)
    monkeypatch.setattr(session(), "rank", rank)
    return state


def change_model(state: State) -> None:
    with torch.no_grad():
        state.model.bias += 1e-6


def change_momentum(state: State) -> None:
    state.optimizer.state[state.model.bias]["momentum_buffer"].mul_(2)


def change_value(state: State) -> None:
    state.epoch = 2


def change_world(state: State) -> None:
    state._changes.committed_size += 1


def change_schedule(state: State) -> None:
    state.scheduler.last_epoch += 1


def be_exact(state: State) -> None:
    session().virtual_ranks = 4


@pytest.mark.parametrize("kept_in", ["memory", "storage"])
def test_the_fingerprint_is_of_what_workers_must_have_alike(
    kept_in: str, node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(rank: int, change: Callable[[State], None] = lambda state: None) -> str:
        state = a_training(rank, monkeypatch)
        change(state)
        exported = state.export()
        checkpointer = Checkpointer(str(tmp_path / f"{uuid.uuid4().hex}"))
        if kept_in == "storage":
            assert checkpointer.storage is not None
            checkpointer.storage.save(3, exported)
        else:
            slots = MemorySlots(node, "run-1", 0)
            slots.take(image_of(3, exported), set())
            slots.finish()
            slots.close()
            checkpointer.connect(worker_settings())
        found: list[Loaded] = []
        checkpointer.load_newest(found.append)
        assert found[0].state["random"]["rank"] == rank, "the generators are there, for that rank"
        return found[0].fingerprint

    first = fingerprint(0)
    assert first
    assert fingerprint(1) == fingerprint(2) == first
    changes = [change_model, change_momentum, change_value, change_world, change_schedule, be_exact]
    others = [fingerprint(1, change) for change in changes]
    assert len({first, *others}) == 1 + len(changes)


@pytest.mark.parametrize("was_exact", [False, True])
@pytest.mark.parametrize("is_exact", [False, True])
def test_who_is_in_exact_mode_or_comes_from_it_copies(node: Path, was_exact: bool, is_exact: bool) -> None:
    def loader(*, is_exact: bool) -> Loader:
        begin_anew()
        made = Loader(Numbers(), global_batch_size=8, virtual_ranks=4 if is_exact else None)
        assert session().virtual_ranks == (4 if is_exact else 0)
        return made

    held = [loader(is_exact=was_exact)]
    exported = make().export()
    assert bool(exported["world"]["exact"]) == was_exact
    slots = MemorySlots(node, "run-1", 0)
    slots.take(image_of(3, exported), set())
    slots.finish()
    slots.close()
    held.append(loader(is_exact=is_exact))
    state = make(checkpointer=Checkpointer())
    state._runtime.steps.load_checkpoint(state)
    assert state.commits == 3
    assert bool(state._runtime.core.restored) == (not was_exact and not is_exact)


def test_extra_state_that_is_loaded_lies_in_memory_of_its_own(node: Path) -> None:
    """A module keeps the very tensors that it is given: with them it would keep the whole snapshot."""
    model = Scaled()
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    slots = MemorySlots(node, "run-1", 0)
    slots.take(image_of(3, state.export()), set())
    slots.finish()
    slots.close()
    del slots
    checkpointer = Checkpointer()
    checkpointer.connect(worker_settings())
    before = (model.history, model.deep["by name"][0])
    checkpointer.load_newest(lambda loaded: state.load(loaded.state))
    after = (model.history, model.deep["by name"][0])
    assert all(one is not other and torch.equal(one, other) for one, other in zip(before, after, strict=True))
    gc.collect()
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(node) in line]
    begins = [range(*(int(at, 16) for at in line.split()[0].split("-"))) for line in mappings]
    assert not any(tensor.data_ptr() in held for tensor in after for held in begins)


class Scaled(torch.nn.Linear):
    """With tensors in its extra state, as quantizers of activations have them."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.history = torch.arange(3.0)
        self.deep = {"by name": [torch.arange(5.0)]}

    def get_extra_state(self) -> Any:
        return {"history": self.history, "deep": self.deep}

    def set_extra_state(self, state: Any) -> None:
        self.history, self.deep = state["history"], state["deep"]


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
