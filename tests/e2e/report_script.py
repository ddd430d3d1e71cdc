"""A common training script: `report_script.py URL HOW`. The two lines that differ from PyTorch's own are marked."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

import stoker


def decode(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8)[:64].astype(np.float32))


def main(url: str, how: str) -> None:
    data = stoker.Dataset(url, decode=decode)  # changed
    loader = stoker.Loader(
        data, global_batch_size=16, shuffle=True, num_workers=2, report=how != "off"
    )  # changed
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(2):
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if how == "left":
                break
    if how == "told":
        print(loader.report())
    if how == "raise":
        raise LookupError("in the script")
    if how == "exit":
        time.sleep(0.01)
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
