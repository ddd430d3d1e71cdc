"""Notices steps of optimizers that a State should hold and does not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stoker.errors import ConfigError
from stoker.train.keras_state import KerasOptimizer
from stoker.train.state_contents import Contents

OnStep = Callable[[Any], None]


def watch_steps(owner: object, contents: Contents, on_step: OnStep) -> None:
    """Call `on_step(optimizer)` before each step that changes parameters of the modules in `contents`.

    `on_step` is a bound method, which is forgotten with its `owner`. An optimizer that the contents do not hold may be
    the inner one of one that they do; where it is not, its step raises ConfigError.
    """
    known = weakref.WeakMethod(on_step)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        on_step = known()
        if on_step is not None and _steps_for(optimizer, contents):
            on_step(optimizer)

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(owner, handle.remove).atexit = False
    held: list[Any] = [*contents.optimizers.values()]
    for optimizer in held:
        if isinstance(optimizer, KerasOptimizer):
            optimizer.register_step_pre_hook(lambda one, *_: _call(known, one))


def _call(known: weakref.WeakMethod[OnStep], optimizer: Any) -> None:
    on_step = known()
    if on_step is not None:
        on_step(optimizer)


def _steps_for(optimizer: torch.optim.Optimizer, contents: Contents) -> bool:
    """Whether a step of it is one of the State's. Raises ConfigError where it should be and cannot be kept."""
    held: list[Any] = [*contents.optimizers.values()]
    if any(optimizer is one for one in held):
        return True
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    kept = {
        id(p)
        for one in held
        if not isinstance(one, KerasOptimizer)
        for group in one.param_groups
        for p in group["params"]
    }
    for name, module in contents.modules.items():
        # The inner one of one that is held may have parameters of others besides; but none that nobody keeps.
        if any(id(parameter) in mine and id(parameter) not in kept for parameter in module.parameters()):
            raise ConfigError(
                f"the {type(optimizer).__name__} that steps changes parameters of {name}, and the State does not hold "
                "it: a worker that joins would go on with an optimizer that remembers nothing, and a broken step could "
                f"not be told. Name it when the State is made, State({name}={name}, optimizer=optimizer)"
            )
    return bool(mine & kept)
