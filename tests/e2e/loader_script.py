"""A loop over a loader that ends, or is ended, in one way or another: `loader_script.py HOW METHOD WORKERS [URL]`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import stoker

RECORDS = 200
MANY_RECORDS = 100_000
"""Of which a loop goes on until it is ended, however late that is."""


class Slow:
    """Each record takes its time, and notes which process reads."""

    def __init__(self, seconds: float, records: int) -> None:
        self.seconds = seconds
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, record: int) -> Any:
        time.sleep(self.seconds)
        return np.full(20_000, record)


def rows(data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.uint8)


def churn(stop: threading.Event) -> None:
    """A thread that allocates and prints nothing: it holds locks when the process forks. It rests in between: each
    thread that does not makes every system call of the others 5 ms longer, as that is how long it keeps the GIL."""
    while not stop.wait(0.001):
        _ = [bytearray(1000) for _ in range(1000)]


def read(how: str, method: str, workers: int, url: str) -> None:
    """By a client that this process has used before, beside threads."""
    data = stoker.Dataset(url, decode=rows)
    first = data[0]
    stop = threading.Event()
    threads = [threading.Thread(target=churn, args=(stop,), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(1 if workers > 8 else 3):
        loader = stoker.Loader(
            data, global_batch_size=16, num_workers=workers, multiprocessing_context=method
        )
        batches = list(loader)
        assert sum(len(batch) for batch in batches) == len(data)
        assert bool((batches[0][0].numpy() == first).all())
        if how == "close":
            loader.close()
    stop.set()
    print(loader.stats)
    print("read all")


def main() -> None:
    how, method, workers, url = sys.argv[1], sys.argv[2], int(sys.argv[3]), (sys.argv[4:] or [""])[0]
    if url:
        read(how, method, workers, url)
        return
    slow = Slow(0.02, MANY_RECORDS if how == "go on" else RECORDS)
    loader = stoker.Loader(slow, global_batch_size=4, num_workers=workers, multiprocessing_context=method)
    for step, _ in enumerate(loader):
        if step == 1:
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            if how == "exit":
                sys.exit(3)
            if how == "raise":
                raise LookupError("in the loop")
            if how == "fall off":
                break
            if how == "hard exit":
                os._exit(4)
            if how == "keep":
                global kept
                kept = iter(loader)
                next(kept)
                return
    Path("finished").touch()


if __name__ == "__main__":
    main()
