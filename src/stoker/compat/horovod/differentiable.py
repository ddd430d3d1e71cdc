"""The collectives that gradients pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stoker.compat.horovod.compression import Compression
from stoker.compat.horovod.handles import part
from stoker.compat.horovod.movements import alltoall_async, broadcast_async, start_allgather
from stoker.compat.horovod.process_sets import span_of
from stoker.compat.horovod.reductions import (
    Average,
    Compressor,
    Op,
    Sum,
    check_op,
    reducescatter_async,
    start_allreduce,
)
from stoker.errors import ConfigError

Scales = tuple[float, float]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Reduce over all ranks into a new tensor; the mean, unless `op` says otherwise."""
    chosen, scales = check_op(op, average), (prescale_factor, postscale_factor)
    (result,) = _applied(_Allreduce, chosen, name, scales, compression, process_set, tensor)
    whole: torch.Tensor = result
    return whole


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """Reduce several tensors into new ones."""
    chosen, scales = check_op(op, average), (prescale_factor, postscale_factor)
    return list(_applied(_Allreduce, chosen, name, scales, compression, process_set, *tensors))


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The rows of all ranks, in the order of ranks."""
    result: torch.Tensor = _applied(_Allgather, tensor, name, process_set)
    return result


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> list[torch.Tensor]:
    """The rows of all ranks, of several tensors."""
    return [allgather(one, part(name, number), process_set) for number, one in enumerate(tensors)]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Rank `root_rank`'s tensor."""
    result: torch.Tensor = _applied(_Broadcast, tensor, root_rank, name, process_set)
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """The rows that all ranks have sent to this one; with `splits` also how many came from each."""
    size = span_of(process_set).size
    even = None
    if splits is None and tensor.dim() and tensor.shape[0] % size == 0:
        even = [tensor.shape[0] // size] * size
    rows, received = _applied(_Alltoall, tensor, splits if splits is not None else even, name, process_set)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce, of which this rank gets its rows."""
    sent, context = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    rows: torch.Tensor = _applied(_Reducescatter, sent, check_op(op), name, scales, process_set)
    return compression.decompress(rows, context)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors, of each of which this rank gets its rows."""
    scales = (prescale_factor, postscale_factor)
    return [
        reducescatter(one, part(name, number), compression, op, process_set, *scales)
        for number, one in enumerate(tensors)
    ]


def _applied(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        op: Op,
        name: str | None,
        scales: Scales,
        compression: Compressor,
        process_set: Any,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.of = (op, scales, process_set)
        outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
        start_allreduce(tensors, outputs, op, name, scales, compression, process_set).wait()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, scales, process_set = ctx.of
        if op not in (Average, Sum):
            raise ConfigError(f"there is no gradient of an allreduce with op={op}")
        outputs = [torch.empty_like(grad) for grad in grads]
        start_allreduce(grads, outputs, op, None, scales, process_set=process_set).wait()
        return None, None, None, None, None, *outputs


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: Any) -> torch.Tensor:
        gathered = start_allgather(tensor, name, process_set)
        ctx.shape, ctx.process_set = tensor.shape, process_set
        ctx.begin, ctx.rows = sum(gathered.counts[: gathered.rank]), gathered.counts[gathered.rank]
        result: torch.Tensor = gathered.handle.wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        whole = _summed(grads[0], ctx.process_set)
        return whole[ctx.begin : ctx.begin + ctx.rows].reshape(ctx.shape), None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: Any
    ) -> torch.Tensor:
        ctx.of = (root_rank, process_set)
        result: torch.Tensor = broadcast_async(tensor, root_rank, name, process_set).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        root_rank, process_set = ctx.of
        whole = _summed(grads[0], process_set)
        span = span_of(process_set)
        is_root = span.ranks[span.rank] == root_rank
        return whole if is_root else torch.zeros_like(whole), None, None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: Any) -> Any:
        if splits is None:
            alltoall_async(tensor, None, name, process_set)  # says what is wrong with it
        rows, received = alltoall_async(tensor, splits, name, process_set).wait()
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back, _ = alltoall_async(grads[0], ctx.received, None, ctx.process_set).wait()
        return back, None, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: Op, name: str | None, scales: Scales, process_set: Any
    ) -> torch.Tensor:
        ctx.of = (op, scales, process_set)
        result: torch.Tensor = reducescatter_async(tensor, name, op, process_set, *scales).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, scales, process_set = ctx.of
        whole = start_allgather(grads[0], None, process_set).handle.wait()
        factor = scales[0] * scales[1] / (span_of(process_set).size if op == Average else 1)
        return (whole if factor == 1.0 else whole * factor), None, None, None, None


def _summed(grad: torch.Tensor, process_set: Any) -> torch.Tensor:
    whole = torch.empty_like(grad)
    start_allreduce([grad], [whole], Sum, None, process_set=process_set).wait()
    return whole
