"""A `GradScaler` in the State: a step that broke in the middle is done again as if it had not been begun."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stoker.train.state import State

pytestmark = pytest.mark.usefixtures("fresh_process")


class Broken(RuntimeError):
    """The world is over."""


def make(*, fused: bool) -> State:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    state = State(model=model, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu"))
    state.seal()
    return state


def gradients(state: State) -> None:
    loss = state.model(torch.arange(12.0).reshape(4, 3)).square().mean()
    state.scaler.scale(loss).backward()


def unscaled(state: State) -> None:
    gradients(state)
    state.scaler.unscale_(state.optimizer)
    torch.nn.utils.clip_grad_norm_(state.model.parameters(), 0.5)


def broken_at_the_optimizer(state: State) -> None:
    """As a collective that failed is noticed: just before parameters change."""

    def refuse(*_: object) -> None:
        raise Broken

    hook = state.optimizer.register_step_pre_hook(refuse)
    gradients(state)
    with pytest.raises(Broken):
        state.scaler.step(state.optimizer)
    hook.remove()


def skipped(state: State) -> None:
    """Gradients that overflow change no parameter."""
    gradients(state)
    state.model.weight.grad.fill_(float("inf"))
    state.scaler.step(state.optimizer)


def step(state: State, begin: Callable[[State], None]) -> None:
    begin(state)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
    state.seal()


@pytest.mark.parametrize("again", [gradients, unscaled])
@pytest.mark.parametrize("broken", [gradients, unscaled, broken_at_the_optimizer])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_broke_is_done_again(
    fused: bool, broken: Callable[[State], None], again: Callable[[State], None]
) -> None:
    state, twin = make(fused=fused), make(fused=fused)
    step(state, gradients)
    step(twin, gradients)
    broken(state)
    assert state.stands_at_commit or broken is broken_at_the_optimizer
    state.roll_back()
    for _ in range(2):
        step(state, again)
        step(twin, again)
    assert all(map(torch.equal, state.model.parameters(), twin.model.parameters()))
    assert state.scaler.state_dict() == twin.scaler.state_dict()


def test_a_step_that_was_skipped_and_then_broke_is_done_again() -> None:
    state, twin = make(fused=False), make(fused=False)
    skipped(state)
    state.roll_back()
    step(state, gradients)
    step(twin, gradients)
    assert all(map(torch.equal, state.model.parameters(), twin.model.parameters()))
    assert state.scaler.get_scale() == twin.scaler.get_scale()
