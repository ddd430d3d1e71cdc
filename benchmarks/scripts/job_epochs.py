"""`job_epochs.py JSON`: a training job's epochs. Says when it is ready, begins when it is sent a line, and prints how
long each epoch took and how long its steps, in seconds."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import stoker
from stoker.settings import CacheSettings


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    cache = CacheSettings(asked["endpoint"], asked["token"], Path(asked["folder"]), 10**6)
    data = stoker.Dataset("stoker://b/", cache=cache, decode=len)
    loader = stoker.Loader(
        data, global_batch_size=asked["batch"], shuffle=True, seed=asked["seed"], num_workers=asked["workers"],
        announce=asked["announce"], name=f"job-{asked['seed']}",
    )  # fmt: skip
    assert len(data) == asked["records"]
    print("ready", flush=True)
    sys.stdin.readline()
    epochs = []
    with loader:
        for _ in range(asked["epochs"]):
            began, computed_s, records = time.perf_counter(), 0.0, 0
            for batch in loader:
                stepped = time.perf_counter()
                time.sleep(asked["step_s"])
                computed_s += time.perf_counter() - stepped
                records += len(batch)
            assert records == asked["records"]
            wall_s = time.perf_counter() - began
            epochs.append({"wall_s": wall_s, "compute_s": computed_s})
    print(json.dumps(epochs), flush=True)


if __name__ == "__main__":
    main()
