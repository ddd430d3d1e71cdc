"""Every benchmark, one after the other, as one table of ratios."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from _common import commit, machine, parser

FOLDER = Path(__file__).parent


def is_ratio(name: str) -> bool:
    """Whether a figure is one of ours over one of a peer's; `1/s` and `req/s` are units."""
    return " / " in name or "ratio" in name


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    names = sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith(("all", "_")))
    rows: list[tuple[str, str, object]] = []
    failed = []
    for name in names:
        print(f"… {name}", file=sys.stderr, flush=True)
        command = [
            sys.executable,
            str(FOLDER / f"{name}.py"),
            "--json",
            *(["--quick"] if options.quick else []),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        figures = {}
        with contextlib.suppress(json.JSONDecodeError, IndexError):
            figures = json.loads(done.stdout.strip().splitlines()[-1])
        if done.returncode != 0 or not figures:
            failed.append(name)
        rows += [(name, key, value) for key, value in figures.items() if is_ratio(key)]
    print(f"machine {machine()}; commit {commit()}")
    for name, key, value in rows:
        print(f"  {name:<12} {key:<60} {value}")
    if options.json:
        print(json.dumps({"machine": machine(), "commit": commit(), "rows": rows, "failed": failed}))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
