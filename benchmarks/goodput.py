"""How much of the time does a run that fails every 30 s train usefully, beside torchrun with file checkpoints?

Both run the same loop (benchmarks/scripts/ddp_steps.py) on one node; torchrun's saves a checkpoint every 20 steps and
goes on from the newest. At the same seeded times after their first step both lose the same seeded worker by SIGKILL.
A step sleeps in proportion to a rank's share of the batch, so fewer workers are slower. Goodput: the steps that the run
has come to at the end (done again or not, each counts once) over those that it would have come to at the speed of its
first, undisturbed seconds.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from typing import NamedTuple

from _common import parser, report
from _jobs import Job, Steps

STEP_S = 0.1
CHECKPOINT_EVERY = 20
SETTLED_S, UNDISTURBED_S = 3.0, 20.0
"""The full speed is measured from the first to the second of these, in seconds after the first step."""


class Failure(NamedTuple):
    """One worker is killed."""

    after_s: float
    """Seconds after the first step."""
    victim: int
    """Place of the victim among the workers, in the order of their process ids."""


class Run(NamedTuple):
    """What became of one run."""

    steps: int
    steps_per_s: float
    """At full speed."""
    done_again: int

    def goodput(self, seconds: float) -> float:
        return self.steps / (self.steps_per_s * seconds)


def failures_of(seconds: float, every_s: float, workers: int, seed: int) -> list[Failure]:
    """One failure in each stretch of `every_s` seconds, but the first."""
    rng = random.Random(seed)
    begins = [every_s * turn for turn in range(1, int(seconds / every_s))]
    return [Failure(begin + rng.uniform(0, every_s / 2), rng.randrange(workers)) for begin in begins]


def run(workers: int, seconds: float, failures: list[Failure], *, elastic: bool) -> Run:
    """Train for so long after the first step, and fail as told."""
    extra = ["--full-size", str(workers), "--checkpoint-every", str(CHECKPOINT_EVERY)]
    with Job(elastic=elastic, step_s=STEP_S, extra=extra) as job:
        job.start("--standalone", "--nproc-per-node", str(workers))
        steps = job.steps
        began = steps.wait_for_world(0).at
        for failure in failures:
            sleep_until(began + failure.after_s)
            kill_one(steps, failure.victim)
        sleep_until(began + seconds)
        steps.poll()
    mine = [step for step in steps.all if step.at <= began + seconds]
    reached = max(step.number for step in mine)
    first = {step.number for step in mine if step.at <= began + SETTLED_S}
    undisturbed = {step.number for step in mine if step.at <= began + UNDISTURBED_S}
    speed = (max(undisturbed) - max(first)) / (UNDISTURBED_S - SETTLED_S)
    worlds = {(step.number, step.world) for step in mine}
    return Run(reached, speed, len(worlds) - reached)


def sleep_until(wall_s: float) -> None:
    time.sleep(max(0.0, wall_s - time.time()))


def kill_one(steps: Steps, victim: int) -> None:
    """SIGKILL one of the newest world's workers; one that is gone already is not missed."""
    steps.poll()
    workers = sorted(steps.newest_steps)
    with contextlib.suppress(ProcessLookupError):
        os.kill(workers[victim % len(workers)], signal.SIGKILL)


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--workers", type=int, default=4)
    flags.add_argument("--seconds", type=float, default=0.0, help="length of a run (240; 90 with --quick)")
    flags.add_argument("--every", type=float, default=30.0, help="seconds between two failures (30)")
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--only", choices=["stoker", "torchrun"])
    options = flags.parse_args()
    seconds = options.seconds or (90.0 if options.quick else 240.0)
    failures = failures_of(seconds, options.every, options.workers, options.seed)
    shown: dict[str, object] = {
        "load before": os.getloadavg()[0],
        "workers": options.workers,
        "seconds": seconds,
        "failures": len(failures),
    }
    found: dict[str, float] = {}
    for name in ("stoker", "torchrun"):
        if options.only not in (None, name):
            continue
        result = run(options.workers, seconds, failures, elastic=name == "stoker")
        print(f"  {name}: {result}", file=sys.stderr, flush=True)
        found[name] = result.goodput(seconds)
        shown[f"{name}: goodput"] = found[name]
        shown[f"{name}: steps reached"] = result.steps
        shown[f"{name}: steps at full speed (1/s)"] = result.steps_per_s
        shown[f"{name}: steps done again"] = result.done_again
    if len(found) == 2:
        shown["goodput, stoker / torchrun"] = found["stoker"] / found["torchrun"]
    report("goodput", shown, options.json)


if __name__ == "__main__":
    main()
