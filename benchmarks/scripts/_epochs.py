"""Epochs of a loader, timed, with what they took from the origin. Every side of `loader_peers.py` goes through here."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

NUMBER_BYTES = 8


class Asked(NamedTuple):
    """What a side is told."""

    url: str
    """Of the origin."""
    bucket: str
    folder: str
    """For its cache; empty."""
    records: int
    record_bytes: int
    records_per_shard: int
    batch: int
    workers: int
    epochs: int


def collate(samples: list[bytes]) -> list[int]:
    """The records' numbers: what batches are made of is the same on all sides, and not the question."""
    assert all(type(sample) is bytes for sample in samples)
    return [int.from_bytes(sample[:NUMBER_BYTES], "big") for sample in samples]


def run(sides: dict[str, Callable[[Asked], Iterable[list[int]]]]) -> None:
    """`SCRIPT SIDE JSON`: print what each epoch took, as JSON. The first one begins before the loader is made."""
    asked = Asked(**json.loads(sys.argv[2]))
    taken(asked.url)
    before, began = busy_s(), time.perf_counter()
    loader = sides[sys.argv[1]](asked)
    found = []
    for _ in range(asked.epochs):
        first_s, seen = 0.0, []
        for numbers in loader:
            first_s = first_s or time.perf_counter() - began
            seen += numbers
        took_s = time.perf_counter() - began
        after = busy_s()
        found.append(
            {"took_s": took_s, "first_s": first_s, "busy": (after - before) / took_s / (os.cpu_count() or 1)}
            | {"records": len(seen), "distinct": len(set(seen))}
            | taken(asked.url)
        )
        before, began = busy_s(), time.perf_counter()
    print("\n" + json.dumps(found), flush=True)


def taken(url: str) -> dict[str, Any]:
    """What the origin has given since it was asked last."""
    with urllib.request.urlopen(f"{url}/-/taken") as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def busy_s() -> float:
    """Seconds that all processors together have computed, for whomever."""
    with open("/proc/stat", encoding="ascii") as lines:
        user, nice, system, _, _, irq, soft, steal = map(int, next(lines).split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
