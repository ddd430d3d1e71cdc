"""What Horovod builds on collectives: parameters, optimizer states and objects that are made the same everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from stoker.compat.horovod.agreement import Request, agree, told_as_horovod
from stoker.compat.horovod.basics import horovod_world
from stoker.compat.horovod.process_sets import span_of
from stoker.errors import ConfigError
from stoker.train.packing import placed_as
from stoker.train.transfer import bytes_of, receive_state, send_state
from stoker.wire.job import WorldView

NAMED_MAX = 20


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0, process_set: Any = None
) -> None:
    """Make these tensors what they are on rank `root_rank`.

    `model.state_dict()`, `model.named_parameters()` or `model.parameters()`. Raises ConfigError where ranks have
    others, HorovodInternalError.
    """
    tensors = _named_tensors(params)
    world, span = horovod_world(), span_of(process_set)
    root = span.number_of(root_rank)
    described = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    shown = ", ".join(described[:NAMED_MAX]) + (" and more" if len(described) > NAMED_MAX else "")
    layout = zlib.crc32("\n".join(described).encode())
    agree(world, span, Request("broadcast", "parameters", root=root_rank, layout=layout,
                               wraps=f" of {len(tensors)} tensors: {shown}"))  # fmt: skip
    if span.size == 1:
        return
    with told_as_horovod(), torch.no_grad():
        for _, tensor in tensors:
            wire = world.on_wire(tensor)
            if wire.numel():
                flat = bytes_of(wire)
                dist.broadcast(flat, group_src=span.order[root], group=span.group)
                tensor.copy_(flat.view(wire.dtype).reshape(wire.shape))


def _named_tensors(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """With their names; the place counts where they have none."""
    entries = list(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = []
    for number, entry in enumerate(entries):
        name, value = entry if isinstance(entry, tuple) and len(entry) == 2 else (str(number), entry)
        if not isinstance(params, Mapping) and not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"broadcast_parameters takes a state_dict, tensors, or pairs of name and tensor, not {entry!r:.80}"
            )
        if isinstance(value, torch.Tensor):
            tensors.append((str(name), value))
    return tensors


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Make an optimizer's state and settings what they are on rank `root_rank`.

    Nothing is stepped for that, so that parameters stay as they are. Raises ConfigError for an optimizer without a
    state of plain values and tensors, HorovodInternalError.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "broadcast_optimizer_state: LBFGS steps by closures, which ranks cannot take together"
        )
    state = broadcast_state(optimizer.state_dict(), root_rank)
    if horovod_world().place.rank != root_rank:
        optimizer.load_state_dict(state)


def broadcast_state(state: dict[str, Any], root_rank: int) -> dict[str, Any]:
    """Rank `root_rank`'s nested plain values and tensors. Raises ConfigError, HorovodInternalError."""
    world = horovod_world()
    span = world.ready()
    root = span.number_of(root_rank)
    agree(world, span, Request("broadcast", "state", root=root_rank))
    if span.size == 1:
        return state
    view = WorldView(0, span.size, (), span.order[root], 0, "", all_receive=True)
    with told_as_horovod():
        if span.rank == root:
            send_state(view, view.source, state, world.device)
            return state
        received: dict[str, Any] = placed_as(receive_state(view, world.device), state)
        return received


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Rank `root_rank`'s object; of any kind that torch's object collectives take.

    As in Horovod it is pickled: only workers of this job send here.
    """
    world, span = horovod_world(), span_of(process_set)
    root = span.number_of(root_rank)
    agree(world, span, Request("broadcast_object", name or "", root=root_rank))
    if span.size == 1:
        return obj
    box = [obj if span.rank == root else None]
    with told_as_horovod():
        dist.broadcast_object_list(box, group_src=span.order[root], group=span.group, device=world.device)
    return box[0]


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks, in the order of ranks. Pickled, as `broadcast_object`'s."""
    world, span = horovod_world(), span_of(process_set)
    agree(world, span, Request("allgather_object", name or ""))
    if span.size == 1:
        return [obj]
    objects: list[Any] = [None] * span.size
    with told_as_horovod():
        dist.all_gather_object(objects, obj, group=span.group)
    return [objects[number] for number in span.order]
