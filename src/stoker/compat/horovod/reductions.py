"""allreduce, reducescatter, barrier and join, with Horovod's arguments. In-place forms end with an underscore."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from stoker.compat.horovod.agreement import Request, agree, told_as_horovod
from stoker.compat.horovod.basics import HorovodWorld, horovod_world
from stoker.compat.horovod.compression import Compression, NoneCompressor
from stoker.compat.horovod.handles import Handle
from stoker.errors import ConfigError

Op = Literal["Average", "Sum", "Adasum", "Min", "Max", "Product"]
Average: Op = "Average"
Sum: Op = "Sum"
Adasum: Op = "Adasum"
Min: Op = "Min"
Max: Op = "Max"
Product: Op = "Product"
Compressor = type[NoneCompressor]


class ProcessSet:
    """Some ranks. There is one set: of all."""

    process_set_id = 0


global_process_set = ProcessSet()
_TORCH_OPS = (("Average", dist.ReduceOp.SUM), ("Sum", dist.ReduceOp.SUM), ("Min", dist.ReduceOp.MIN),
              ("Max", dist.ReduceOp.MAX), ("Product", dist.ReduceOp.PRODUCT))  # fmt: skip


def check_op(op: Op | None, average: bool | None = None) -> Op:
    """The op that is meant. Raises ConfigError."""
    if average is not None:
        if op is not None:
            raise ConfigError("give op=… or average=…, not both")
        return Average if average else Sum
    if op == Adasum:
        raise ConfigError("op=Adasum is not there in Stoker: use hvd.Average or hvd.Sum")
    if op is not None and op not in dict(_TORCH_OPS):
        raise ConfigError(f"op={op!r}: give hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product")
    return op or Average


def check_process_set(process_set: Any) -> None:
    """Raises ConfigError for anything but all ranks."""
    if process_set is not None and not isinstance(process_set, ProcessSet):
        raise ConfigError("process sets are not there in Stoker: a collective is of all ranks")


def reduced(tensor: torch.Tensor, op: Op) -> dist.Work | None:
    """Begin to reduce a tensor of the wire in place."""
    with told_as_horovod():
        work: dist.Work | None = dist.all_reduce(tensor, op=dict(_TORCH_OPS)[op], async_op=True)
    return work


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """As a type that backends can add up."""
    return tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor


def averaged_(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Divide in place; whole numbers are rounded down."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.div_(size)
    return tensor.copy_(torch.div(tensor, size, rounding_mode="floor"))


class _Reduction:
    """One allreduce of some tensors, each with a result of its own."""

    def __init__(
        self,
        world: HorovodWorld,
        outputs: Sequence[torch.Tensor],
        op: Op,
        scales: tuple[float, float],
        compression: Compressor,
    ) -> None:
        self._outputs, self._op, self._scales, self._compression = outputs, op, scales, compression
        self._size = world.place.size
        self._wires: list[tuple[torch.Tensor, Any]] = []

    def start(self, world: HorovodWorld, tensors: Sequence[torch.Tensor], name: str) -> Handle:
        for tensor, output in zip(tensors, self._outputs, strict=True):
            if self._scales != (1.0, 1.0) and not (tensor.is_floating_point() or tensor.is_complex()):
                raise ConfigError(
                    f"prescale_factor and postscale_factor are for floating-point tensors, not {tensor.dtype}"
                )
            if tensor.dtype == torch.bool:
                raise ConfigError("allreduce takes numbers, not bool: give .int()")
            wire, context = self._wire(world, tensor, output)
            self._wires.append((wire if self._scales[0] == 1.0 else wire.mul_(self._scales[0]), context))
        wires = [wire for wire, _ in self._wires]
        group = f", {len(wires)} tensors of {[list(w.shape) for w in wires]}" if len(wires) > 1 else ""
        for number, wire in enumerate(wires):
            layout = zlib.crc32(str([(w.dtype, w.shape) for w in wires]).encode()) if group else 0
            part = name if not number else f"{name}.{number}"
            agree(world, Request("allreduce", part, wire.dtype, tuple(wire.shape), self._op, -1, layout,
                                 wraps=group))  # fmt: skip
        return Handle(world, [reduced(wire, self._op) for wire in wires], self._finish)

    def _finish(self) -> list[torch.Tensor]:
        for (wire, context), output in zip(self._wires, self._outputs, strict=True):
            if self._op == Average:
                averaged_(wire, self._size)
            whole = self._compression.decompress(wire, context)
            if self._scales[1] != 1.0:
                whole.mul_(self._scales[1])
            if whole.data_ptr() != output.data_ptr():
                with torch.no_grad():
                    output.copy_(whole)
        return list(self._outputs)

    def _wire(
        self, world: HorovodWorld, tensor: torch.Tensor, output: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """What is exchanged, and what makes a result of it: where it can be, the output's own memory."""
        is_plain = self._compression is Compression.none and tensor.dtype != torch.int16
        if not is_plain or not world.takes(output):
            sent, context = self._compression.compress(tensor.detach())
            return widened(world.on_wire(sent)), context
        wire = output.detach()
        return (wire if output is tensor else wire.copy_(tensor.detach())), None


class _Only(Handle):
    """Of one tensor: the result is the tensor itself."""

    def __init__(self, inner: Handle) -> None:
        self._inner = inner

    def is_done(self) -> bool:
        return self._inner.is_done()

    def wait(self) -> Any:
        return self._inner.wait()[0]


def start_allreduce(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    op: Op,
    name: str | None,
    scales: tuple[float, float] = (1.0, 1.0),
    compression: Compressor = Compression.none,
) -> Handle:
    """Begin; the handle's result are the outputs. Raises ConfigError, HorovodInternalError."""
    world = horovod_world()
    world.ready()
    return _Reduction(world, outputs, op, scales, compression).start(world, tensors, name or "")


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin to reduce in place."""
    check_process_set(process_set)
    scales = (prescale_factor, postscale_factor)
    return _Only(start_allreduce([tensor], [tensor], check_op(op, average), name, scales))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin to reduce into a new tensor."""
    check_process_set(process_set)
    scales = (prescale_factor, postscale_factor)
    output = torch.empty_like(tensor, requires_grad=False)
    return _Only(start_allreduce([tensor], [output], check_op(op, average), name, scales))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Reduce in place."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = handle.wait()
    return result


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin to reduce several tensors in place."""
    check_process_set(process_set)
    scales = (prescale_factor, postscale_factor)
    return start_allreduce(tensors, tensors, check_op(op, average), name, scales)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    """Begin to reduce several tensors into new ones."""
    check_process_set(process_set)
    scales = (prescale_factor, postscale_factor)
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    return start_allreduce(tensors, outputs, check_op(op, average), name, scales)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """Reduce several tensors in place."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    result: list[torch.Tensor] = handle.wait()
    return result


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: Op | None = None, process_set: Any = None
) -> Handle:
    """Begin to reduce, of which each rank gets its rows: the first ranks one more where they do not divide."""
    check_process_set(process_set)
    chosen = check_op(op)
    if tensor.dim() == 0:
        raise ConfigError("reducescatter divides a tensor by its first dimension: this one has none")
    if chosen not in (Average, Sum):
        raise ConfigError(f"reducescatter takes op=hvd.Average or hvd.Sum, not {chosen}")
    world = horovod_world()
    place = world.ready()
    wire = widened(world.on_wire(tensor))
    agree(world, Request("reducescatter", name or "", wire.dtype, tuple(wire.shape), chosen))
    at = _starts(tensor.shape[0], place.size)

    def finish() -> torch.Tensor:
        rows = wire[at[place.rank] : at[place.rank + 1]].clone()
        if chosen == Average:
            averaged_(rows, place.size)
        return rows.to(device=tensor.device, dtype=tensor.dtype)

    return Handle(world, [reduced(wire, chosen)], finish)


def barrier(process_set: Any = None) -> None:
    """Wait until every rank has come here."""
    check_process_set(process_set)
    agree(horovod_world(), Request("barrier"))


def join(device: int = -1) -> int:
    """This rank has no more data: it takes part in what the others reduce, with zeros, until all have joined.

    Returns the rank that came last. Averages still divide by the number of all ranks.
    """
    world = horovod_world()
    turns = 0
    while True:
        agreed = agree(world, Request("join", own=turns))
        if len(agreed.joined) == world.place.size:
            return min(agreed.joined, key=lambda rank: (agreed.own[rank], -rank))
        turns += 1
        request = agreed.request
        if request.kind == "allreduce":
            zeros = torch.zeros(request.shape, dtype=request.dtype, device=world.device)
            with told_as_horovod():
                dist.all_reduce(zeros)
        elif request.kind == "gradients":
            world.stand_in(request.layout)


def _starts(rows: int, size: int) -> list[int]:
    """Where each rank's rows begin, and the end."""
    share, more = divmod(rows, size)
    return [rank * share + min(rank, more) for rank in range(size + 1)]
