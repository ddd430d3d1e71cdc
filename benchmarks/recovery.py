"""How long from SIGKILL of a worker to the next committed step, beside torchrun on the same script?

Both run the same loop (benchmarks/scripts/ddp_steps.py) with steps of 0.1 s on one node. torchrun restarts all
workers (`--max-restarts`; with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it often hangs); Stoker goes on
in the surviving processes. Also: launch to first step, and steps that had to be done again.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from _common import parser, report

SCRIPT = str(Path(__file__).parent / "scripts" / "ddp_steps.py")
WAIT_S = 60.0


class Step(NamedTuple):
    """A committed step of one process."""

    number: int
    at: float
    world: int


def steps_in(folder: Path) -> dict[int, list[Step]]:
    """Per process: its steps."""
    found = {}
    for path in folder.glob("*.txt"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.stem)] = [Step(int(p[0]), float(p[1]), int(p[2])) for p in lines if len(p) == 3]
    return found


def wait_for_step(folder: Path, number: int) -> dict[int, list[Step]]:
    deadline = time.time() + WAIT_S
    while time.time() < deadline:
        steps = steps_in(folder)
        if max((done[-1].number for done in steps.values() if done), default=0) >= number:
            return steps
        time.sleep(0.02)
    raise RuntimeError(f"no step {number} within {WAIT_S:.0f} s")


def next_step(folder: Path, world: int) -> Step:
    """The first step that a world after this one committed."""
    deadline = time.time() + WAIT_S
    while time.time() < deadline:
        after = [step for done in steps_in(folder).values() for step in done if step.world > world]
        if after:
            return min(after, key=lambda step: step.at)
        time.sleep(0.01)
    raise RuntimeError("no step after the kill")


def measure(command: list[str], workers: int, kill_at: int) -> tuple[float, float, float]:
    """Seconds launch → first step, kill → next committed step, and steps repeated."""
    folder = Path(tempfile.mkdtemp(prefix="stoker-bench-"))
    out = folder / "steps"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "STOKER_CACHE_DIR": str(folder / "cache"),
    }
    launched = time.time()
    job = subprocess.Popen(
        [*command, "--out", str(out), "--step-s", "0.1"],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        steps = wait_for_step(out, kill_at)
        first = min(done[0].at for done in steps.values() if done) - launched
        victim = sorted(steps)[-1]
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        found = next_step(out, steps[victim][-1].world)
        reached = max(
            step.number for done in steps_in(out).values() for step in done if step.world < found.world
        )
        return first, found.at - killed, max(0, reached + 1 - found.number)
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        try:
            job.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--workers", type=int, default=3)
    flags.add_argument("--only", choices=["stoker", "torchrun"])
    options = flags.parse_args()
    rounds, kill_at = (3, 10) if options.quick else (7, 20)
    size = str(options.workers)
    sides = {
        "stoker": [
            sys.executable, "-m", "stoker.cli.main", "run", "--nproc-per-node", size, SCRIPT, "--mode", "elastic",
        ],
        "torchrun": [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size,
            "--max-restarts", "3", SCRIPT, "--mode", "plain",
        ],
    }  # fmt: skip
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, command in sides.items():
            if options.only in (None, name):
                figures[name].append(measure(command, options.workers, kill_at))
                print(f"  {name}: {figures[name][-1]}", file=sys.stderr)
    shown: dict[str, float | int] = {"workers": options.workers, "kills per side": rounds}
    middle: dict[str, list[float]] = {}
    for name, runs in figures.items():
        if runs:
            middle[name] = [statistics.median(column) for column in zip(*runs, strict=True)]
            shown[f"{name}: kill to next step (s)"] = middle[name][1]
            shown[f"{name}: launch to first step (s)"] = middle[name][0]
            shown[f"{name}: steps done again"] = middle[name][2]
    if len(middle) == 2:
        shown["recovery, stoker / torchrun"] = middle["stoker"][1] / middle["torchrun"][1]
        shown["launch, stoker / torchrun"] = middle["stoker"][0] / middle["torchrun"][0]
    report("recovery", shown, options.json)


if __name__ == "__main__":
    main()
