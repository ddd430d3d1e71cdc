"""Copy a state from the source to the ranks of a new world that need it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from stoker.train.packing import decode_header, encode_header, pack, unpack
from stoker.wire.job import World


def send_state(world: World, rank: int, state: dict[str, Any], device: torch.device) -> None:
    """The source's side. Raises RuntimeError when a receiver dies."""
    tensors: list[torch.Tensor] = []
    header = encode_header(pack(state, tensors), tensors)
    raw = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    size = torch.tensor([len(header)], dtype=torch.int64, device=device)
    for part in (size, raw, *(_bytes_of(tensor.to(device).contiguous()) for tensor in tensors)):
        _send(world, rank, part)


def receive_state(world: World, device: torch.device) -> dict[str, Any]:
    """A receiver's side: into new tensors, so that a source that dies in the middle leaves nothing behind.

    Raises RuntimeError when the source dies, WireError for a broken header.
    """
    size = _receive(world, torch.zeros(1, dtype=torch.int64, device=device))
    raw = _receive(world, torch.zeros(int(size.item()), dtype=torch.uint8, device=device))
    plain, described = decode_header(raw.cpu().numpy().tobytes())
    tensors = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in described]
    for tensor in tensors:
        _receive(world, _bytes_of(tensor))
    result = unpack(plain, tensors)
    assert isinstance(result, dict)
    return result


def receivers_of(world: World) -> list[int]:
    """Ranks that copy."""
    return [m.rank for m in world.members if m.copy_state]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: Gloo and NCCL know few types, and none of them looks inside."""
    return tensor.reshape(-1).view(torch.uint8)


def _send(world: World, rank: int, tensor: torch.Tensor) -> None:
    receivers = receivers_of(world)
    if len(receivers) == len(world.members) - 1:
        dist.broadcast(tensor, src=rank)
    else:
        for receiver in receivers:
            dist.send(tensor, dst=receiver)


def _receive(world: World, tensor: torch.Tensor) -> torch.Tensor:
    if len(receivers_of(world)) == len(world.members) - 1:
        dist.broadcast(tensor, src=world.source)
    else:
        dist.recv(tensor, src=world.source)
    return tensor
