"""What does exact mode cost beside ordinary DistributedDataParallel?

Both run in the same processes over the same group, in turn, on global batches of the same size: a small convolutional
network with batch normalisation, AdamW. In exact mode (`Loader(virtual_ranks=…)`) the global batch is cut into
micro-batches whose gradients are put aside and summed in a fixed tree; with one for each worker the cut is DDP's own,
with more each worker computes several smaller ones. Wide layers make the gradients large: then the exchange counts.
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
WIDTHS = (256, 2048)


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--workers", type=int, default=2)
    options = flags.parse_args()
    steps = 60 if options.quick else 300
    figures: dict[str, object] = {"workers": options.workers, "steps of each kind": steps}
    for width in WIDTHS:
        for per_worker in (1, 2, 4):
            results = _run(options.workers, options.workers * per_worker, width, steps)
            bare, exact = (statistics.median(results[side]) for side in ("bare", "elastic"))
            name = f"width {width}, {per_worker} micro-batches a worker"
            figures[f"{name}: DDP step (ms)"] = bare * 1000
            figures[f"{name}: exact / DDP (medians)"] = exact / bare
    report("exact", figures, options.json)


def _run(workers: int, virtual_ranks: int, width: int, steps: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        out = Path(folder) / "out.json"
        command = [
            sys.executable, "-m", "stoker.cli.main", "run", "--nproc-per-node", str(workers), "--no-cache",
            SCRIPT, "--out", str(out), "--steps", str(steps), "--width", str(width),
            "--virtual-ranks", str(virtual_ranks),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            sys.exit(f"the run failed:\n{done.stderr}")
        results: dict[str, list[float]] = json.loads(out.read_text())
        return results


if __name__ == "__main__":
    main()
