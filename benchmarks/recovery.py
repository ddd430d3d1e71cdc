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

from _common import parser, report

SCRIPT = str(Path(__file__).parent / "scripts" / "ddp_steps.py")
WAIT_S = 60.0


def steps_in(folder: Path) -> dict[int, list[tuple[int, float]]]:
    """Per process: its steps and when they were committed."""
    found = {}
    for path in folder.glob("*.txt"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.stem)] = [(int(p[0]), float(p[1])) for p in lines if len(p) == 2]
    return found


def wait_for_step(folder: Path, step: int) -> dict[int, list[tuple[int, float]]]:
    deadline = time.time() + WAIT_S
    while time.time() < deadline:
        steps = steps_in(folder)
        if steps and max((s[-1][0] for s in steps.values() if s), default=0) >= step:
            return steps
        time.sleep(0.02)
    raise RuntimeError(f"no step {step} within {WAIT_S:.0f} s")


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
        first = min(s[0][1] for s in steps.values() if s) - launched
        reached = max(s[-1][0] for s in steps.values() if s)
        victim = sorted(steps)[-1]
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.05)
        deadline = time.time() + WAIT_S
        while time.time() < deadline:
            after = [
                (number, at)
                for pid, done in steps_in(out).items()
                if pid != victim
                for number, at in done
                if at > killed + 0.005 and (pid not in steps or number > reached)
            ]
            if after:
                number, at = min(after, key=lambda s: s[1])
                return first, at - killed, max(0, reached + 1 - number)
            time.sleep(0.01)
        raise RuntimeError("no step after the kill")
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
