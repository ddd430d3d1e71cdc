"""allreduce, reducescatter, barrier and join, with Horovod's arguments. In-place forms end with an underscore."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist

from stoker.compat.horovod.agreement import Absent, Request, agree, fits, told_as_horovod
from stoker.compat.horovod.basics import HorovodWorld, Span, horovod_world
from stoker.compat.horovod.compression import Compression, NoneCompressor
from stoker.compat.horovod.handles import Handle, Several, part
from stoker.compat.horovod.process_sets import span_of
from stoker.errors import ConfigError
from stoker.train.transfer import bytes_of

Op = Literal["Average", "Sum", "Adasum", "Min", "Max", "Product"]
Average: Op = "Average"
Sum: Op = "Sum"
Adasum: Op = "Adasum"
Min: Op = "Min"
Max: Op = "Max"
Product: Op = "Product"
Compressor = type[NoneCompressor]


_TORCH_OPS = (("Average", dist.ReduceOp.SUM), ("Sum", dist.ReduceOp.SUM), ("Min", dist.ReduceOp.MIN),
              ("Max", dist.ReduceOp.MAX), ("Product", dist.ReduceOp.PRODUCT))  # fmt: skip
_HERE: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {"Average": torch.add, "Sum": torch.add, "Min": torch.minimum, "Max": torch.maximum, "Product": torch.mul}
)


def check_op(op: Op | None, average: bool | None = None) -> Op:
    """The op that is meant. Raises ConfigError."""
    if average is not None:
        if op is not None:
            raise ConfigError("give op=… or average=…, not both")
        return Average if average else Sum
    if op == Adasum:
        raise ConfigError(
            "op=hvd.Adasum is not there in Stoker: use op=hvd.Average with the learning rate of that many workers "
            "(commonly lr * hvd.size(), with a warm-up), where Adasum takes a single worker's"
        )
    if op is not None and op not in dict(_TORCH_OPS):
        raise ConfigError(f"op={op!r}: give hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product")
    return op or Average


def reduced(tensor: torch.Tensor, op: Op, span: Span) -> dist.Work | None:
    """Begin to reduce a tensor of the wire in place."""
    with told_as_horovod():
        work: dist.Work | None = dist.all_reduce(
            tensor, op=dict(_TORCH_OPS)[op], group=span.group, async_op=True
        )
    return work


def agreed_reduction(
    world: HorovodWorld, span: Span, request: Request, wire: torch.Tensor, op: Op
) -> dist.Work | None:
    """Agree, and begin to reduce in place. What is small came along: each rank reduces it in the order of ranks."""
    if not fits(wire.nbytes):
        agree(world, span, request)
        return reduced(wire, op, span)
    payloads = agree(world, span, request, bytes_of(wire)).payloads
    rows = [one[: wire.nbytes].view(wire.dtype).reshape(wire.shape) for one in payloads]
    for row in rows[1:]:
        _HERE[op](rows[0], row, out=rows[0])
    wire.copy_(rows[0])
    return None


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """As a type that backends can add up."""
    return tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor


def scaled_(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place; whole numbers by way of float64, cut off at the point as Horovod does."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_(tensor.double() * factor)


def averaged_(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Divide in place; whole numbers are rounded down."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.div_(size)
    return tensor.copy_(torch.div(tensor, size, rounding_mode="floor"))


class _Reduction:
    """One allreduce of some tensors, each with a result of its own."""

    def __init__(
        self,
        span: Span,
        outputs: Sequence[torch.Tensor],
        op: Op,
        scales: tuple[float, float],
        compression: Compressor,
    ) -> None:
        self._outputs, self._op, self._scales, self._compression = outputs, op, scales, compression
        self._span = span
        self._wires: list[tuple[torch.Tensor, Any]] = []

    def start(self, world: HorovodWorld, tensors: Sequence[torch.Tensor], name: str) -> Handle:
        for tensor, output in zip(tensors, self._outputs, strict=True):
            if tensor.dtype == torch.bool:
                raise ConfigError("allreduce takes numbers, not bool: give .int()")
            wire, context = self._wire(world, tensor, output)
            self._wires.append((scaled_(wire, self._scales[0]), context))
        wires = [wire for wire, _ in self._wires]
        group = f", {len(wires)} tensors of {[list(w.shape) for w in wires]}" if len(wires) > 1 else ""
        layout = zlib.crc32(str([(w.dtype, w.shape) for w in wires]).encode()) if group else 0
        works = []
        for number, wire in enumerate(wires):
            own_name = name if not number else f"{name}.{number}"
            request = Request("allreduce", own_name, wire.dtype, tuple(wire.shape), self._op, -1, layout,
                              wraps=group)  # fmt: skip
            works.append(agreed_reduction(world, self._span, request, wire, self._op))
        return Handle(world, works, self._finish)

    def _finish(self) -> list[torch.Tensor]:
        for (wire, context), output in zip(self._wires, self._outputs, strict=True):
            if self._op == Average:
                averaged_(wire, self._span.size)
            whole = scaled_(self._compression.decompress(wire, context), self._scales[1])
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
    process_set: Any = None,
) -> Handle:
    """Begin; the handle's result are the outputs. Raises ConfigError, HorovodInternalError."""
    span = span_of(process_set)
    return _Reduction(span, outputs, op, scales, compression).start(horovod_world(), tensors, name or "")


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
    scales = (prescale_factor, postscale_factor)
    chosen = check_op(op, average)
    return _Only(start_allreduce([tensor], [tensor], chosen, name, scales, process_set=process_set))


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
    scales = (prescale_factor, postscale_factor)
    output = torch.empty_like(tensor, requires_grad=False)
    chosen = check_op(op, average)
    return _Only(start_allreduce([tensor], [output], chosen, name, scales, process_set=process_set))


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
    scales = (prescale_factor, postscale_factor)
    return start_allreduce(tensors, tensors, check_op(op, average), name, scales, process_set=process_set)


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
    scales = (prescale_factor, postscale_factor)
    outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    return start_allreduce(tensors, outputs, check_op(op, average), name, scales, process_set=process_set)


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
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | None = None,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce, of which each rank gets its rows: the first ranks one more where they do not divide."""
    chosen = check_op(op)
    if tensor.dim() == 0:
        raise ConfigError("reducescatter divides a tensor by its first dimension: this one has none")
    if chosen not in (Average, Sum):
        raise ConfigError(f"reducescatter takes op=hvd.Average or hvd.Sum, not {chosen}")
    world, span = horovod_world(), span_of(process_set)
    wire = scaled_(widened(world.on_wire(tensor)), prescale_factor)
    request = Request("reducescatter", name or "", wire.dtype, tuple(wire.shape), chosen)
    at = _starts(tensor.shape[0], span.size)

    def finish() -> torch.Tensor:
        rows = wire[at[span.rank] : at[span.rank + 1]].clone()
        if chosen == Average:
            averaged_(rows, span.size)
        return scaled_(rows, postscale_factor).to(device=tensor.device, dtype=tensor.dtype)

    return Handle(world, [agreed_reduction(world, span, request, wire, chosen)], finish)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op | None = None,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce several tensors, of each of which each rank gets its rows."""
    scales = (prescale_factor, postscale_factor)
    return Several(
        [
            reducescatter_async(one, part(name, number), op, process_set, *scales)
            for number, one in enumerate(tensors)
        ]
    )


def barrier(process_set: Any = None) -> None:
    """Wait until every rank has come here."""
    agree(horovod_world(), span_of(process_set), Request("barrier"))


def join(device: int = -1) -> int:
    """This rank has no more data: it takes part in what the others reduce, with zeros, until all have joined.

    Returns the rank that came last. Averages still divide by the number of all ranks. It is of all ranks: where others
    use a process set of this one meanwhile, all of the set raise ConfigError.
    """
    world, turns = horovod_world(), 0
    world.ready()
    absent = Absent(world)
    while True:
        span = world.ready()
        agreed = agree(world, span, Request("join", own=turns), meanwhile=absent.look if absent else None)
        if len(agreed.joined) == span.size:
            absent.end()
            return min(agreed.joined, key=lambda rank: (agreed.own[rank], -rank))
        turns += 1
        request = agreed.request
        if request.kind == "allreduce":
            zeros = torch.zeros(request.shape, dtype=request.dtype, device=world.device)
            if not fits(zeros.nbytes):
                work = reduced(zeros, Sum, span)
                if work is not None:
                    with told_as_horovod():
                        work.wait()
        elif request.kind == "gradients":
            world.stand_in(request.layout)


def _starts(rows: int, size: int) -> list[int]:
    """Where each rank's rows begin, and the end."""
    share, more = divmod(rows, size)
    return [rank * share + min(rank, more) for rank in range(size + 1)]
