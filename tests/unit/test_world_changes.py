"""Rules and callbacks for changes of the world, and `restore`, in a world of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker.errors import ConfigError
from stoker.train.elastic import elastic
from stoker.train.state import State
from stoker.train.world_changes import WorldChanges

pytestmark = pytest.mark.usefixtures("fresh_process")


def make() -> State:
    model = torch.nn.Linear(2, 1)
    return State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), seen=0)


def test_a_rule_knows_the_world_of_the_last_commit() -> None:
    state = make()
    sizes: list[tuple[int, int]] = []

    @state.on_world_change
    def rule(ctx: Any) -> None:
        sizes.append((ctx.world_size, ctx.previous_world_size))

    @elastic
    def train(state: State) -> None:
        state.commit()

    train(state)
    assert sizes == [(1, 0)]
    assert callable(rule)
    state._changes.entered()
    assert sizes == [(1, 0), (1, 1)]
    assert state.export()["world"]["size"] == 1


def test_the_size_of_the_world_belongs_to_a_copy_and_older_copies_do_without() -> None:
    state = make()
    exported = state.export()
    exported["world"]["size"] = 7
    state.load(exported)
    assert state._changes.committed_size == 7
    del exported["world"]
    state.load(exported)
    assert state._changes.committed_size == 0


def test_reset_callbacks_are_for_all_worlds_but_the_first() -> None:
    changes, called = WorldChanges(), []
    changes.add_reset([lambda: called.append("a"), lambda: called.append("b")])
    changes.add_reset(lambda: called.append("c"))  # type: ignore[arg-type]
    changes.entered()
    assert called == []
    changes.entered()
    assert called == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="functions without arguments"):
        changes.add_reset([3])  # type: ignore[list-item]


def test_restore_undoes_a_step_before_its_optimizer_and_refuses_after() -> None:
    state = make()
    state.seal()
    state.seen = 5
    state.model(torch.ones(1, 2)).sum().backward()
    state.restore()
    assert state.seen == 0
    assert state.model.weight.grad is None
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    with pytest.raises(ConfigError, match="cannot undo an optimizer's step"):
        state.restore()


def test_sync_is_for_the_elastic_function() -> None:
    state = make()
    with pytest.raises(ConfigError, match="there is no world yet"):
        state.sync()

    @elastic
    def train(state: State) -> None:
        state.sync()
        state.check_host_updates()
        with pytest.raises(ConfigError, match="no such rank in a world of 1"):
            state.sync(1)

    train(state)
