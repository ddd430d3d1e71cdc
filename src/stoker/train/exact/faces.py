"""What a script sees in exact mode in place of its model, optimizers and schedulers: they act once a global batch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from stoker.errors import ConfigError
from stoker.train.exact.engine import Engine


class ExactModule(torch.nn.Module):
    """The model, as `state.ddp` gives it: the engine sees its gradients when a backward pass ends."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> NoReturn:
        raise ConfigError(
            "exact mode reduces gradients once a global batch by itself: no_sync() has no place in it, leave it out"
        )


class ExactOptimizer:
    """An optimizer that steps with the last micro-batch of a global batch; all else is its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self._optimizer = optimizer
        self._engine = engine

    def step(self, closure: Any = None) -> None:
        """With the last micro-batch; before, nothing. Raises ConfigError for a closure, which would train again."""
        if closure is not None:
            raise ConfigError(
                "exact mode takes optimizers that step without a closure: one backward() a micro-batch"
            )
        if not self._engine.is_between:
            self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)


class ExactScheduler:
    """A learning-rate scheduler that steps once a global batch, or once an epoch where it is called after the loop."""

    def __init__(self, scheduler: Any, engine: Engine) -> None:
        self._scheduler = scheduler
        self._engine = engine

    def step(self, *args: Any, **kwargs: Any) -> None:
        """With the last micro-batch; before, nothing."""
        if not self._engine.is_between:
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._scheduler, name, value)
