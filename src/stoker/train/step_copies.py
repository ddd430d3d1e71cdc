"""Copies of parameters and of optimizers' slots, by which an optimizer's step is undone."""

from __future__ import annotations

from typing import Any

import torch

from stoker.train.packing import pack, unpack
from stoker.train.state_contents import Contents


class StepCopies:
    """What they were at the last `renew`, on the device that they are on."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._parameters: list[torch.nn.Parameter] = []
        self._slots: dict[str, Any] = {}
        """The plain part of each optimizer's state, without its groups."""
        self._copies: list[torch.Tensor] = []
        """Of the parameters, then of the slots."""

    def renew(self) -> None:
        """Copy them; into the last copies where as many are still of the same kinds."""
        held = self._contents
        tops = held.modules.values()
        self._parameters = list(dict.fromkeys(p for module in tops for p in module.parameters()))
        tensors = [parameter.detach() for parameter in self._parameters]
        self._slots = {name: pack(one.state_dict(), tensors) for name, one in held.optimizers.items()}
        if [_kind(one) for one in self._copies] != [_kind(one) for one in tensors]:
            self._copies = [torch.empty_like(one) for one in tensors]
        if tensors:
            torch._foreach_copy_(self._copies, tensors)

    def put_back(self) -> None:
        """Make them what they were."""
        with torch.no_grad():
            for parameter, copy in zip(self._parameters, self._copies, strict=False):
                parameter.copy_(copy)
        slots = [
            copy.clone() for copy in self._copies[len(self._parameters) :]
        ]  # an optimizer keeps what it loads
        tensors = [*self._copies[: len(self._parameters)], *slots]
        for name, plain in self._slots.items():
            self._contents.optimizers[name].load_state_dict(unpack(plain, tensors))


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
