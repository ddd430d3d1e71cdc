"""Gradients that would go from one batch of a loader into the reduction of another are noticed; no others are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stoker.data.loader import Loader
from stoker.errors import ConfigError
from stoker.train.elastic import elastic
from stoker.train.state import State

pytestmark = pytest.mark.usefixtures("fresh_process")

Script = Callable[[State, Loader], Any]
RECORDS, BATCH = 24, 4


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, record: int) -> torch.Tensor:
        return torch.full((3,), 1.0 + record)


def run(script: Script) -> State:
    model, judge = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    state = State(
        model=model,
        judge=judge,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        other=torch.optim.SGD(judge.parameters(), lr=0.01),
    )
    loader = Loader(Rows(), global_batch_size=BATCH)

    @elastic
    def train(state: State) -> None:
        script(state, loader)

    train(state)
    return state


def backward(module: torch.nn.Module, batch: torch.Tensor) -> None:
    module(batch).mean().backward()


def end_step(state: State) -> None:
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.commit()


# -- what is wrong ---------------------------------------------------------------------------------------------


def in_no_sync(state: State, loader: Loader) -> None:
    for number, batch in enumerate(loader):
        if number % 2 == 0:
            with state.ddp.no_sync():
                backward(state.ddp, batch)
        else:
            backward(state.ddp, batch)
            end_step(state)


def around_the_loader(state: State, loader: Loader) -> None:
    batches = iter(loader)
    with state.ddp.no_sync():
        for _ in range(2):
            backward(state.ddp, next(batches))
    backward(state.ddp, next(batches))
    end_step(state)


def by_the_flag(state: State, loader: Loader) -> None:
    for number, batch in enumerate(loader):
        state.ddp.require_backward_grad_sync = number % 3 == 2
        backward(state.ddp, batch)
        if number % 3 == 2:
            end_step(state)


def in_a_later_step(state: State, loader: Loader) -> None:
    batches = iter(loader)
    for _ in range(2):
        backward(state.ddp, next(batches))
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=False)
        state.commit()
    with state.ddp.no_sync():
        backward(state.ddp, next(batches))
    next(batches)


@pytest.mark.parametrize("script", [in_no_sync, around_the_loader, by_the_flag, in_a_later_step])
def test_what_goes_on_into_another_batch_is_refused(script: Script) -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size the whole and cut it .*state\.micro_batches"):
        run(script)


# -- what is right ---------------------------------------------------------------------------------------------


def pieces_by_hand(state: State, loader: Loader) -> None:
    for batch in loader:
        with state.ddp.no_sync():
            backward(state.ddp, batch[:2])
        backward(state.ddp, batch[2:])
        end_step(state)


def skipped_steps(state: State, loader: Loader) -> None:
    for number, batch in enumerate(loader):
        with state.ddp.no_sync():
            backward(state.ddp, batch[:2])
        backward(state.ddp, batch[2:])
        if number % 2:
            end_step(state)
        else:
            state.optimizer.zero_grad()


def micro_batches(state: State, loader: Loader) -> None:
    for batch in loader:
        for piece, weight in state.micro_batches(batch, 1):
            (state.ddp(piece).mean() * weight).backward()
        end_step(state)


def micro_batches_that_are_left(state: State, loader: Loader) -> None:
    for batch in loader:
        for piece, weight in state.micro_batches(batch, 1):
            (state.ddp(piece).mean() * weight).backward()
            break
        state.optimizer.zero_grad()


def a_look_without_backward(state: State, loader: Loader) -> None:
    for batch in loader:
        state.optimizer.zero_grad()
        with state.ddp.no_sync():
            state.ddp(batch)
        backward(state.ddp, batch)
        state.optimizer.step()
        state.commit()
        with state.ddp.no_sync():
            state.ddp(batch)  # while gradients of the step are still there


def gradients_to_look_at(state: State, loader: Loader) -> None:
    for number, batch in enumerate(loader):
        backward(state.ddp, batch)
        end_step(state)
        with state.ddp.no_sync():
            backward(state.ddp, batch)
        state.optimizer.zero_grad(set_to_none=number % 2 == 0)


def a_judge_whose_gradients_are_of_no_use(state: State, loader: Loader) -> None:
    judge = state.wrap(state.judge)
    for batch in loader:
        state.other.zero_grad()
        backward(judge, batch)
        state.other.step()
        with judge.no_sync():
            judge(state.ddp(batch) * batch).mean().backward()
        end_step(state)


def reduced_by_the_script(state: State, loader: Loader) -> None:
    for batch in loader:
        with state.ddp.no_sync():
            backward(state.ddp, batch)
        for parameter in state.model.parameters():
            dist.all_reduce(parameter.grad)
        end_step(state)


RIGHT = [
    *(pieces_by_hand, skipped_steps, micro_batches, micro_batches_that_are_left, a_look_without_backward),
    *(gradients_to_look_at, a_judge_whose_gradients_are_of_no_use, reduced_by_the_script),
]


@pytest.mark.parametrize("script", RIGHT)
def test_what_stays_within_a_batch_is_not(script: Script) -> None:
    state = run(script)
    assert all(bool(parameter.isfinite().all()) for parameter in state.model.parameters())


def test_sparse_gradients_are_looked_at() -> None:
    state = State(model=torch.nn.Embedding(9, 2, sparse=True))
    loader = Loader(Rows(), global_batch_size=BATCH)

    @elastic
    def train(state: State) -> None:
        for batch in loader:
            with state.ddp.no_sync():
                state.ddp(batch.long() % 9).sum().backward()

    with pytest.raises(ConfigError, match="wait to be reduced"):
        train(state)


def test_nothing_keeps_a_wrapper_whose_group_is_gone() -> None:
    def script(state: State, loader: Loader) -> None:
        with state.ddp.no_sync():
            backward(state.ddp, next(iter(loader)))
        known.append(weakref.ref(state.ddp))

    known: list[weakref.ref[Any]] = []
    state = run(script)
    state.forget_group()
    gc.collect()
    assert known[0]() is None
