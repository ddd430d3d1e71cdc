"""What do hits cost in the native front, against nginx with an Authorization check, by the same wrk command?

Requests per second and server CPU per request, ours over nginx's; and ours beside a busy Python thread in the same
process over ours at rest.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _common import parser, report
from _web import cpu_s, missing_tools, nginx, wrk

RANGE = "Range: bytes=8388608-16777215"
OBJECTS: dict[str, tuple[str, tuple[str, ...], float, float]] = {
    "1 KiB": ("1KiB", (), 1.1, 0.6),
    "100 KiB": ("100KiB", (), 1.0, 1.0),
    "8 MiB range": ("64MiB", (RANGE,), 1.0, 1.0),
}
"""Name, headers, and the goals: requests per second at least, CPU per request at most."""
SCRIPT = str(Path(__file__).parent / "scripts" / "front.py")


def main() -> int:
    """Print the ratios."""
    arguments = parser(__doc__ or "").parse_args()
    if missing := missing_tools():
        print(f"native_front: skipped, {' and '.join(missing)} not found: apt-get install nginx-light wrk")
        return 0
    rounds, seconds = (3, 1) if arguments.quick else (7, 2)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("www/b", "front", "busy"):
            (folder / part).mkdir(parents=True)
        for key, size_bytes in (("1KiB", 1024), ("100KiB", 100 * 1024), ("64MiB", 64 << 20)):
            (folder / "www" / "b" / key).write_bytes(os.urandom(size_bytes))
        folder.chmod(0o755)  # nginx's worker runs as another user
        with nginx(folder) as theirs, front(folder / "front") as ours:
            for label, (key, headers, rate_goal, cpu_goal) in OBJECTS.items():
                for connections in (32, 256):
                    sides = {"nginx": theirs, "stoker": ours}
                    rates, costs = measured(sides, key, headers, connections, rounds, seconds)
                    what = f"{label}, {connections} connections"
                    figures[f"{what}: requests/s (goal {rate_goal})"] = rates["stoker"] / rates["nginx"]
                    figures[f"{what}: CPU/request (goal {cpu_goal})"] = costs["stoker"] / costs["nginx"]
                    figures[f"{what}: stoker req/s"] = round(rates["stoker"])
        with front(folder / "front") as idle, front(folder / "busy", "--busy") as busy:
            rates, _ = measured({"idle": idle, "busy": busy}, "1KiB", (), 32, rounds, seconds)
            figures["1 KiB beside a busy Python thread (goal 0.6)"] = rates["busy"] / rates["idle"]
    report("native_front", figures, arguments.json)
    return 0


def measured(
    sides: dict[str, tuple[str, int]],
    key: str,
    headers: tuple[str, ...],
    connections: int,
    rounds: int,
    seconds: int,
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of requests per second, and of CPU seconds per request, of each side; in turns."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    costs: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            url, pid = sides[side]
            before = cpu_s(pid)
            asked = wrk(f"{url}/b/{key}", seconds, connections, *headers)
            if number:  # the first one warms up
                rates[side].append(asked.per_s)
                costs[side].append((cpu_s(pid) - before) / asked.requests)
    median = statistics.median
    return {k: median(v) for k, v in rates.items()}, {k: median(v) for k, v in costs.items()}


@contextlib.contextmanager
def front(folder: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """A front in a process of its own: its address, and the pid."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, SCRIPT, str(folder), *flags], stdin=pipe, stdout=pipe, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}", server.pid
        finally:
            server.communicate()


if __name__ == "__main__":
    sys.exit(main())
