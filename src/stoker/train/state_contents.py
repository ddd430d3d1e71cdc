"""What a State holds, sorted by kind: copied out, and taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from stoker.errors import ConfigError
from stoker.train.keras_state import KerasOptimizer, adapted
from stoker.train.module_state import export_module, load_module
from stoker.train.packing import pack, placed_as
from stoker.train.state_generators import with_generators

OPTIMIZERS = (torch.optim.Optimizer, KerasOptimizer)


class Contents(NamedTuple):
    """By the names that a script gives."""

    given: dict[str, Any]
    """What the script has given of which an adapter is held."""
    modules: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    objects: dict[str, Any]
    """With `state_dict()` and `load_state_dict()`."""
    values: dict[str, Any]

    def names(self) -> list[str]:
        return [*self.modules, *self.optimizers, *self.objects, *self.values]

    def main_module(self) -> torch.nn.Module | None:
        """The only module, or the one named `model`."""
        only = next(iter(self.modules.values())) if len(self.modules) == 1 else None
        return self.modules.get("model", only)

    def export(self) -> dict[str, Any]:
        """All of it, not copied."""
        return {
            "modules": {k: export_module(m) for k, m in self.modules.items()},
            "optimizers": {k: o.state_dict() for k, o in self.optimizers.items()},
            "objects": {k: o.state_dict() for k, o in self.objects.items()},
            "values": self.values,
        }

    def check_names(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where an exported state is another script's."""
        for kind in ("modules", "optimizers", "objects"):
            mine = getattr(self, kind)
            if set(state[kind]) != set(mine):
                raise ConfigError(
                    f"the state to load has {kind} {sorted(state[kind])}, this script's State has {sorted(mine)}: is "
                    "it from another script?"
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over an exported state, each tensor on the device of its own. Raises ConfigError."""
        try:
            for name, module in self.modules.items():
                load_module(module, state["modules"][name])
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(state["optimizers"][name])
        except (RuntimeError, ValueError) as error:
            groups = (
                "; make all parameter groups before the State is made, and freeze those that come later until then"
                if "parameter groups" in str(error)
                else ""
            )
            raise ConfigError(
                f"the state to load does not fit {name!r}: is it from another version of this script? {error}{groups}"
            ) from error
        for name, held in self.objects.items():
            held.load_state_dict(placed_as(state["objects"][name], held.state_dict()))
        self.values.update(placed_as(state["values"], self.values))


def sort_out(items: Mapping[str, Any]) -> Contents:
    """By kind. Raises ConfigError, naming it, for what cannot be copied."""
    held = adapted(with_generators(items))
    modules = {k: v for k, v in held.items() if isinstance(v, torch.nn.Module)}
    for name, module in modules.items():
        _check_module(name, module)
    optimizers: dict[str, Any] = {k: v for k, v in held.items() if isinstance(v, OPTIMIZERS)}
    rest = {k: v for k, v in held.items() if k not in modules and k not in optimizers}
    objects = {k: v for k, v in rest.items() if _is_object(v)}
    values = {k: v for k, v in rest.items() if k not in objects}
    pack(values, [])
    pack({k: v.state_dict() for k, v in objects.items()}, [])
    given = {k: v for k, v in items.items() if held[k] is not v}
    return Contents(given, modules, optimizers, objects, values)


def _is_object(value: Any) -> bool:
    keeps = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return keeps and not isinstance(value, type)


def _check_module(name: str, module: torch.nn.Module) -> None:
    """Raises ConfigError for one that is not whole yet, or belongs to one world only."""
    if isinstance(module, DistributedDataParallel):
        raise ConfigError(
            f"{name} is a DistributedDataParallel, whose group ends with the first change of the world: give the State "
            f"the module in it, State({name}={name}.module), and call state.ddp or state.wrap({name})"
        )
    if any(is_lazy(tensor) for tensor in [*module.parameters(), *module.buffers()]):
        raise ConfigError(
            f"{name} has lazy layers, whose parameters are not made yet and could not be copied to a worker that "
            "joins: call it on a batch before the State and the optimizer are made"
        )
