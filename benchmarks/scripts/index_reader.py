"""`index_reader.py JSON`: opens a dataset, looks up all its records, has loader processes do the same, and prints what
memory each of these took (bytes of this process: all that is resident, and what no other process shares)."""

from __future__ import annotations

import gc
import json
import multiprocessing
import pickle
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import stoker
from stoker.settings import CacheSettings

CHUNK = 16_384


def memory() -> dict[str, int]:
    gc.collect()
    found = {"resident": 0, "own": 0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss":
            found["resident"] = int(rest.split()[0]) * 1024
        elif name == "Private_Dirty":
            found["own"] = int(rest.split()[0]) * 1024
    return found


def look_up(data: stoker.Dataset) -> None:
    """Where each record is: what an epoch reads of the index."""
    records = data.records
    for first in range(0, len(records), CHUNK):
        reads = records.reads(np.arange(first, min(len(records), first + CHUNK), dtype=np.int64))
        assert reads is not None
        for number in set(reads.objects.tolist()):
            assert reads.keys[number]


def work(data: stoker.Dataset, told: Connection) -> None:
    look_up(data)
    told.send(memory())


def of_workers(data: stoker.Dataset, method: str) -> dict[str, int]:
    """The memory of the first of two processes that were started with the dataset."""
    context = multiprocessing.get_context(method)
    found: list[dict[str, int]] = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(data, theirs))
        process.start()
        found.append(ours.recv())
        process.join()
    return found[0]


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    cache = CacheSettings(asked["endpoint"], asked["token"], Path(asked["folder"]), 10**9)
    said: dict[str, Any] = {"before": memory()}
    data = stoker.Dataset(asked["url"], format=asked["format"], cache=cache)
    said["records"] = len(data)
    said["opened"] = memory()
    look_up(data)
    said["looked up"] = memory()
    said["fork"], said["spawn"] = of_workers(data, "fork"), of_workers(data, "spawn")
    said["pickled"] = len(pickle.dumps(data))
    index = getattr(data.records, "index", None)
    path = getattr(index, "path", None)
    said["file"] = path.stat().st_size if path is not None else 0
    print(json.dumps(said))


if __name__ == "__main__":
    main()
