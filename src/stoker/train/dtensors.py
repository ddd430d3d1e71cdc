"""Tensors that are divided over ranks: which piece of the whole is here, and pieces put together to others.

`torch.distributed.tensor` takes a while to import, so that is left to who uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from stoker.errors import ConfigError


class Box(NamedTuple):
    """Where a piece lies in a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


def is_dtensor(value: Any) -> bool:
    """Whether it is a `DTensor`, of which only a piece may be here."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def box_of(tensor: torch.Tensor) -> Box:
    """Which part of the whole is here. Raises ConfigError for a sum that is still to be taken."""
    if not is_dtensor(tensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    divided: Any = tensor
    if any(placement.is_partial() for placement in divided.placements):
        raise ConfigError(
            "a DTensor with the placement Partial holds a part of a sum, no piece of a tensor: redistribute it to "
            "Shard or Replicate before it is kept"
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        divided.shape, divided.device_mesh, divided.placements
    )
    return Box(tuple(offsets), tuple(shape))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The piece that is here: the tensor's own memory."""
    divided: Any = tensor.detach()
    local: torch.Tensor = divided.to_local() if is_dtensor(divided) else divided
    return local


def refuse_divided(modules: Mapping[str, torch.nn.Module]) -> None:
    """Raises ConfigError where a State's own module is divided: its pieces would be lost with a worker, and with the
    group that they belong to."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for name, module in modules.items():
        if any(is_dtensor(parameter) for parameter in module.parameters()):
            raise ConfigError(
                f"{name} has been divided over the workers (FSDP, DTensor), and no worker could give a copy of it: "
                f"give the State a function that makes it and its optimizer, State({name}=stoker.Sharded(build)), see "
                "docs/how-to/sharded-models.md"
            )


class Target(NamedTuple):
    """A tensor that is to be filled from pieces, divided as another is."""

    tensor: torch.Tensor
    box: Box

    @classmethod
    def like(
        cls, shape: Sequence[int], dtype: torch.dtype, model: torch.Tensor | None, device: torch.device
    ) -> Target:
        """Divided as `model` is, where that is divided and of this shape; else whole."""
        if model is None or not is_dtensor(model) or tuple(model.shape) != tuple(shape):
            whole = torch.zeros(tuple(shape), dtype=dtype, device=device)
            return cls(whole, box_of(whole))
        from torch.distributed.tensor import DTensor

        like: Any = model
        box = box_of(like)
        local = torch.zeros(box.shape, dtype=dtype, device=like.device)
        tensor = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return cls(tensor, box)

    def fill(self, piece: torch.Tensor, box: Box) -> None:
        """Copy what of a piece belongs here."""
        common = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(self.box.offsets, self.box.shape, box.offsets, box.shape, strict=True)
        ]
        if any(end <= start for start, end in common):
            return
        mine = tuple(slice(s - a, e - a) for (s, e), a in zip(common, self.box.offsets, strict=True))
        theirs = tuple(slice(s - b, e - b) for (s, e), b in zip(common, box.offsets, strict=True))
        with torch.no_grad():
            local_of(self.tensor)[mine].copy_(piece[theirs])
