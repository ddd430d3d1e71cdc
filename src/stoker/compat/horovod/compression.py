"""What gradients are sent as."""

from __future__ import annotations

from typing import Any

import torch


class NoneCompressor:
    """As they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """What was sent, as it was before."""
        return tensor


class FP16Compressor(NoneCompressor):
    """Floating-point numbers as 16 bits, also while they are summed."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor.to(context)


class Compression:
    """`hvd.Compression.none`, `hvd.Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor
