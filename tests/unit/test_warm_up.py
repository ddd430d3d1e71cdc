"""`@stoker.elastic(warm_up=…)`: what a worker does before it takes part leaves its state as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from stoker.data.loader import Loader
from stoker.data.session import session
from stoker.errors import ConfigError
from stoker.train.elastic import elastic
from stoker.train.runtime import runtime
from stoker.train.state import State

pytestmark = pytest.mark.usefixtures("fresh_process")


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, record: int) -> int:
        return record


def make(**more: Any) -> State:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    return State(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), epoch=0, seen=[1], **more
    )


def picture(state: State, loader: Loader) -> Any:
    """All that a warm-up could change."""
    return json.dumps(
        [
            {name: tensor.tolist() for name, tensor in state.model.state_dict().items()},
            [p.grad is None for p in state.model.parameters()],
            str(state.optimizer.state_dict()),
            (state.epoch, state.seen),
            (loader.epoch, loader.cursor),
            [module.training for module in state.model.modules()],
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
            session().share is None,
        ]
    )


def test_all_that_a_warm_up_does_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_AUDIT_DIR", str(tmp_path))
    story: list[Any] = []
    state = make()
    loader = Loader(Numbers(), global_batch_size=5)

    def rehearse(warmed: State) -> None:
        assert warmed is state
        story.append("warm-up")
        state.model.eval()
        state.model.train()
        for numbers in loader:
            state.ddp(torch.randn(4, 2)).sum().backward()
            state.seen.append(len(numbers))
        assert all(p.grad is not None for p in list(state.model.parameters())[:2])
        assert state.model[1].num_batches_tracked == 2
        state.epoch = 7
        state.optimizer.param_groups[0]["lr"] = 3.0
        state.model.eval()
        random.random()
        np.random.rand()

    @elastic(warm_up=rehearse)
    def train(state: State, name: str) -> str:
        story.append(picture(state, loader))
        for _ in loader:
            state.ddp(torch.randn(4, 2)).sum().backward()
            state.optimizer.step()
            state.commit()
        return name

    before = picture(state, loader)
    assert train(state, "done") == "done"
    assert story == ["warm-up", before]
    assert state.commits == 2
    (noted,) = tmp_path.glob("*.jsonl")
    reads = [e["records"] for e in map(json.loads, noted.read_text().splitlines()) if e["type"] == "read"]
    assert reads == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], "what is read to warm up is no part of the training"


def test_a_warm_up_sees_the_state_that_the_run_begins_with(tmp_path: Path) -> None:
    seen: list[int] = []
    for _ in range(2):
        runtime.cache_clear()
        session.cache_clear()
        state = make(checkpoint_dir=str(tmp_path), checkpoint_every=1)

        @elastic(warm_up=lambda state: seen.append(state.epoch))
        def train(state: State) -> None:
            state.epoch += 1
            state.commit()

        train(state)
        dist.destroy_process_group()
    assert seen == [0, 1]


def test_without_a_warm_up_the_decorator_is_used_as_ever() -> None:
    @elastic()
    def train(state: State) -> int:
        return state.epoch

    assert train(make()) == 0
    assert train.__name__ == "train"


def step(state: State) -> None:
    state.model(torch.randn(4, 2)).sum().backward()
    state.optimizer.step()


def commit(state: State) -> None:
    state.commit()


def change_weights(state: State) -> None:
    with torch.no_grad():
        state.model[0].weight.mul_(2.0)


@pytest.mark.parametrize(
    ("warm_up", "complaint"),
    [
        (step, "must not step an optimizer"),
        (commit, "must not commit"),
        (change_weights, "has changed parameters of the model"),
    ],
)
def test_what_could_not_be_undone_is_refused(warm_up: Callable[[State], None], complaint: str) -> None:
    state = make()
    before = [p.tolist() for p in state.model.parameters()]

    @elastic(warm_up=warm_up)
    def train(state: State) -> None:
        raise AssertionError("it must not come to this")

    with pytest.raises(ConfigError, match=complaint):
        train(state)
    if warm_up is not change_weights:
        assert [p.tolist() for p in state.model.parameters()] == before
    assert state.commits == 0


def test_a_warm_up_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="give it without calling it"):
        elastic(warm_up=make())  # type: ignore[call-overload]


def test_an_error_of_a_warm_up_is_the_scripts() -> None:
    @elastic(warm_up=lambda state: 1 // state.epoch)
    def train(state: State) -> None:
        raise AssertionError("it must not come to this")

    with pytest.raises(ZeroDivisionError):
        train(make())
