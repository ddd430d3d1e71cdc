"""How long until the next step where all workers of a node are killed, beyond what it takes to import PyTorch?

A state of 500 MB, most of which no step changes. All workers of the only node are killed at once, and those that their
agent starts in their places go on from a snapshot in the node's memory, or from a checkpoint on disk; and, with two
nodes, those of one are killed, and the new ones copy the state from the other node's memory while that trains on: then
it is the first step with all of them that counts. Goal: 2 s. Side by side, in as many processes at once: the import of
PyTorch alone; what any script on PyTorch does before it can load a state: import it, make a model of that size, and an
optimizer, for whose first PyTorch imports as much again; and, for what a copy needs, to be given so much new memory,
which may take a virtual machine several times as long when its host has to find it first.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from _common import interleaved, parser, report
from _jobs import Job, free_port, workers_of

STEP_S = 0.05
EVERY = 10
GOAL_S = 2.0
BARE = """
import os, torch
model = torch.nn.Linear({size}, 1, bias=False).requires_grad_(False)
torch.optim.AdamW(torch.nn.Linear(64, 64).parameters())
os._exit(0)
"""
NEW_MEMORY = "import mmap; mmap.mmap(-1, {size}).madvise(23)"  # MADV_POPULATE_WRITE


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--megabytes", type=int, default=500)
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--rounds", type=int, default=0)
    options = flags.parse_args()
    extra = ("--ballast-mb", str(options.megabytes), "--snapshot-every", str(EVERY))
    sides: dict[str, Callable[[], float]] = {
        "memory": partial(killed, options.workers, extra),
        "disk": partial(killed, options.workers, (*extra, "--checkpoint-url", "checkpoints")),
        "another node's memory": partial(replaced, options.workers, extra),
        "import of PyTorch": partial(started, options.workers, "import torch"),
        "start of a bare script": partial(
            started, options.workers, BARE.format(size=options.megabytes * 250_000)
        ),
        "new memory": partial(
            started, options.workers, NEW_MEMORY.format(size=options.megabytes * 1_000_000)
        ),
    }
    took = interleaved(sides, options.rounds or (3 if options.quick else 5))
    base, start = (statistics.median(took[name]) for name in ("import of PyTorch", "start of a bare script"))
    figures: dict[str, object] = {"state, MB": options.megabytes, "workers of a node": options.workers}
    for name, seconds in took.items():
        figures[f"{name}: s"] = statistics.median(seconds)
        if name in ("memory", "disk", "another node's memory"):
            figures[f"{name}: beyond the import, s (goal {GOAL_S:g})"] = statistics.median(seconds) - base
            figures[f"{name}: beyond the start of a bare script, s"] = statistics.median(seconds) - start
    report("resume", figures, options.json)


def killed(workers: int, extra: Sequence[str]) -> float:
    """All workers of the only node: until the next step."""
    with Job(elastic=True, step_s=STEP_S, extra=extra) as job:
        agent = job.start("--standalone", "--nproc-per-node", str(workers))
        job.steps.wait_for_size(workers, steps=3 * EVERY)
        world = job.steps.newest
        time.sleep(1.0)  # a checkpoint is written
        began = time.time()
        for worker in workers_of(agent):
            worker.kill()
        first = job.steps.wait_for_world(world)
        if first.number < 2 * EVERY:
            raise RuntimeError(f"it began again at step {first.number}")
        return first.at - began


def replaced(workers: int, extra: Sequence[str]) -> float:
    """All workers of one of two nodes: until the next step in which as many take part."""
    flags = ["--nnodes", "1:2", "--nproc-per-node", str(workers), "--rdzv-id", "bench"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    with Job(elastic=True, step_s=STEP_S, extra=extra) as job:
        job.start(*flags)
        time.sleep(2.0)  # this one hosts the rendezvous
        agent = job.start(*flags)
        job.steps.wait_for_size(2 * workers, steps=EVERY)
        before = set(job.steps.newest_steps)
        began = time.time()
        for worker in workers_of(agent):
            worker.kill()
        while not set(job.steps.wait_for_size(2 * workers, steps=1)) - before:
            time.sleep(0.05)
        return job.steps.first_of(job.steps.newest).at - began


def started(workers: int, script: str) -> float:
    """In so many processes at once, until the last has ended."""
    began = time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(workers)]
    for child in children:
        child.wait()
    return time.time() - began


if __name__ == "__main__":
    main()
