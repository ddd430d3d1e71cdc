"""`first_batch.py JSON`: one start of a training process: prints how long each part of it took, in seconds, and memory.

What it takes to import libraries is not counted.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch  # noqa: F401 (imported here, so that it is not counted)

import stoker
from stoker.settings import CacheSettings

LATER = 20
"""Batches after the first one that are timed."""


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    cache = CacheSettings(asked["endpoint"], asked["token"], Path(asked["folder"]), 10**9)
    said: dict[str, float] = {}
    began = time.perf_counter()

    def note(name: str) -> None:
        nonlocal began
        said[name] = time.perf_counter() - began
        began = time.perf_counter()

    data = stoker.Dataset("stoker://b/", decode=len, cache=cache)
    started = began
    data._source.client.status()
    note("attach")
    data._source.listing()
    note("list")
    records = len(data)
    note("index")
    loader = stoker.Loader(
        data, global_batch_size=64, shuffle=True, seed=asked["seed"], num_workers=asked["workers"],
        announce=asked["announce"],
    )  # fmt: skip
    batches = iter(loader)
    next(batches)
    note("first batch")
    said["in all"] = time.perf_counter() - started
    for _ in range(LATER):
        next(batches)
    note("later batches")
    announcer = loader._announcer
    while announcer is not None and (announcer.told is None or announcer.told.stop < records):
        time.sleep(0.02)
    said["epoch announced"] = time.perf_counter() - started - said["in all"]
    said["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    loader.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
