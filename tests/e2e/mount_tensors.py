"""What frameworks do with files of a mount."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch.utils.data import DataLoader, Dataset


def make(folder: Path) -> None:
    """Files of each kind, of which some are large enough for the kernel to read them itself."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    tensors = {"w": torch.randn(700, 700, generator=generator), "b": torch.randn(700, generator=generator)}
    torch.save(tensors, folder / "model.pt")
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    np.save(folder / "array.npy", np.arange(500_000, dtype=np.int64))
    np.arange(300_000, dtype=np.float32).tofile(folder / "raw.f32")


def sums(folder: str) -> dict[str, float]:
    """Of all that is in the files."""
    mapped = torch.load(os.path.join(folder, "model.pt"), mmap=True, weights_only=True)
    read = torch.load(os.path.join(folder, "model.pt"), weights_only=True)
    with safetensors.safe_open(os.path.join(folder, "model.safetensors"), "pt") as file:
        safe = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    raw = np.memmap(os.path.join(folder, "raw.f32"), dtype=np.float32, mode="r")
    copied = np.memmap(os.path.join(folder, "raw.f32"), dtype=np.float32, mode="c")
    copied[:10] = 0
    array = np.load(os.path.join(folder, "array.npy"), mmap_mode="r")
    return {
        "mapped": float(mapped["w"].sum() + mapped["b"].sum()),
        "read": float(read["w"].sum() + read["b"].sum()),
        "safe": float(safe["w"].sum() + safe["b"].sum()),
        "raw": float(raw[::7].sum(dtype=np.float64)),
        "copied": float(copied.sum(dtype=np.float64)),
        "array": int(array[::-3].sum()),
    }


class Images(Dataset[tuple[torch.Tensor, int]]):
    """As torchvision's ImageFolder: a folder of a class each, in the order of their names."""

    def __init__(self, folder: str) -> None:
        self.kinds = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self.paths = [
            (path, number)
            for number, kind in enumerate(self.kinds)
            for path in sorted(
                os.path.join(folder, kind, name) for name in os.listdir(os.path.join(folder, kind))
            )
        ]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        path, kind = self.paths[place]
        with open(path, "rb") as file:
            data = file.read()
        pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return pixels.to(torch.float32) / 255, kind


def seen(folder: str, num_workers: int) -> list[list[int]]:
    """Of each image the class and a sum, in the order of the data set."""
    loader = DataLoader(Images(folder), batch_size=8, num_workers=num_workers)
    return [
        [int(kind), zlib.crc32(pixels.numpy().tobytes())]
        for batch in loader
        for pixels, kind in zip(*batch, strict=True)
    ]


def train(folder: str, num_workers: int, epochs: int, said: str) -> list[float]:
    """The loss of each step, which a file has as well as soon as it is there."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    images = Images(folder)
    size = len(images[0][0])
    model = torch.nn.Sequential(
        torch.nn.Linear(size, 32), torch.nn.ReLU(), torch.nn.Linear(32, len(images.kinds))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    loader: Any = DataLoader(images, batch_size=4, shuffle=True, num_workers=num_workers)
    with open(said, "w", encoding="ascii") as file:
        for _ in range(epochs):
            for pixels, kinds in loader:
                loss = torch.nn.functional.cross_entropy(model(pixels), kinds)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                file.write(f"{losses[-1]}\n")
                file.flush()
    return losses
