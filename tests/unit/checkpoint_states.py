"""States and damages for tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from stoker.train.checkpoints.image import Image, Piece, image_of
from stoker.train.checkpoints.manifest import MANIFEST, File, Manifest, step_name


def state_of(commits: int) -> dict[str, Any]:
    """One with all sorts of things in it, that says of which commit it is."""
    wide = torch.arange(24.0).reshape(4, 6)
    return {
        "modules": {
            "model": {
                "weight": torch.full((5, 3), float(commits)),
                "half": torch.ones(7, dtype=torch.bfloat16),
                "scalar": torch.tensor(2.5),
                "empty": torch.empty(0, 3),
                "flags": torch.tensor([True, False]),
                "turned": wide.t(),
                "part of another": wide[1:3, 2:4],
            }
        },
        "optimizers": {"adam": {"state": {0: {"step": torch.tensor(float(commits))}}}},
        "values": {"seen": (1, "a", None), "large": 2**90, "raw": b"\0\1"},
    }


def image_at(commits: int) -> Image:
    return image_of(commits, state_of(commits))


def same(one: Any, other: Any) -> bool:
    """Of states: tensors of one type and shape, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def rows(name: str, whole: torch.Tensor, start: int, stop: int) -> Piece:
    """A rank's piece of a tensor whose rows are divided."""
    offsets = (start,) + (0,) * (whole.dim() - 1)
    return Piece(name, tuple(whole.shape), offsets, whole[start:stop])


def flip(path: Path, at: int) -> None:
    """Another bit than was written."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def forge(folder: Path, commits: int, name: str, raw: bytes) -> None:
    """Put other bytes in a file's place, and into the manifest that it is so."""
    step = folder / step_name(commits)
    (step / name).write_bytes(raw)
    manifest = msgspec.json.decode((step / MANIFEST).read_bytes(), type=Manifest)
    forged = File(name, len(raw), xxhash.xxh3_128(raw).hexdigest())
    files = [forged if file.name == name else file for file in manifest.files]
    (step / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, files=files)))
