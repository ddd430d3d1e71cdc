"""Gradients and buffers as a few flat tensors, one for each type: what is summed and exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNED = 16
"""Elements to which each place is rounded up: kernels may take other ways through tensors that lie otherwise."""


class Flat:
    """Places for gradients, for a mark of each that is there, and for buffers.

    Each flat tensor has `spare` elements more at its end, so that it can be cut into as many even pieces.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], spare: int
    ) -> None:
        sizes: dict[torch.dtype, int] = {}

        def place(dtype: torch.dtype, shape: torch.Size) -> tuple[torch.dtype, int, torch.Size]:
            start = sizes.get(dtype, 0)
            sizes[dtype] = start + -(-shape.numel() // ALIGNED) * ALIGNED
            return dtype, start, shape

        gradients = [(*place(one.dtype, one.shape), strides_of(one)) for one in parameters]
        held = [place(_summed_as(one.dtype), one.shape) for one in buffers]
        marks = place(torch.float32, torch.Size([len(parameters) + len(buffers)]))
        device = parameters[0].device if parameters else torch.device("cpu")
        self.spare = spare
        self.tensors = {
            dtype: torch.zeros(size + spare, dtype=dtype, device=device) for dtype, size in sizes.items()
        }

        def view(where: tuple[torch.dtype, int, torch.Size]) -> torch.Tensor:
            dtype, start, shape = where
            return self.tensors[dtype][start : start + shape.numel()].view(shape)

        self.gradients = [
            self.tensors[dtype].as_strided(shape, strides, start)
            for dtype, start, shape, strides in gradients
        ]
        """Laid out as the parameters are: fused optimizers go through both side by side."""
        self.buffers = [view(where) for where in held]
        self.marks = view(marks)
        """Above zero for each gradient that is there, and then for each buffer that was changed."""

    def scale(self, weight: float) -> None:
        """All that can be weighted."""
        for dtype, tensor in self.tensors.items():
            if dtype.is_floating_point or dtype.is_complex:
                tensor.mul_(weight)

    def zero(self) -> None:
        for tensor in self.tensors.values():
            tensor.zero_()

    def copy(self, other: Flat) -> None:
        for dtype, tensor in self.tensors.items():
            tensor.copy_(other.tensors[dtype])

    def add(self, other: Flat) -> Flat:
        """Into this one."""
        for dtype, tensor in self.tensors.items():
            tensor.add_(other.tensors[dtype])
        return self


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """As the tensor is laid out, where that is dense."""
    return torch.empty_like(tensor, device="meta").stride()


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.bool else dtype
