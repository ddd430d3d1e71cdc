"""Gradients and buffers as a few flat tensors, one for each type: what is summed and exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

ALIGNED = 16
"""Elements to which each place is rounded up: kernels may take other ways through tensors that lie otherwise."""


class Place(NamedTuple):
    """Where a tensor lies among those of its type."""

    dtype: torch.dtype
    start: int
    shape: torch.Size


class FlatLayout:
    """Places for gradients, for a mark of each that is there, and for buffers."""

    def __init__(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        self.sizes: dict[torch.dtype, int] = {}
        self.gradients = [self._place(one.dtype, one.shape) for one in parameters]
        self.buffers = [self._place(_summed_as(one.dtype), one.shape) for one in buffers]
        self.marks = self._place(torch.float32, torch.Size([len(parameters)]))
        self.device = parameters[0].device if parameters else torch.device("cpu")

    def new(self) -> dict[torch.dtype, torch.Tensor]:
        """Zeros."""
        return {
            dtype: torch.zeros(size, dtype=dtype, device=self.device) for dtype, size in self.sizes.items()
        }

    def _place(self, dtype: torch.dtype, shape: torch.Size) -> Place:
        start = self.sizes.get(dtype, 0)
        self.sizes[dtype] = start + -(-shape.numel() // ALIGNED) * ALIGNED
        return Place(dtype, start, shape)


Flat = dict[torch.dtype, torch.Tensor]


def view_of(flat: Flat, place: Place) -> torch.Tensor:
    """The tensor at a place."""
    return flat[place.dtype][place.start : place.start + place.shape.numel()].view(place.shape)


def add(left: Flat, right: Flat) -> Flat:
    """Into the left one."""
    for dtype, held in left.items():
        held.add_(right[dtype])
    return left


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.bool else dtype
