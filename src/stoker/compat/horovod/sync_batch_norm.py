"""`hvd.SyncBatchNorm`: batch normalisation over the batches of all ranks, on any device."""

from __future__ import annotations

import torch

from stoker.compat.horovod.basics import horovod_world
from stoker.compat.horovod.differentiable import allreduce
from stoker.compat.horovod.reductions import Sum
from stoker.errors import ConfigError


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """As torch's BatchNorm over (N, C, ...), with the mean and variance of what all ranks hold."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ConfigError(f"SyncBatchNorm takes (N, C, ...), not {list(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalised. Raises ConfigError for an input without channels."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or horovod_world().place.size == 1:
            return super().forward(input)
        wide = input.transpose(0, 1).reshape(input.shape[1], -1).double()
        counted = wide.new_full((1,), wide.shape[1])
        sums = allreduce(torch.cat((wide.sum(1), counted)), op=Sum, name="sync_batch_norm.sums")
        total, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        # From the mean of all, not as the difference of large squares.
        squares = allreduce(((wide - mean[:, None]) ** 2).sum(1), op=Sum, name="sync_batch_norm.squares")
        variance = squares / total
        if self.training and self.running_mean is not None:
            self._follow(mean.detach(), squares.detach() / (total - 1).clamp(min=1))
        shape = (1, -1, *[1] * (input.dim() - 2))
        scale = (variance + self.eps).rsqrt()
        result = (input.double() - mean.view(shape)) * scale.view(shape)
        if self.affine:
            result = result * self.weight.double().view(shape) + self.bias.double().view(shape)
        return result.to(input.dtype)

    def _follow(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Running statistics; without a momentum they are the means of all batches."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)
