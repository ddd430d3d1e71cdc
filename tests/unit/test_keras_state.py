"""State with models and optimizers of Keras 3, on its torch backend."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from stoker.errors import ConfigError
from stoker.train.state import State

pytestmark = [
    pytest.mark.usefixtures("fresh_process"),
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed"),
]


@pytest.fixture(scope="module")
def keras() -> Any:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    return importlib.import_module("keras")


def make(keras: Any, **more: Any) -> State:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=7),
            layers.Dense(1),
        ]
    )
    return State(model=model, optimizer=keras.optimizers.Adam(0.01), epoch=0, **more)


def backward(state: State) -> None:
    state.model(torch.randn(8, 4), training=True).square().mean().backward()


def step(state: State) -> None:
    backward(state)
    weights = state.model.trainable_weights
    with torch.no_grad():
        state.optimizer.apply_gradients(zip([w.value.grad for w in weights], weights, strict=True))


def values(variables: Any) -> list[Any]:
    return [variable.value.tolist() for variable in variables]


def test_a_step_that_broke_before_its_optimizer_leaves_nothing_behind(keras: Any) -> None:
    state = make(keras)
    state.seal()
    before = values(state.model.variables)
    backward(state)
    state.optimizer.learning_rate = 0.5
    state.optimizer.beta_1 = 0.1
    changed = [one != other for one, other in zip(before, values(state.model.variables), strict=True)]
    assert sum(changed) == 3, "moving mean and variance, and the seed of dropout"
    assert state.stands_at_commit
    state.roll_back()
    assert values(state.model.variables) == before
    assert float(state.optimizer.learning_rate.value) == pytest.approx(0.01)
    assert state.optimizer.beta_1 == 0.9
    assert all(variable.value.grad is None for variable in state.model.trainable_variables)


def test_a_keras_optimizer_that_has_stepped_is_noticed(keras: Any) -> None:
    state = make(keras)
    state.seal()
    step(state)
    assert not state.stands_at_commit
    state.seal()
    backward(state)
    state.optimizer.apply(
        [v.value.grad for v in state.model.trainable_variables], state.model.trainable_variables
    )
    assert not state.stands_at_commit


def test_a_copy_carries_variables_once_and_the_optimizer(keras: Any) -> None:
    state = make(keras, accuracy=keras.metrics.Mean())
    step(state)
    state.accuracy.update_state([1.0, 2.0])
    exported = state.export()
    assert len(exported["modules"]["model"]["variables"]) == len(state.model.variables)
    other = make(keras, accuracy=keras.metrics.Mean())
    other.load(exported)
    assert values(other.model.variables) == values(state.model.variables)
    assert values(other.optimizer.variables) == values(state.optimizer.variables)
    assert float(other.accuracy.result()) == 1.5
    step(other)
    assert values(other.optimizer.variables)[0] == 2


def test_a_seed_stays_a_ranks_own_but_not_what_is_used_of_it(keras: Any) -> None:
    state, other = make(keras), make(keras)
    seed = next(v for v in other.model.variables if "seed" in v.path)
    seed.assign([99, 0])
    backward(state)
    other.load(state.export())
    assert seed.value.tolist() == [99, 1]


def test_frozen_weights_are_not_copied_at_a_commit(keras: Any) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    model.layers[0].trainable = False
    State(model=model)
    assert len(list(model.buffers())) == 2


def test_torch_modules_within_keep_their_buffers(keras: Any) -> None:
    def made() -> State:
        model = keras.Sequential(
            [keras.layers.Dense(3), keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(3))]
        )
        model(torch.zeros(2, 4))
        return State(model=model)

    state, other = made(), made()
    state.seal()
    before = [buffer.clone() for buffer in state.model.buffers()]
    state.model(torch.randn(8, 4), training=True)
    assert not all(map(torch.equal, before, state.model.buffers()))
    other.load(state.export())
    assert all(map(torch.equal, state.model.buffers(), other.model.buffers()))
    state.roll_back()
    assert all(map(torch.equal, before, state.model.buffers()))


def test_what_does_not_fit_is_refused_in_words(keras: Any) -> None:
    state = make(keras)
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ConfigError, match="does not fit 'model'"):
        State(model=other, optimizer=keras.optimizers.Adam(0.1), epoch=0).load(state.export())


def test_what_is_not_built_is_refused(keras: Any) -> None:
    with pytest.raises(ConfigError, match=r"model is not built .*call it on a batch"):
        State(model=keras.Sequential([keras.layers.Dense(3)]))
    with pytest.raises(ConfigError, match=r"call optimizer\.build\(model\.trainable_variables\)"):
        State(optimizer=keras.optimizers.SGD(0.1))


def test_a_rehearsal_may_not_step_but_may_move_statistics(keras: Any) -> None:
    state = make(keras)
    before = values(state.model.variables)
    with state.rehearsal():
        backward(state)
    assert values(state.model.variables) == before
    with pytest.raises(ConfigError, match="must not step an optimizer"), state.rehearsal():
        step(state)
    with pytest.raises(ConfigError, match="changed parameters"), state.rehearsal():
        state.model.layers[0].kernel.assign(torch.ones(4, 3))
