"""Epochs of a loader, timed, with what they took from the origin. Every side of `loader_peers.py` goes through here."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from multiprocessing import active_children
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
    servers: list[int]
    """Processes whose computing counts as this side's."""


def collate(samples: list[bytes]) -> list[int]:
    """The records' numbers: what batches are made of is the same on all sides, and not the question."""
    assert all(type(sample) is bytes for sample in samples)
    return [int.from_bytes(sample[:NUMBER_BYTES], "big") for sample in samples]


def run(sides: dict[str, Callable[[Asked], Iterable[list[int]]]]) -> None:
    """`SCRIPT SIDE JSON`: print what each epoch took, as JSON. The first one begins before the loader is made."""
    asked = Asked(**json.loads(sys.argv[2]))
    taken(asked.url)
    before = clocks(asked)
    loader = sides[sys.argv[1]](asked)
    found = []
    for _ in range(asked.epochs):
        first_s, seen = 0.0, []
        for numbers in loader:
            first_s = first_s or time.perf_counter() - before.wall_s
            seen += numbers
        after = clocks(asked)
        took_s = after.wall_s - before.wall_s
        found.append(
            {"took_s": took_s, "first_s": first_s, "records": len(seen), "distinct": len(set(seen))}
            | {
                "cpu_s": after.own_s - before.own_s,
                "busy": (after.all_s - before.all_s) / took_s / (os.cpu_count() or 1),
            }
            | taken(asked.url)
        )
        before = clocks(asked)
    print("\n" + json.dumps(found), flush=True)


class Clocks(NamedTuple):
    wall_s: float
    own_s: float
    """Computed by this side's processes: loader, workers, what they waited for, servers."""
    all_s: float
    """Computed by all processes of this machine, for whomever."""


def clocks(asked: Asked) -> Clocks:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    with open("/proc/stat", encoding="ascii") as lines:
        user, nice, system, _, _, irq, soft, steal = map(int, next(lines).split()[1:9])
    own = 0
    for pid in (os.getpid(), *(child.pid for child in active_children()), *asked.servers):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            own += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
    return Clocks(time.perf_counter(), own * tick_s, (user + nice + system + irq + soft + steal) * tick_s)


def taken(url: str) -> dict[str, Any]:
    """What the origin has given since it was asked last."""
    with urllib.request.urlopen(f"{url}/-/taken") as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found
