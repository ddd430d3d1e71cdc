"""What a copy or a checkpoint holds of a module, whatever made it."""

from __future__ import annotations

import copy
from typing import Any

import torch

from stoker.train.keras_state import export_keras, is_keras_module, load_keras


def export_module(module: torch.nn.Module) -> dict[str, Any]:
    """Of its own tensors."""
    return export_keras(module) if is_keras_module(module) else module.state_dict()


def load_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Copy into its tensors. Raises RuntimeError, ValueError where the state is another module's."""
    if is_keras_module(module):
        load_keras(module, state)
    else:
        module.load_state_dict(state)


def hyperparameters_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a script may set between steps, copied."""
    return [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
