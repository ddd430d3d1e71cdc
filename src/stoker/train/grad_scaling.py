"""What a `torch.amp.GradScaler` remembers of the step under way, which is no part of its `state_dict()`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def forget_scaling(objects: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Undo what scalers among the objects had done in a step that is undone.

    A scaler notes that it has unscaled an optimizer's gradients until its `update()`. Where that never came, the next
    step's would be taken for unscaled as they are. It leaves its scale with a fused optimizer, too, and would multiply
    the next by it. By reading PyTorch 2.13 (`torch/amp/grad_scaler.py`).
    """
    for held in objects:
        if isinstance(held, torch.amp.GradScaler):
            vars(held).get("_per_optimizer_states", {}).clear()
    for optimizer in optimizers:
        for left in ("grad_scale", "found_inf"):
            vars(optimizer).pop(left, None)
