"""What a checkpoint holds, wherever it lies: plain values, and named pieces of tensors on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from stoker.errors import WireError
from stoker.train.dtensors import box_of, local_of
from stoker.train.packing import pack, unpack

OWN = "random"
"""The part of an exported state that is each worker's own, and never alike: its random generators."""


class Piece(NamedTuple):
    """A tensor, or this rank's piece of one that is divided over ranks."""

    name: str
    """Where it is in the exported state: `modules.model.layers.0.weight`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where in the whole this piece begins, along each dimension."""
    tensor: torch.Tensor

    @property
    def is_whole(self) -> bool:
        return tuple(self.tensor.shape) == self.shape


class Image(NamedTuple):
    """A state as of a commit."""

    commits: int
    plain: Any
    """As `pack` leaves it, for msgpack: a tensor is its number in `pieces`."""
    pieces: list[Piece]
    fingerprint: str = ""
    """The same of images in which all is the same, bit for bit, that is not a worker's `OWN`; empty: not known."""

    def state(self) -> dict[str, Any]:
        """The exported state again, of the pieces' own tensors. Raises WireError where a piece is not the whole."""
        for piece in self.pieces:
            if not piece.is_whole:
                raise WireError(
                    f"{piece.name} is a piece of {tuple(piece.tensor.shape)} of a tensor of {piece.shape}: read it "
                    "together with those of the other ranks"
                )
        found = unpack(self.plain, [piece.tensor for piece in self.pieces])
        if not isinstance(found, dict):
            raise WireError(f"a checkpoint holds a dict, not a {type(found).__name__}")
        return found


def image_of(commits: int, state: dict[str, Any]) -> Image:
    """Of an exported state; the pieces are its own tensors, wherever they are, of a DTensor what is here of it.

    Raises ConfigError.
    """
    tensors: list[torch.Tensor] = []
    plain = pack(state, tensors)
    names = _names(plain, len(tensors))
    pieces = [
        Piece(name, tuple(tensor.shape), box_of(tensor).offsets, local_of(tensor))
        for name, tensor in zip(names, tensors, strict=True)
    ]
    return Image(commits, plain, pieces)


def common_of(plain: Any) -> Any:
    """The plain part of an image without what is each worker's own."""
    if isinstance(plain, dict) and "d" in plain:
        return {"d": [[key, held] for key, held in plain["d"] if key != OWN]}
    return plain


def is_common(name: str) -> bool:
    """Whether a piece of that name is not each worker's own."""
    return name.partition(".")[0] != OWN


def _names(plain: Any, count: int) -> list[str]:
    """A name for each tensor, by the way to it; a number is added where two ways read alike."""
    found = [""] * count
    taken: dict[str, int] = {}
    for way, number in _ways(plain, ()):
        name = ".".join(way)
        again = taken[name] = taken.get(name, 0) + 1
        found[number] = name if again == 1 else f"{name}~{again}"
    return found


def _ways(plain: Any, way: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
    if isinstance(plain, list):
        return [one for i, held in enumerate(plain) for one in _ways(held, (*way, str(i)))]
    if not isinstance(plain, dict):
        return []
    ((kind, inner),) = plain.items()
    if kind == "t":
        return [(way, inner)]
    if kind == "u":
        return _ways(inner, way)
    if kind == "d":
        return [one for key, held in inner for one in _ways(held, (*way, str(key)))]
    return []
