"""What tests of snapshots share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stoker.errors import WireError
from stoker.train.checkpoints.image import Image, image_of
from stoker.train.checkpoints.layout import COMPLETE, Header, Read, image_in, read_header
from stoker.train.checkpoints.memory import MemorySlots
from stoker.train.checkpoints.nearest import nearest_in_memory

RUN = "run-1"
ODD = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2)


def a_state(fill: float = 1.0, size: int = 40_000) -> dict[str, Any]:
    """Of every kind of tensor and value that a state may hold."""
    return {
        "modules": {"model": {"w": torch.full((size,), fill), "odd": ODD + fill, "none": torch.empty(0, 3)}},
        "optimizers": {
            "sgd": {"state": {0: {"momentum": torch.full((size,), -fill), "step": torch.tensor(fill)}}}
        },
        "values": {
            "epoch": 3,
            "large": 2**100,
            "pair": (1, "x", None, b"\x00\xff"),
            "half": torch.full((5,), fill).bfloat16(),
            "complex": torch.full((3,), fill).to(torch.complex64),
            "flags": torch.tensor([True, False]),
        },
    }


def stable(state: dict[str, Any]) -> set[int]:
    tensors = [state["modules"]["model"]["w"], state["optimizers"]["sgd"]["state"][0]["momentum"]]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(held, other[key]) for key, held in one.items())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def take(slots: MemorySlots, commits: int, fill: float | None = None) -> dict[str, Any]:
    """A whole snapshot; of what."""
    state = a_state(float(commits) if fill is None else fill)
    assert slots.take(image_of(commits, state), stable(state))
    slots.settle()
    slots.finish()
    return state


def reads(raw: bytes) -> Read:
    def read(offset: int, into: memoryview) -> None:
        if offset + len(into) > len(raw):
            raise WireError("it ends before")
        into[:] = raw[offset : offset + len(into)]

    return read


def newest_in_memory(folder: Path, run_id: str) -> Image | None:
    """As `nearest_in_memory`, in memory of its own."""
    with nearest_in_memory(folder, run_id) as image:
        if image is None:
            return None
        return image._replace(pieces=[p._replace(tensor=p.tensor.clone()) for p in image.pieces])


def snapshot_in(raw: bytes) -> tuple[Header, Image]:
    """Raises WireError for all that is no whole snapshot."""
    header = read_header(reads(raw), len(raw))
    if header.state != COMPLETE:
        raise WireError("not complete")
    return header, image_in(memoryview(bytearray(raw)), header)


def used_bytes(path: Path) -> bytes:
    """A slot's file up to its last byte that means something."""
    raw = path.read_bytes()
    header = read_header(reads(raw), len(raw))
    return raw[: header.description_at + header.description_bytes]
