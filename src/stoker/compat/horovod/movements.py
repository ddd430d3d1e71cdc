"""allgather, broadcast and alltoall, with Horovod's arguments: they move tensors of any type as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from stoker.compat.horovod.agreement import Request, agree, fits, told_as_horovod
from stoker.compat.horovod.basics import HorovodWorld, Span, horovod_world
from stoker.compat.horovod.handles import Handle, Several, part
from stoker.compat.horovod.process_sets import span_of
from stoker.errors import ConfigError
from stoker.train.transfer import bytes_of


class Gathered(NamedTuple):
    """A collection of rows under way."""

    handle: Handle
    counts: tuple[int, ...]
    """How many rows each rank gives."""
    rank: int
    """This process's number among those ranks."""


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin to collect the rows of all ranks, in the order of ranks; they may have different numbers of them."""
    return start_allgather(tensor, name, process_set).handle


def start_allgather(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Gathered:
    """As `allgather_async`, with the numbers of rows."""
    world, span = horovod_world(), span_of(process_set)
    rows = world.on_wire(tensor.reshape(1) if tensor.dim() == 0 else tensor)
    rest = tuple(rows.shape[1:])
    row_bytes = math.prod(rest) * rows.element_size()
    flat = bytes_of(rows) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)
    request = Request("allgather", name or "", rows.dtype, rest, own=rows.shape[0])
    agreed = agree(world, span, request, flat if fits(len(flat)) else None)
    longest, everybody, work = max(agreed.own) * row_bytes, list(agreed.payloads), None
    if not fits(longest):
        mine = torch.zeros(longest, dtype=torch.uint8, device=rows.device)
        mine[: len(flat)] = flat
        everybody = [torch.empty_like(mine) for _ in range(span.size)]
        with told_as_horovod():
            work = dist.all_gather(everybody, mine, group=span.group, async_op=True)
        everybody = [everybody[number] for number in span.order]

    def finish() -> torch.Tensor:
        parts = [one[: n * row_bytes] for one, n in zip(everybody, agreed.own, strict=True)]
        whole = torch.cat(parts).view(rows.dtype) if longest else rows.new_empty(0)
        return whole.reshape(sum(agreed.own), *rest).to(tensor.device)

    return Gathered(Handle(world, [work], finish), agreed.own, span.rank)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin to collect the rows of several tensors."""
    return Several([allgather_async(one, part(name, n), process_set) for n, one in enumerate(tensors)])


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin to make this tensor what it is on rank `root_rank`."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin to copy rank `root_rank`'s tensor into a new one."""
    output = torch.empty_like(tensor, requires_grad=False)
    return _broadcast(tensor, output, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Make this tensor what it is on rank `root_rank`."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Any = None,
) -> Handle:
    """Begin to send each rank its rows: `splits` says how many; without it, all get as many.

    The result is what has come, in the order of ranks, and with `splits` how many rows from each.
    """
    world, span = horovod_world(), span_of(process_set)
    if tensor.dim() == 0:
        raise ConfigError("alltoall sends rows: this tensor has no dimensions")
    counts = _splits(tensor, splits, span.size)
    rows = world.on_wire(tensor)
    rest = tuple(rows.shape[1:])
    row_bytes = math.prod(rest) * rows.element_size()
    sent = torch.tensor(counts, device=rows.device)
    flat = bytes_of(rows) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)
    head_bytes = 8 * span.size
    along = torch.cat((bytes_of(sent), flat)) if fits(head_bytes + len(flat)) else bytes_of(sent)
    request = Request("alltoall", name or "", rows.dtype, rest, own=len(flat))
    agreed = agree(world, span, request, along if fits(len(along)) else None)
    heads = [one[:head_bytes] for one in agreed.payloads]
    if not fits(head_bytes):
        heads = _gathered(world, span, sent)
    of_all = [head.clone().view(torch.int64).tolist() for head in heads]
    received = [of_one[span.rank] for of_one in of_all]
    if fits(head_bytes + max(agreed.own)):
        begins = [head_bytes + sum(of_one[: span.rank]) * row_bytes for of_one in of_all]
        pieces = zip(agreed.payloads, begins, received, strict=True)
        parts, work = [one[begin : begin + n * row_bytes] for one, begin, n in pieces], None
    else:
        parts, work = _exchanged(
            span, flat, [n * row_bytes for n in counts], [n * row_bytes for n in received]
        )

    def finish() -> Any:
        ordered = torch.cat(parts)
        whole = ordered.view(rows.dtype) if len(ordered) else rows.new_empty(0)
        whole = whole.reshape(sum(received), *rest).to(tensor.device)
        return whole if splits is None else (whole, torch.tensor(received, dtype=torch.int32))

    return Handle(world, [work], finish)


def _gathered(world: HorovodWorld, span: Span, mine: torch.Tensor) -> list[torch.Tensor]:
    """Everybody's bytes of as many numbers, where they are too many to travel along."""
    mine = mine.to(world.device)
    everybody = [torch.empty_like(mine) for _ in range(span.size)]
    with told_as_horovod():
        dist.all_gather(everybody, mine, group=span.group)
    return [bytes_of(everybody[number]) for number in span.order]


def _exchanged(
    span: Span, flat: torch.Tensor, out_bytes: Sequence[int], into_bytes: Sequence[int]
) -> tuple[list[torch.Tensor], dist.Work | None]:
    """Begin to send each rank its part; the parts that are to come, in the order of ranks."""
    out_of = list(torch.split(flat, list(out_bytes)))
    of_group = sorted(range(span.size), key=lambda number: span.order[number])
    into = [into_bytes[number] for number in of_group]
    got = torch.empty(sum(into), dtype=torch.uint8, device=flat.device)
    with told_as_horovod():
        work: dist.Work | None = dist.all_to_all_single(
            got,
            torch.cat([out_of[number] for number in of_group]),
            into,
            [out_bytes[number] for number in of_group],
            group=span.group,
            async_op=True,
        )
    parts = torch.split(got, into)
    return [parts[number] for number in span.order], work


def _broadcast(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: Any
) -> Handle:
    world, span = horovod_world(), span_of(process_set)
    root = span.number_of(root_rank)
    wire = world.on_wire(tensor)
    flat = bytes_of(wire) if wire.numel() else wire.new_empty(0, dtype=torch.uint8)
    request = Request("broadcast", name or "", wire.dtype, tuple(wire.shape), root=root_rank)
    is_small = fits(len(flat))
    agreed = agree(world, span, request, flat if is_small and root == span.rank else None)
    work = None
    if is_small:
        flat.copy_(agreed.payloads[root][: len(flat)])
    else:
        with told_as_horovod():
            work = dist.broadcast(flat, group_src=span.order[root], group=span.group, async_op=True)

    def finish() -> torch.Tensor:
        with torch.no_grad():
            return output.copy_(flat.view(wire.dtype).reshape(wire.shape))

    return Handle(world, [work], finish)


def _splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> list[int]:
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ConfigError(f"alltoall cannot divide {rows} rows evenly over {size} ranks: give splits=…")
        return [rows // size] * size
    counts = [int(n) for n in (splits.tolist() if isinstance(splits, torch.Tensor) else splits)]
    if len(counts) != size or min(counts, default=0) < 0 or sum(counts) != rows:
        raise ConfigError(
            f"alltoall splits={counts}: give {size} numbers, one for each rank, that make up {rows} rows"
        )
    return counts
