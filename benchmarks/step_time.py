"""What does a step of @stoker.elastic cost beside the same step of bare DistributedDataParallel?

Both run in the same processes over the same group, in turn; a step reads a batch, goes forward and
backward through a small convolutional network with batch normalisation and steps AdamW; the elastic one also
commits (buffers and RNG kept aside, position and values sealed, the agent told). Goal: at most 1.02.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import parser, report

SCRIPT = str(Path(__file__).parent / "scripts" / "step_turns.py")


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--workers", type=int, default=2)
    options = flags.parse_args()
    steps = 150 if options.quick else 600
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable, "-m", "stoker.cli.main", "run", "--nproc-per-node", str(options.workers), "--no-cache",
            SCRIPT, "--out", str(out), "--steps", str(steps),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            sys.exit(f"the run failed:\n{done.stderr}")
        results = json.loads(out.read_text())
    figures = {
        "workers": options.workers,
        "steps of each kind": steps,
        "bare DDP step (ms)": statistics.median(results["bare"]) * 1000,
        "elastic step (ms)": statistics.median(results["elastic"]) * 1000,
        "elastic / bare (medians)": statistics.median(results["elastic"])
        / statistics.median(results["bare"]),
    }
    report("step_time", figures, options.json)


if __name__ == "__main__":
    main()
