"""What do several jobs on one dataset cost each other, and the origin, when they read through one cache?

One, two and four training jobs, each a process with an order of its own, read a dataset of 100 KiB records behind an
origin of limited bandwidth: all from the same moment on, or each half an epoch after the one before; through a cache
that holds all of it, and one that holds half. With the orders announced (known), and without, with the policy lru. A
step of fixed time stands in for the accelerator. Bytes from the origin are over those of the dataset: 1 is the least
where it fits. An epoch's time is over that of one job alone, by the same side: cold the first one, warm the others.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from _common import parser, report
from _web import cpu_s

from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache
from stoker.wire.cache_api import BucketAdded, BucketSpec

SCRIPT = str(Path(__file__).parent / "scripts" / "job_epochs.py")
SIZE_BYTES = 100 * 1024
BATCH = 32
TOKEN = "token-of-this-benchmark"
JOBS = (1, 2, 4)
PARTS = {"fits": 1.5, "half": 0.5}
SIDES = ("known", "lru")
GOAL_BYTES, GOAL_TIME = 1.0, 1.1


class Run(NamedTuple):
    """Epochs of each job, what all together took from the origin over the bytes of the dataset, and what the server
    computed."""

    epochs: list[list[dict[str, float]]]
    origin: float
    server_s: float

    def cold_s(self) -> float:
        return statistics.median(job[0]["wall_s"] for job in self.epochs)

    def warm_s(self) -> float:
        return statistics.median(epoch["wall_s"] for job in self.epochs for epoch in job[1:])


def main() -> int:
    """Print origin bytes and epoch times of several jobs over those of one."""
    made = parser((__doc__ or "").partition("\n")[0])
    made.add_argument("--records", type=int, help="how many of 100 KiB; default: 4000, with --quick 1500")
    made.add_argument("--epochs", type=int, help="of each job; default: 4, with --quick 3")
    made.add_argument("--rounds", type=int, help="default: 5, with --quick 1")
    made.add_argument("--bandwidth", type=float, default=40e6, help="of the origin, in bytes/s (%(default)s)")
    made.add_argument(
        "--step", type=float, default=0.05, help="seconds of compute for each 32 records (%(default)s)"
    )
    made.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    made.add_argument("--sides", nargs="*", default=SIDES, choices=SIDES)
    made.add_argument(
        "--jobs", nargs="*", type=int, default=JOBS, help="how many at a time; one alone always, to compare"
    )
    arguments = made.parse_args()
    arguments.records = arguments.records or (1500 if arguments.quick else 4000)
    arguments.epochs = arguments.epochs or (3 if arguments.quick else 4)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as name:
        origin = Path(name, "origin")
        origin.mkdir()
        for number in range(arguments.records):
            (origin / f"{number:06d}.bin").write_bytes(os.urandom(SIZE_BYTES))
        cases = [
            (part, side, jobs, start)
            for part in arguments.parts
            for jobs in sorted({1, *arguments.jobs})
            for start in (("together",) if jobs == 1 else ("together", "staggered"))
            for side in arguments.sides
        ]
        for number in range(rounds):
            for part, side, jobs, start in cases if number % 2 == 0 else reversed(cases):
                case = f"{part}, {side}, {jobs} jobs {start}"
                print(f"round {number}: {case} …", file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory(dir=name) as folder:
                    runs.setdefault(case, []).append(
                        _run(Path(folder), origin, part, side, jobs, start, arguments)
                    )
    figures = _figures(runs, arguments)
    figures["load average"] = os.getloadavg()[0]
    report("jobs", figures, arguments.json)
    return 0


def _run(folder: Path, origin: Path, part: str, side: str, jobs: int, start: str, arguments: Any) -> Run:
    """As many jobs, through a new cache."""
    dataset_bytes = arguments.records * SIZE_BYTES
    cache = EmbeddedCache(folder / "cache", capacity_bytes=int(dataset_bytes * PARTS[part]), token=TOKEN)
    started = cache.start()
    endpoint = started.unix_url
    try:
        with CacheClient(endpoint, TOKEN) as client:
            spec = BucketSpec(f"file://{origin}", "lru", origin_bytes_per_s=arguments.bandwidth)
            client.call("PUT", "/-/buckets/b", BucketAdded, msgspec.json.encode(spec))
            before, before_s = client.status().origin_bytes, cpu_s(started.pid)
            epochs = _epochs(endpoint, folder, side, jobs, start, arguments)
            taken = (client.status().origin_bytes - before) / dataset_bytes
            return Run(epochs, taken, cpu_s(started.pid) - before_s)
    finally:
        cache.stop()


def _epochs(
    endpoint: str, folder: Path, side: str, jobs: int, start: str, arguments: Any
) -> list[list[dict[str, float]]]:
    pipe = subprocess.PIPE
    asked = {
        "endpoint": endpoint, "token": TOKEN, "folder": str(folder / "own"), "records": arguments.records,
        "batch": BATCH, "workers": 1, "epochs": arguments.epochs, "step_s": arguments.step,
        "announce": side == "known",
    }  # fmt: skip
    children = [
        subprocess.Popen(
            [sys.executable, SCRIPT, json.dumps(asked | {"seed": seed})], stdin=pipe, stdout=pipe, text=True
        )
        for seed in range(jobs)
    ]
    wait_s = 0.0 if start == "together" else _bound_s(arguments) / 2
    try:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise RuntimeError("a job did not start")
        for number, child in enumerate(children):
            assert child.stdin is not None
            time.sleep(wait_s if number else 0)
            child.stdin.write("\n")
            child.stdin.flush()
        return [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    finally:
        for child in children:
            child.kill()


def _bound_s(arguments: Any) -> float:
    """No cold epoch of one job is faster."""
    read_s = arguments.records * SIZE_BYTES / arguments.bandwidth
    return float(max(read_s, arguments.records / BATCH * arguments.step))


def _figures(runs: dict[str, list[Run]], arguments: Any) -> dict[str, Any]:
    compute_s = arguments.records / BATCH * arguments.step
    figures: dict[str, Any] = {
        "records, epochs, rounds": f"{arguments.records}, {arguments.epochs}, {len(next(iter(runs.values())))}",
        "bandwidth alone, compute alone, s an epoch": (
            f"{arguments.records * SIZE_BYTES / arguments.bandwidth:.2f}, {compute_s:.2f}"
        ),
    }
    for case, found in runs.items():
        part, side, rest = case.split(", ")
        alone = runs[f"{part}, {side}, 1 jobs together"]
        cold, warm = (
            statistics.median(getattr(run, what)() for run in found) for what in ("cold_s", "warm_s")
        )
        origin = statistics.median(run.origin for run in found)
        if rest.startswith("1 "):
            figures[f"{case}: cold epoch over its bound (goal {GOAL_TIME})"] = cold / _bound_s(arguments)
            figures[f"{case}: warm epochs, s"] = warm
        else:
            for what, took in (("cold_s", cold), ("warm_s", warm)):
                one = statistics.median(getattr(run, what)() for run in alone)
                figures[f"{case}: {what[:4]} epochs ratio to one job alone (goal {GOAL_TIME})"] = took / one
        goal = f" (goal {GOAL_BYTES:.2f})" if part == "fits" else ""
        figures[f"{case}: origin bytes over the dataset's{goal}"] = origin
        reads = arguments.records * sum(map(len, found[0].epochs))
        server_ms = 1e3 * statistics.median(run.server_s for run in found) / reads
        figures[f"{case}: server CPU ms a record read"] = server_ms
    return figures


if __name__ == "__main__":
    sys.exit(main())
