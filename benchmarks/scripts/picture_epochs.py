"""LOCAL MOUNT URL ROUNDS: seconds of epochs of pictures in folders of their class, by torch's DataLoader from two
folders and by Stoker's from a cache, in turns; with a small convolutional network trained on them, and without."""

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


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def folders(root):
    return DataLoader(Folder(root), batch_size=BATCH, shuffle=True, num_workers=WORKERS, drop_last=True)


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
    local, mount, url, rounds = *sys.argv[1:4], int(sys.argv[4])
    first = {"mount": epoch(folders(mount), None)[0]}
    sides = {"local": folders(local), "mount": folders(mount), "loader": loader(url)}
    found = {state: {side: [] for side in sides} for state in ("trained", "only read")}
    models = {side: network() for side in sides}
    expected = len(Folder(local)) // BATCH * BATCH
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
