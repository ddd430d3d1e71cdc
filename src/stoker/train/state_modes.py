"""Train or eval mode, and whether gradients are recorded: not state, but a training function relies on them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Modes:
    """The modes of some modules, and of this thread, when it was made."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._training = [(module, module.training) for top in modules for module in top.modules()]
        self._records_gradients = torch.is_grad_enabled()

    def put_back(self) -> None:
        """Make them what they were; modules that came since stay as they are."""
        for module, training in self._training:
            module.training = training
        torch.set_grad_enabled(self._records_gradients)
