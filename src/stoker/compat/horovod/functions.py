"""What Horovod builds on collectives: parameters, optimizer states and objects that are made the same everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from stoker.compat.horovod.agreement import Request, agree, told_as_horovod
from stoker.compat.horovod.basics import horovod_world
from stoker.compat.horovod.reductions import check_process_set
from stoker.errors import ConfigError
from stoker.train.packing import placed_as
from stoker.train.transfer import bytes_of, receive_state, send_state
from stoker.wire.job import WorldView

NAMED_MAX = 20


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0, process_set: Any = None
) -> None:
    """Make these tensors what they are on rank `root_rank`: `model.state_dict()` or `model.named_parameters()`.

    Raises ConfigError where ranks have others, HorovodInternalError.
    """
    check_process_set(process_set)
    named = [*(params.items() if isinstance(params, Mapping) else params)]
    for entry in named:
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise ConfigError(
                f"broadcast_parameters takes a state_dict or pairs of name and tensor, not {entry!r:.80}"
            )
    tensors = [(str(name), value) for name, value in named if isinstance(value, torch.Tensor)]
    world = horovod_world()
    place = world.ready()
    described = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    shown = ", ".join(described[:NAMED_MAX]) + (" and more" if len(described) > NAMED_MAX else "")
    layout = zlib.crc32("\n".join(described).encode())
    agree(world, Request("broadcast", "parameters", root=root_rank, layout=layout,
                         wraps=f" of {len(tensors)} tensors: {shown}"))  # fmt: skip
    if place.size == 1:
        return
    with told_as_horovod(), torch.no_grad():
        for _, tensor in tensors:
            wire = world.on_wire(tensor)
            if wire.numel():
                flat = bytes_of(wire)
                dist.broadcast(flat, src=place.order[root_rank])
                tensor.copy_(flat.view(wire.dtype).reshape(wire.shape))


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
    place = world.ready()
    agree(world, Request("broadcast", "state", root=root_rank))
    if place.size == 1:
        return state
    view = WorldView(0, place.size, (), place.order[root_rank], 0, "", all_receive=True)
    with told_as_horovod():
        if place.rank == root_rank:
            send_state(view, view.source, state, world.device)
            return state
        received: dict[str, Any] = placed_as(receive_state(view, world.device), state)
        return received


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> Any:
    """Rank `root_rank`'s object; of any kind that torch's object collectives take.

    As in Horovod it is pickled: only workers of this job send here.
    """
    check_process_set(process_set)
    world = horovod_world()
    place = world.ready()
    if not 0 <= root_rank < place.size:
        raise ConfigError(f"root_rank={root_rank}: ranks are 0 to {place.size - 1}")
    agree(world, Request("broadcast_object", name or "", root=root_rank))
    if place.size == 1:
        return obj
    box = [obj if place.rank == root_rank else None]
    with told_as_horovod():
        dist.broadcast_object_list(box, src=place.order[root_rank], device=world.device)
    return box[0]


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks, in the order of ranks. Pickled, as `broadcast_object`'s."""
    check_process_set(process_set)
    world = horovod_world()
    place = world.ready()
    agree(world, Request("allgather_object", name or ""))
    if place.size == 1:
        return [obj]
    objects: list[Any] = [None] * place.size
    with told_as_horovod():
        dist.all_gather_object(objects, obj)
    return [objects[rank] for rank in place.order]
