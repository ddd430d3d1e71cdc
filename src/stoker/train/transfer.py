"""Copy a state from the source to the ranks of a new world that need it.

Where only some need it, it goes from each to the next, piece by piece: the source, for which the whole world waits,
sends it once, and those of one node pass it on among themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from stoker.train.accelerator import CPU
from stoker.train.packing import decode_header, encode_header, pack, unpack
from stoker.wire.job import WorldView

PIECE_BYTES = 8 << 20
"""What is passed on at once: the last of the ranks waits for so many bytes of each rank before it."""


def send_state(world: WorldView, rank: int, state: dict[str, Any], device: torch.device) -> None:
    """The source's side. Raises RuntimeError when a receiver dies."""
    tensors: list[torch.Tensor] = []
    header = encode_header(pack(state, tensors), tensors, kinds_at_the_receiver(state))
    raw = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    _send(world, rank, torch.tensor([len(header)], dtype=torch.int64, device=device))
    _send(world, rank, raw)
    for tensor in tensors:  # one after the other: a copy of all would double the memory that they take
        _send(world, rank, bytes_of(tensor.to(device)))


def kinds_at_the_receiver(state: dict[str, Any]) -> list[str]:
    """On what kind of device each tensor is to be kept until the state is loaded, in the order of `pack`.

    Where the source has it. But a module copies what it loads into its own tensors, so that with them on the device
    parameters would be there twice; optimizers keep the very tensors that they load.
    """
    kinds: list[str] = []
    for part, held in state.items():
        tensors: list[torch.Tensor] = []
        pack(held, tensors)
        kinds += [CPU if part == "modules" else tensor.device.type for tensor in tensors]
    return kinds


def receive_state(world: WorldView, device: torch.device) -> dict[str, Any]:
    """A receiver's side: into new tensors, so that a source that dies in the middle leaves nothing behind.

    What belongs on the host is moved there at once: the device never holds more than one tensor of it.

    Raises RuntimeError when the source dies, WireError for a broken header.
    """
    size = _receive(world, torch.zeros(1, dtype=torch.int64, device=device))
    raw = _receive(world, torch.zeros(int(size.item()), dtype=torch.uint8, device=device))
    plain, described = decode_header(raw.cpu().numpy().tobytes())
    tensors = []
    for dtype, shape, kind in described:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        _receive(world, bytes_of(tensor))
        tensors.append(tensor.cpu() if kind == CPU else tensor)
    result = unpack(plain, tensors)
    assert isinstance(result, dict)
    return result


def receivers_of(world: WorldView) -> list[int]:
    """Ranks that copy."""
    if world.all_receive:
        return [rank for rank in range(world.size) if rank != world.source]
    return list(world.receivers)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, where it is dense: Gloo and NCCL know few types, and none of them looks inside."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single element may have any
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _send(world: WorldView, rank: int, tensor: torch.Tensor) -> None:
    if world.all_receive:
        dist.broadcast(tensor, src=rank)
        return
    for piece in _pieces(tensor):
        dist.send(piece, dst=world.receivers[0])


def _receive(world: WorldView, tensor: torch.Tensor) -> torch.Tensor:
    if world.all_receive:
        dist.broadcast(tensor, src=world.source)
        return tensor
    place = world.receivers.index(dist.get_rank())
    before = world.receivers[place - 1] if place else world.source
    after = world.receivers[place + 1 :]
    passed_on: dist.Work | None = None
    for piece in _pieces(tensor):
        dist.recv(piece, src=before)
        if passed_on is not None:
            passed_on.wait()
        passed_on = dist.isend(piece, dst=after[0]) if after else None
    if passed_on is not None:
        passed_on.wait()
    return tensor


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Of the same memory. One of no bytes is sent as well."""
    yield from torch.split(tensor, max(1, PIECE_BYTES // tensor.element_size()))
