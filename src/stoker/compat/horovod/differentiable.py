"""The collectives that gradients pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stoker.compat.horovod.basics import horovod_world
from stoker.compat.horovod.compression import Compression
from stoker.compat.horovod.movements import allgather_async, alltoall_async, broadcast_async
from stoker.compat.horovod.reductions import (
    Average,
    Compressor,
    Op,
    Sum,
    check_op,
    check_process_set,
    reducescatter_async,
    start_allreduce,
)
from stoker.errors import ConfigError


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
    check_process_set(process_set)
    chosen, scales = check_op(op, average), (prescale_factor, postscale_factor)
    result: torch.Tensor = _applied(_Allreduce, tensor, chosen, name, scales, compression)
    return result


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
    check_process_set(process_set)
    scales = (prescale_factor, postscale_factor)
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    result: list[torch.Tensor] = start_allreduce(
        tensors, outputs, check_op(op, average), name, scales, compression
    ).wait()
    return result


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> torch.Tensor:
    """The rows of all ranks, in the order of ranks."""
    check_process_set(process_set)
    result: torch.Tensor = _applied(_Allgather, tensor, name)
    return result


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Rank `root_rank`'s tensor."""
    check_process_set(process_set)
    result: torch.Tensor = _applied(_Broadcast, tensor, root_rank, name)
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """The rows that all ranks have sent to this one; with `splits` also how many came from each."""
    check_process_set(process_set)
    size = horovod_world().place.size
    even = None
    if splits is None and tensor.dim() and tensor.shape[0] % size == 0:
        even = [tensor.shape[0] // size] * size
    rows, received = _applied(_Alltoall, tensor, splits if splits is not None else even, name)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Op | None = None,
    process_set: Any = None,
) -> torch.Tensor:
    """Reduce, of which this rank gets its rows."""
    check_process_set(process_set)
    sent, context = compression.compress(tensor)
    rows: torch.Tensor = _applied(_Reducescatter, sent, op, name)
    return compression.decompress(rows, context)


def _applied(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        op: Op,
        name: str | None,
        scales: tuple[float, float],
        compression: Compressor,
    ) -> torch.Tensor:
        ctx.of = (op, scales)
        output = torch.empty_like(tensor, requires_grad=False)
        start_allreduce([tensor], [output], op, name, scales, compression).wait()
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        op, scales = ctx.of
        if op not in (Average, Sum):
            raise ConfigError(f"there is no gradient of an allreduce with op={op}")
        output = torch.empty_like(grads[0])
        start_allreduce([grads[0]], [output], op, None, scales).wait()
        return output, None, None, None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        ctx.shape = tensor.shape
        rows = tensor.shape[0] if tensor.dim() else 1
        counts = allgather_async(torch.tensor([rows])).wait().tolist()
        ctx.begin = sum(counts[: horovod_world().place.rank])
        ctx.rows = rows
        result: torch.Tensor = allgather_async(tensor, name).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        whole = torch.empty_like(grads[0])
        start_allreduce([grads[0]], [whole], Sum, None).wait()
        return whole[ctx.begin : ctx.begin + ctx.rows].reshape(ctx.shape), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        result: torch.Tensor = broadcast_async(tensor, root_rank, name).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        whole = torch.empty_like(grads[0])
        start_allreduce([grads[0]], [whole], Sum, None).wait()
        return whole if horovod_world().place.rank == ctx.root_rank else torch.zeros_like(whole), None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None) -> Any:
        if splits is None:
            alltoall_async(tensor, None, name)  # says what is wrong with it
        rows, received = alltoall_async(tensor, splits, name).wait()
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back, _ = alltoall_async(grads[0], ctx.received).wait()
        return back, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Op | None, name: str | None) -> torch.Tensor:
        ctx.op = check_op(op)
        result: torch.Tensor = reducescatter_async(tensor, name, op).wait()
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        whole = allgather_async(grads[0]).wait()
        return (whole / horovod_world().place.size if ctx.op == Average else whole), None, None
