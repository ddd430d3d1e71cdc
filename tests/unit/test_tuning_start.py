"""Auto-tune inside a worker: what it takes hold of, what a training loop sees of it."""

from __future__ import annotations

import os
import time

import pytest
import torch

from stoker.data.loader import Loader
from stoker.data.session import session
from stoker.errors import ConfigError
from stoker.train.accelerator import memory_limit_bytes
from stoker.train.elastic import elastic
from stoker.train.state import State
from stoker.train.tuning_start import NoLoader, bounds_of, cores, loader_to_tune

CPU = torch.device("cpu")


class Numbers(torch.utils.data.Dataset[int]):
    """Records that take their time, without needing a core for it."""

    def __init__(self, size: int, decode_s: float = 0.0) -> None:
        self.size = size
        self.decode_s = decode_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, record: int) -> int:
        if self.decode_s:
            time.sleep(self.decode_s)
        return record


@pytest.fixture(autouse=True)
def auto_tune(fresh_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a worker of its own, alone, with auto-tune."""
    monkeypatch.setenv("STOKER_AUTO_TUNE", "1")


def make(**more: int) -> State:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), epoch=0, **more)


def test_the_loader_of_the_training_is_tuned() -> None:
    assert isinstance(loader_to_tune(session()), NoLoader)
    evaluation = Loader(Numbers(4), global_batch_size=1)
    assert loader_to_tune(session()) is evaluation
    training = Loader(Numbers(4), global_batch_size=1, shuffle=True, num_workers=1)
    assert loader_to_tune(session()) is training
    del evaluation, training
    assert isinstance(loader_to_tune(session()), NoLoader), "loaders that are gone do not count"


def test_ranks_share_a_nodes_cores_and_memory() -> None:
    one, four = bounds_of(CPU, 1), bounds_of(CPU, 4)
    assert one.max_workers == cores() >= 1
    assert four.max_workers == max(1, cores() // 4)
    assert one.memory_bytes == memory_limit_bytes(CPU)
    assert four.memory_bytes == memory_limit_bytes(CPU) // 4


@pytest.mark.real
def test_loader_processes_may_change_at_any_batch() -> None:
    loader = Loader(Numbers(100), global_batch_size=4, shuffle=True, seed=5)
    plan = {3: 2, 4: 0, 9: 1, 24: 2}
    seen: list[list[int]] = []
    for step, numbers in enumerate(loader):
        seen.append(numbers.tolist())
        if step in plan:
            loader.retune(num_workers=plan[step])
            assert loader.num_workers == plan[step]
    assert (loader.epoch, loader.cursor) == (1, 0)
    again = Loader(Numbers(100), global_batch_size=4, shuffle=True, seed=5)
    assert seen == [numbers.tolist() for numbers in again], "the same batches in the same order"
    assert len(list(loader)) == 25


def test_waiting_for_batches_is_counted() -> None:
    for _ in Loader(Numbers(6, decode_s=0.02), global_batch_size=2):
        time.sleep(0.01)
    assert session().waited_s >= 0.12


@pytest.mark.real
def test_a_loop_that_waits_for_data_gets_a_loader_process(capsys: pytest.CaptureFixture[str]) -> None:
    if cores() < 2:
        pytest.skip("needs two cores")
    state = make()
    loader = Loader(Numbers(300, decode_s=0.01), global_batch_size=3, shuffle=True)
    seen: list[int] = []

    @elastic
    def train(state: State) -> None:
        for numbers in loader:
            seen.extend(numbers.tolist())
            time.sleep(0.02)
            state.commit()

    train(state)
    assert sorted(seen) == list(range(300))
    assert loader.num_workers >= 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "stoker: auto-tune: measuring 0 loader workers"
    assert said[1].startswith("stoker: auto-tune: trying loader workers 0 → 2: ")
    assert said[2].startswith("stoker: auto-tune: loader workers 0 → 2: waiting for data fell from ")


class OneProcess(Numbers):
    """Holds what does not outlive a fork, which is why its script loads with `num_workers=0`."""

    def __init__(self, size: int, decode_s: float) -> None:
        super().__init__(size, decode_s)
        self.owner = os.getpid()

    def __getitem__(self, record: int) -> int:
        if os.getpid() != self.owner:
            raise ValueError("this handle belongs to another process")
        return super().__getitem__(record)


@pytest.mark.real
def test_data_that_loader_processes_cannot_load_is_loaded_as_the_script_does_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = make()
    loader = Loader(OneProcess(160, decode_s=0.005), global_batch_size=4, shuffle=True)
    seen: list[int] = []

    @elastic
    def train(state: State) -> None:
        for numbers in loader:
            state.commit()
            seen.extend(numbers.tolist())

    train(state)
    assert sorted(seen) == list(range(160)), "the step that was undone is done again"
    assert loader.num_workers == 0
    workers = min(2, cores())
    taken_back = (
        f"loader workers 0 → {workers} taken back: ValueError: this handle belongs to another process"
    )
    said = [line.partition("auto-tune: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said[0] == said[3] == "measuring 0 loader workers"
    assert said[1].startswith(f"trying loader workers 0 → {workers}: ")
    assert said[2] == f"{taken_back}; not tried again"
    assert said[4:] == [
        f"loader workers stay at 0: {workers} have failed; nothing left to try with 0 loader workers"
    ]


def test_a_micro_batch_that_does_not_fit_is_undone_with_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    state = make()
    loader = Loader(Numbers(64 * 40), global_batch_size=64, shuffle=True)
    seen: list[int] = []
    calls, sizes = 0, []

    @elastic
    def train(state: State) -> None:
        nonlocal calls
        calls += 1
        for batch in loader:
            step: list[int] = []
            for piece, weight in state.micro_batches(batch, 8):
                (state.ddp(piece.float().unsqueeze(1)).mean() * weight).backward()
                step += piece.tolist()
                if len(piece) > 8:
                    torch.empty(1 << 60)
            sizes.append(len(piece))
            time.sleep(0.05)  # so that waiting for data is little beside it
            state.optimizer.step()
            state.commit()
            seen.extend(step)

    train(state)
    assert calls == 2, "once more after the step that ran out of memory"
    assert sizes == [8] * 40
    assert sorted(seen) == list(range(64 * 40)), "the step that was undone is done again"
    assert [line.partition("auto-tune: ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "measuring 0 loader workers",
        "trying micro-batch 8 → 16: now 8 passes make a step",
        "micro-batch 8 → 16 taken back: out of memory; not tried again",
        "measuring 0 loader workers, micro-batch 8",
        "micro-batch stays at 8: 16 ran out of memory",
    ]


def test_a_script_that_runs_out_of_memory_by_itself_fails() -> None:
    @elastic
    def train(state: State) -> None:
        torch.empty(1 << 60)

    with pytest.raises(RuntimeError, match="allocate memory"):
        train(make())


def test_without_auto_tune_pieces_are_as_the_script_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_AUTO_TUNE", "0")
    state = make()
    loader = Loader(Numbers(10), global_batch_size=10)

    @elastic
    def train(state: State) -> list[tuple[int, float]]:
        (batch,) = loader
        with pytest.raises(ConfigError, match="at least 1 record, not 0"):
            state.micro_batches(batch, 0)
        return [(len(piece), weight) for piece, weight in state.micro_batches(batch, 4)]

    assert train(state) == [(4, 0.4), (4, 0.4), (2, 0.2)]


def test_pieces_of_several_modules_are_reduced_once() -> None:
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    state = State(generator=one, critic=other)

    @elastic
    def train(state: State) -> list[tuple[bool, bool]]:
        wrapped = state.wrap(one), state.wrap(other)
        pieces = state.micro_batches(torch.randn(6, 1), 4)
        return [tuple(w.require_backward_grad_sync for w in wrapped) for _ in pieces]  # type: ignore[misc]

    assert train(state) == [(False, False), (True, True)]
