"""How long do hits take on a node whose processors are busy with other things?

GET of 100 KiB that are held, 32 connections, from `stoker cache serve` and from nginx with an Authorization check: at
rest, and beside as many and twice as many processes that only compute as the node has processors. wrk has priority
(nice -15, as root), for readers on other nodes would not wait for this one's processors: what is measured is
the server's waiting. Then the same with the server's own threads at nice -10, nginx's worker as well.

Ratios of seconds are ours over nginx's in the same situation: less is better; of requests, more.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _common import interleaved, parser, report
from _serving import Asker, serve
from _web import Asked, missing_tools, nginx, wrk

SIZE_BYTES = 100 * 1024
CONNECTIONS = 32
CLIENT_NICE = -15
SERVER_NICE = -10
BUSY = str(Path(__file__).parent / "scripts" / "busy.py")


def main() -> int:
    """Print p50, p99 and requests a second of both servers in each situation, and their ratios."""
    arguments = parser(__doc__ or "").parse_args()
    if missing := missing_tools():
        print(
            f"hits_beside_work: skipped, {' and '.join(missing)} not found: apt-get install nginx-light wrk"
        )
        return 0
    rounds, seconds = (3, 1) if arguments.quick else (5, 3)
    is_root = os.geteuid() == 0
    cores = os.cpu_count() or 1
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "www" / "b").mkdir(parents=True)
        (folder / "www" / "b" / "object").write_bytes(os.urandom(SIZE_BYTES))
        folder.chmod(0o755)  # nginx's worker runs as another user
        with nginx(folder) as theirs, serve(folder / "cache", folder / "www" / "b") as ours:
            Asker(ours.address).ask("/b/object")
            sides = {"nginx": theirs, "stoker": (ours.url, ours.pid)}
            for nice in (0, SERVER_NICE) if is_root else (0,):
                _renice(nice, *(pid for _, pid in sides.values()))
                for busy in (0, cores, 2 * cores):
                    with _busy(busy):
                        what = f"{busy} busy" + (f", servers at nice {nice}" if nice else "")
                        figures |= _figures(what, sides, rounds, seconds, is_root)
    if not is_root:
        figures["wrk had no priority"] = "its own waiting is in these figures: run this as root"
    report("hits_beside_work", figures, arguments.json)
    return 0


def _figures(
    what: str, sides: dict[str, tuple[str, int]], rounds: int, seconds: int, is_root: bool
) -> dict[str, object]:
    asked: dict[str, list[Asked]] = {side: [] for side in sides}
    entry = ("nice", "-n", str(CLIENT_NICE)) if is_root else ()

    def ask(side: str) -> float:
        url = f"{sides[side][0]}/b/object"
        asked[side].append(wrk(url, seconds, CONNECTIONS, entry=entry))
        return asked[side][-1].p99_s

    for side in sides:
        wrk(f"{sides[side][0]}/b/object", 1, CONNECTIONS, entry=entry)
    interleaved({side: partial(ask, side) for side in sides}, rounds)
    figures: dict[str, object] = {}
    medians = {
        side: Asked(*(statistics.median(column) for column in zip(*rows, strict=True)))
        for side, rows in asked.items()
    }
    ours, peer = medians["stoker"], medians["nginx"]
    figures[f"{what}: p50 ratio"] = ours.p50_s / peer.p50_s
    figures[f"{what}: p99 ratio"] = ours.p99_s / peer.p99_s
    figures[f"{what}: requests ratio"] = ours.per_s / peer.per_s
    for side, row in medians.items():
        figures[f"{what}: {side}"] = (
            f"p50 {row.p50_s * 1e3:.2f} ms, p99 {row.p99_s * 1e3:.2f} ms, {row.per_s:.0f} req/s"
        )
    return figures


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    children = [subprocess.Popen([sys.executable, BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def _renice(nice: int, *pids: int) -> None:
    """All threads of these processes; 0 needs no right."""
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)


if __name__ == "__main__":
    sys.exit(main())
