"""DistributedDataParallel around the modules of a State, for one generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from stoker.errors import ConfigError

Wrap = Callable[[torch.nn.Module], DistributedDataParallel]


class _Wrapped(NamedTuple):
    by: DistributedDataParallel
    trained: set[int]
    """Which of its parameters it reduces gradients of, by their ids: some libraries change their order."""


class Wrappers:
    """One for each module that was asked for, of those that a State holds or parts of them."""

    def __init__(self, held: Mapping[str, torch.nn.Module]) -> None:
        self._held = held
        self._wrapped: dict[int, _Wrapped] = {}

    def of(self, module: torch.nn.Module, wrap: Wrap) -> DistributedDataParallel:
        """The wrapper that is there, or a new one, as also where other parameters are to be trained than before: one
        that was frozen when a wrapper was made would never be reduced by it.

        Raises ConfigError for a module that the State does not hold.
        """
        trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        known = self._wrapped.get(id(module))
        if known is None or known.trained != trained:
            self._check_held(module)
            self._wrapped.pop(id(module), None)
            known = self._wrapped[id(module)] = _Wrapped(wrap(module), trained)
        return known.by

    def all(self) -> list[DistributedDataParallel]:
        return [one.by for one in self._wrapped.values()]

    def forget(self) -> None:
        """The group goes away."""
        self._wrapped.clear()

    def _check_held(self, module: torch.nn.Module) -> None:
        held = {id(parameter) for one in self._held.values() for parameter in one.parameters()}
        if any(id(parameter) not in held for parameter in module.parameters()):
            raise ConfigError(
                f"state.wrap takes a module that the State holds, or a part of one, and this {type(module).__name__} "
                "is none: workers that join would begin with weights of their own. Name it when the State is made, "
                "State(name=module, …)"
            )
