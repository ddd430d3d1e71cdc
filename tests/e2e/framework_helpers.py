"""Data for scripts of frameworks, and what they read of it: each process of a world notes that in a file of its own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

RECORDS, BATCH = 101, 8
"""13 steps an epoch, the last of 5 records: 3 and 2 for two processes."""


class Rows:
    """Each record knows its number."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, record: int) -> Any:
        values = np.random.default_rng(record).normal(size=16).astype("float32")
        return {"number": record, "x": values, "labels": record % 2}


def note(what: str, rank: int, numbers: Any) -> None:
    """These records were read for that."""
    with Path(f"read-{rank}").open("a") as file:
        file.write(json.dumps([what, numbers.tolist()]) + "\n")


def noted(folder: Path, rank: int) -> dict[str, Counter[int]]:
    """How often a process has read each record, for what."""
    found: dict[str, Counter[int]] = {}
    for line in (folder / f"read-{rank}").read_text().splitlines():
        what, numbers = json.loads(line)
        found.setdefault(what, Counter()).update(numbers)
    return found
