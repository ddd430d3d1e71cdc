"""LOCAL MOUNT SMALL URL ROUNDS: seconds of epochs of pictures, with a small convolutional network trained on them and
without, in turns: by torch's DataLoader from files in folders of their class, on the disk and on two mounts; from one
file of all that is mapped, on the disk and on a mount; and by Stoker's loader from a cache."""

import io
import json
import os
import sys
import time

os.environ.setdefault("STOKER_REPORT", "0")

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stoker

BATCH, WORKERS = 64, 2


def decoded(sample):
    """The sample of an image's bytes and its label."""
    data, label = sample
    return picture(data), label


def picture(data):
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)), dtype=np.float32) / 255).unsqueeze(0)


class Folder(Dataset):
    """As torchvision's ImageFolder: a folder for each class."""

    def __init__(self, root):
        labels = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.files = [
            (f"{root}/{label}/{name}", number)
            for number, label in enumerate(labels)
            for name in sorted(os.listdir(f"{root}/{label}"))
        ]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        with open(path, "rb") as file:
            return picture(file.read()), label


class Mapped(Dataset):
    """Arrays of all pictures and labels, mapped into memory when a worker first reads of them."""

    def __init__(self, root):
        self.root = root
        self.arrays = None
        self.length = len(np.load(f"{root}/labels.npy"))

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.arrays is None:
            self.arrays = [
                np.load(f"{self.root}/{name}.npy", mmap_mode="r") for name in ("pictures", "labels")
            ]
        pictures, labels = self.arrays
        return torch.from_numpy(pictures[index].astype(np.float32) / 255).unsqueeze(0), int(labels[index])


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def batches(data):
    return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=WORKERS, drop_last=True)


def loader(url):
    data = stoker.Dataset(url, format="folder", decode=decoded)
    return stoker.Loader(data, global_batch_size=BATCH, shuffle=True, seed=1, num_workers=WORKERS)


def epoch(batches, model):
    """Seconds, and how many pictures; without a model they are only read."""
    began, seen = time.perf_counter(), 0
    if model is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for pictures, labels in batches:
        seen += len(labels)
        if model is None:
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
    return time.perf_counter() - began, seen


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)  # the others are the workers'
    local, mount, small, url, rounds = *sys.argv[1:5], int(sys.argv[5])
    files = {"local": local, "mount": mount, "mount of small files": small}
    mapped = {"local, mapped": local, "mount, mapped": mount}
    first = {"mount of small files": epoch(batches(Folder(f"{small}/files")), None)[0]}
    sides = (
        {side: batches(Folder(f"{root}/files")) for side, root in files.items()}
        | {side: batches(Mapped(f"{root}/arrays")) for side, root in mapped.items()}
        | {"loader": loader(f"{url}files/")}
    )
    found = {state: {side: [] for side in sides} for state in ("trained", "only read")}
    models = {side: network() for side in sides}
    expected = len(Folder(f"{local}/files")) // BATCH * BATCH
    for number in range(rounds + 1):
        names = list(sides) if number % 2 else list(reversed(sides))
        for state, is_trained in (("trained", True), ("only read", False)):
            for side in names:
                spent_s, seen = epoch(sides[side], models[side] if is_trained else None)
                assert seen - expected in range(BATCH), f"{side}: {seen} pictures, not {expected}"
                if number:
                    found[state][side].append(spent_s)
    print(json.dumps(found | {"first": first}))


if __name__ == "__main__":
    main()
