"""allgather, broadcast and alltoall, with Horovod's arguments: they move tensors of any type as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from stoker.compat.horovod.agreement import Request, agree, told_as_horovod
from stoker.compat.horovod.basics import horovod_world
from stoker.compat.horovod.handles import Handle
from stoker.compat.horovod.reductions import check_process_set
from stoker.errors import ConfigError
from stoker.train.transfer import bytes_of


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> Handle:
    """Begin to collect the rows of all ranks, in the order of ranks; they may have different numbers of them."""
    check_process_set(process_set)
    world = horovod_world()
    place = world.ready()
    rows = world.on_wire(tensor.reshape(1) if tensor.dim() == 0 else tensor)
    rest = tuple(rows.shape[1:])
    agreed = agree(world, Request("allgather", name or "", rows.dtype, rest, own=rows.shape[0]))
    row_bytes = math.prod(rest) * rows.element_size()
    longest = max(agreed.own) * row_bytes
    mine = torch.zeros(longest, dtype=torch.uint8, device=rows.device)
    mine[: rows.shape[0] * row_bytes] = bytes_of(rows) if rows.numel() else mine[:0]
    everybody = [torch.empty_like(mine) for _ in range(place.size)]
    with told_as_horovod():
        work = dist.all_gather(everybody, mine, async_op=True) if longest else None

    def finish() -> torch.Tensor:
        parts = [everybody[place.order[rank]][: n * row_bytes] for rank, n in enumerate(agreed.own)]
        whole = torch.cat(parts).view(rows.dtype) if longest else rows.new_empty(0)
        return whole.reshape(sum(agreed.own), *rest).to(tensor.device)

    return Handle(world, [work], finish)


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
    check_process_set(process_set)
    world = horovod_world()
    place = world.ready()
    if tensor.dim() == 0:
        raise ConfigError("alltoall sends rows of a tensor: this one has no dimensions")
    counts = _splits(tensor, splits, place.size)
    rows = world.on_wire(tensor)
    rest = tuple(rows.shape[1:])
    agree(world, Request("alltoall", name or "", rows.dtype, rest))
    if place.size == 1:
        received = counts
    else:
        sent = torch.tensor(counts, device=world.device)
        everybody = [torch.empty_like(sent) for _ in range(place.size)]
        with told_as_horovod():
            dist.all_gather(everybody, sent)
        received = [int(everybody[place.order[rank]][place.rank]) for rank in range(place.size)]
    row_bytes = math.prod(rest) * rows.element_size()
    into = [0] * place.size
    out_of: list[torch.Tensor] = [rows[:0]] * place.size
    for rank, begin in enumerate(accumulate([0, *counts[:-1]])):
        out_of[place.order[rank]] = rows[begin : begin + counts[rank]]
        into[place.order[rank]] = received[rank] * row_bytes
    flat = bytes_of(torch.cat(out_of)) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)
    got = torch.empty(sum(into), dtype=torch.uint8, device=rows.device)
    with told_as_horovod():
        work = dist.all_to_all_single(got, flat, into, [len(o) * row_bytes for o in out_of], async_op=True)

    def finish() -> Any:
        parts = dict(enumerate(torch.split(got, into)))
        ordered = torch.cat([parts[place.order[rank]] for rank in range(place.size)])
        whole = ordered.view(rows.dtype) if len(ordered) else rows.new_empty(0)
        whole = whole.reshape(sum(received), *rest).to(tensor.device)
        return whole if splits is None else (whole, torch.tensor(received, dtype=torch.int32))

    return Handle(world, [work], finish)


def _broadcast(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: Any
) -> Handle:
    check_process_set(process_set)
    world = horovod_world()
    place = world.ready()
    if not 0 <= root_rank < place.size:
        raise ConfigError(f"root_rank={root_rank}: ranks are 0 to {place.size - 1}")
    wire = world.on_wire(tensor)
    agree(world, Request("broadcast", name or "", wire.dtype, tuple(wire.shape), root=root_rank))
    flat = bytes_of(wire) if wire.numel() else wire
    with told_as_horovod():
        root = place.order[root_rank]
        work = dist.broadcast(flat, src=root, async_op=True) if wire.numel() else None

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
