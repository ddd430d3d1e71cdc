"""How long until the next step where all workers of a node are killed, beyond what it takes to import PyTorch?

A state of 500 MB, most of which no step changes. All workers of the only node are killed at once, and those that their
agent starts in their places go on from a snapshot in the node's memory, or from a checkpoint on disk; and, with two
nodes, those of one are killed, and the new ones copy the state from the other node's memory while that trains on: then
it is the first step with all of them that counts. Goal: 2 s. Side by side: the import of PyTorch alone, in as many
processes at once.
"""

from __future__ import annotations

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


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--megabytes", type=int, default=500)
    flags.add_argument("--workers", type=int, default=2)
    options = flags.parse_args()
    extra = ("--ballast-mb", str(options.megabytes), "--snapshot-every", str(EVERY))
    sides: dict[str, Callable[[], float]] = {
        "memory": partial(killed, options.workers, extra),
        "disk": partial(killed, options.workers, (*extra, "--checkpoint-url", "checkpoints")),
        "another node's memory": partial(replaced, options.workers, extra),
        "import of PyTorch": partial(imported, options.workers),
    }
    took = interleaved(sides, 3 if options.quick else 5)
    base = statistics.median(took["import of PyTorch"])
    figures: dict[str, object] = {"state, MB": options.megabytes, "workers of a node": options.workers}
    for name, seconds in took.items():
        figures[f"{name}: s"] = statistics.median(seconds)
        if name != "import of PyTorch":
            beyond = statistics.median(seconds) - base
            figures[f"{name}: beyond the import, s (goal {GOAL_S:g})"] = beyond
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


def imported(workers: int) -> float:
    """PyTorch, in so many processes at once."""
    began = time.time()
    children = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(workers)]
    for child in children:
        child.wait()
    return time.time() - began


if __name__ == "__main__":
    main()
