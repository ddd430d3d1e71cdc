"""Train or eval mode, what is frozen, whether gradients are recorded: not state, but training functions rely on it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Modes:
    """The modes of some modules and their parameters, and of this thread, when it was made."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        tops = list(modules)
        self._training = [(module, module.training) for top in tops for module in top.modules()]
        self._trained = [
            (parameter, parameter.requires_grad) for top in tops for parameter in top.parameters()
        ]
        self._records_gradients = torch.is_grad_enabled()

    def put_back(self) -> None:
        """Make them what they were; modules and parameters that came since stay as they are."""
        for module, training in self._training:
            module.training = training
        for parameter, is_trained in self._trained:
            parameter.requires_grad = is_trained
        torch.set_grad_enabled(self._records_gradients)
