"""What scripts put into a State and do with it: kinds of values, generators, groups and modules that change."""

from __future__ import annotations

import collections
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from stoker.errors import ConfigError
from stoker.train.elastic import elastic
from stoker.train.state import State

pytestmark = pytest.mark.usefixtures("fresh_process")


class Place(NamedTuple):
    x: int
    y: int


class Counting(torch.nn.Module):
    """Keeps a number in its state_dict that is no tensor."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def test_a_value_may_hang_in_a_graph() -> None:
    model = net()
    state = State(model=model, loss=torch.tensor(0.0), losses=[])
    state.loss = model(torch.ones(1, 2)).sum()
    state.losses.append(state.loss)
    state.seal()
    expected = state.loss.item()
    state.loss = state.loss + 1
    state.roll_back()
    assert state.loss.item() == state.losses[0].item() == expected
    assert not state.loss.requires_grad


def test_values_of_a_copy_are_of_the_kinds_that_the_script_has() -> None:
    values: dict[str, Any] = {
        "seen": collections.Counter(a=1),
        "rows": collections.defaultdict(list, {3: [1]}),
        "nested": {"place": Place(1, 2), "more": [Place(3, 4)]},
    }
    state, other = State(**values), State(**values)
    state.seen["b"] += 5
    other.load(state.export())
    assert other.seen == {"a": 1, "b": 5}
    other.seen["never"] += 1
    other.rows[7].append(2)
    assert other.nested["place"].y == 2
    assert other.nested["more"][0].x == 3


def test_a_schedule_in_steps_goes_on_in_a_copy_also_by_its_closed_form() -> None:
    """It keeps its milestones in a Counter."""

    def make() -> tuple[State, lr_scheduler.MultiStepLR]:
        model = net()
        optimizer = sgd(model)
        schedule = lr_scheduler.MultiStepLR(optimizer, [2, 4])
        return State(model=model, optimizer=optimizer, schedule=schedule), schedule

    state, schedule = make()
    for _ in range(3):
        state.optimizer.step()
        schedule.step()
    other, copied = make()
    other.load(state.export())
    with pytest.warns(UserWarning, match="epoch parameter"):
        copied.step(5)
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: torch.randn(3, generator=g).tolist()),
        (lambda: np.random.default_rng(1), lambda g: g.standard_normal(3).tolist()),
        (lambda: np.random.Generator(np.random.MT19937(1)), lambda g: g.random(3).tolist()),
        (lambda: np.random.RandomState(1), lambda g: g.normal(size=3).tolist()),
        (lambda: random.Random(1), lambda g: [g.gauss(0, 1) for _ in range(3)]),
    ],
    ids=["torch", "numpy", "mersenne", "legacy", "python"],
)
def test_generators_of_ones_own_are_undone_and_copied(make: Any, draw: Any) -> None:
    own = make()
    state = State(generator=own)
    draw(own)
    assert state.generator is own
    state.seal()
    exported = State(generator=own).export()
    drawn = draw(own)
    state.roll_back()
    assert draw(own) == drawn
    other = State(generator=make())
    other.load(exported)
    assert draw(other.generator) == drawn


def test_a_parameter_group_that_a_broken_step_has_added_is_gone() -> None:
    model = net()
    optimizer = sgd(model[0])
    state = State(model=model, optimizer=optimizer)
    state.seal()
    for _ in range(2):
        optimizer.add_param_group({"params": model[1].parameters()})
        state.roll_back()
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": model[1].parameters()})
    other = net()
    with pytest.raises(ConfigError, match="make all parameter groups before the State is made"):
        State(model=other, optimizer=sgd(other[0])).load(state.export())


def test_extra_state_of_modules_is_undone() -> None:
    model = torch.nn.Sequential(Counting())
    state = State(model=model)
    model[0].calls = 3
    state.seal()
    model[0].calls = 5
    state.roll_back()
    assert model[0].calls == 3


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (lambda: torch.nn.Sequential(torch.nn.LazyLinear(3)), r"lazy layers.*call it on a batch before"),
        (torch.nn.LazyBatchNorm1d, "lazy layers"),
        (lambda: torch.nn.Linear, "is a type: State holds"),
        (lambda: torch.optim.SGD, "is a type: State holds"),
    ],
)
def test_what_is_not_whole_is_refused(given: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        State(model=given())


def test_a_wrapped_module_and_one_that_is_not_held_are_refused() -> None:
    state, stranger = State(model=net()), net()

    @elastic
    def train(state: State) -> None:
        with pytest.raises(ConfigError, match=r"State\(net=net\.module\)"):
            State(net=state.ddp)
        with pytest.raises(ConfigError, match="a module that the State holds, or a part of one"):
            state.wrap(stranger)
        assert state.wrap(state.model[0]) is state.wrap(state.model[0])

    train(state)


def test_what_is_unfrozen_is_reduced_from_then_on() -> None:
    model = net()
    model[0].requires_grad_(requires_grad=False)
    state = State(model=model)

    @elastic
    def train(state: State) -> None:
        frozen = state.ddp
        assert state.ddp is frozen
        model[0].requires_grad_()
        assert state.ddp is not frozen
        state.ddp(torch.ones(1, 2)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    train(state)


def test_what_a_broken_step_has_frozen_is_trained_again() -> None:
    model = net()
    model[1].requires_grad_(requires_grad=False)
    state = State(model=model)
    state.seal()
    model[0].requires_grad_(requires_grad=False)
    model[1].requires_grad_()
    state.roll_back()
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]


class Outer(torch.optim.SGD):
    """Steps by another optimizer, which has its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=0.1)
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def test_an_optimizer_that_the_state_does_not_hold_must_not_change_its_modules() -> None:
    model, other = net(), net()
    state = State(model=model)
    state.seal()
    sgd(other).step()
    assert state.stands_at_commit
    with pytest.raises(ConfigError, match=r"changes parameters of model, and the State does not hold it"):
        sgd(model).step()
    inner = sgd(model)
    state = State(model=model, optimizer=Outer(inner))
    state.seal()
    inner.step()
    assert not state.stands_at_commit, "the inner one of an optimizer that is held"


def test_of_what_an_inner_optimizer_changes_the_outer_one_must_hold_all() -> None:
    """Of what only the inner one was given nobody keeps anything; what is of no module of the State is no matter."""
    model, other = net(), net()
    inner = sgd(model[0])
    state = State(model=model, optimizer=Outer(inner))
    state.seal()
    inner.add_param_group({"params": other.parameters()})
    inner.step()
    assert not state.stands_at_commit
    inner.add_param_group({"params": model[1].parameters()})
    with pytest.raises(ConfigError, match=r"changes parameters of model, and the State does not hold it"):
        inner.step()


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.ones(3, 2)).square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
def test_with_undo_steps_a_step_of_an_optimizer_is_undone_as_well(kind: Any) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer, undo_steps=True)

    def step() -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss.item()

        optimizer.step(closure)

    def picture() -> str:
        return str([[p.tolist() for p in model.parameters()], optimizer.state_dict()])

    state.seal()
    first = picture()
    step()
    assert state.stands_at_commit
    state.roll_back()
    assert picture() == first, "there were no slots before the first step"
    for _ in range(2):
        step()
        state.seal()
    kept = picture()
    step()
    after = picture()
    state.restore()
    assert picture() == kept != after
    step()
    assert picture() == after
    state.doubt()
    assert not state.stands_at_commit, "in the middle of a copy"
