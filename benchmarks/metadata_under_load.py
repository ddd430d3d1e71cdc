"""How many metadata requests a second are answered while the data path is saturated, over those at rest?

32 connections ask for metadata: HEAD, which the front answers; a stat and a page of a known list, which the back
answers. 16 others read ranges of 8 MiB as fast as they come, in processes that throw the bytes away. Twice:

- the line is full: what the server may send of data is limited to what this machine carries easily, so that the limit,
  and not the processors that clients and server share here, is what data waits for;
- the processors are full: nothing is limited. nginx, with an Authorization check, is asked in the same way.

HEAD is of an empty object: wrk waits for bodies that do not come otherwise. The server does the same for both. Pages
are of 10 objects, for what the back says counts as data: longer ones would be most of what the line carries.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _common import parser, report
from _serving import Asker, Readers, serve
from _web import Asked, missing_tools, nginx, wrk

LINE_BYTES_PER_S = 200e6
FILE_BYTES = 64 << 20
CONNECTIONS = 32
READERS = 2
READER_CONNECTIONS = 8
GOAL = 0.8
HEAD = str(Path(__file__).parent / "scripts" / "head.lua")
SCRIPT = str(Path(__file__).parent / "scripts" / "range_readers.py")
KINDS = {
    "HEAD": ("/b/empty", HEAD),
    "stat": ("/-/stat/b/small-050", ""),
    "list": ("/-/list/b?prefix=small-&limit=10", ""),
}


def main() -> int:
    """Print requests a second beside data over those at rest."""
    arguments = parser(__doc__ or "").parse_args()
    if missing := missing_tools():
        print(
            f"metadata_under_load: skipped, {' and '.join(missing)} not found: apt-get install nginx-light wrk"
        )
        return 0
    rounds, seconds = (3, 1) if arguments.quick else (7, 2)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        origin = folder / "www" / "b"
        origin.mkdir(parents=True)
        (origin / "large").write_bytes(os.urandom(FILE_BYTES))
        (origin / "empty").touch()
        for number in range(100):
            (origin / f"small-{number:03}").write_bytes(b"x")
        folder.chmod(0o755)  # nginx's worker runs as another user
        with (
            nginx(folder) as (nginx_url, _),
            serve(folder / "line", origin, "--egress", str(int(LINE_BYTES_PER_S))) as line,
            serve(folder / "free", origin) as free,
        ):
            for server in (line, free):
                _warm(server.address)
            sides = [("full line", line.url, list(KINDS)), ("full processors", free.url, list(KINDS))]
            sides.append(("full processors, nginx", nginx_url, ["HEAD"]))
            for what, url, kinds in sides:
                for kind in kinds:
                    figures |= _figures(f"{what}: {kind}", url, kind, rounds, seconds)
    report("metadata_under_load", figures, arguments.json)
    return 0


def _warm(address: tuple[str, int]) -> None:
    asker = Asker(address)
    for target in ("/b/large", *(target for target, _ in KINDS.values())):
        asker.ask(target)
    asker.close()


def _figures(what: str, url: str, kind: str, rounds: int, seconds: int) -> dict[str, object]:
    target, script = KINDS[kind]
    asked: dict[str, list[Asked]] = {"at rest": [], "beside data": []}
    data_rates = []
    for number in range(rounds + 1):
        for side in asked if number % 2 else reversed(asked):
            with _readers(url) if side == "beside data" else contextlib.nullcontext() as readers:
                before, began = (0 if readers is None else readers.read_bytes()), time.perf_counter()
                found = wrk(f"{url}{target}", seconds, CONNECTIONS, script=script)
                took_s = time.perf_counter() - began
                if number:  # the first one warms up
                    asked[side].append(found)
                    if readers is not None:
                        data_rates.append((readers.read_bytes() - before) / took_s)
    medians = {side: statistics.median(row.per_s for row in rows) for side, rows in asked.items()}
    p99_s = statistics.median(row.p99_s for row in asked["beside data"])
    figures: dict[str, object] = {
        f"{what}: ratio to rest (goal {GOAL})": medians["beside data"] / medians["at rest"],
        f"{what}: at rest, beside data, req/s": " ".join(f"{value:.0f}" for value in medians.values()),
        f"{what}: p99 beside data, ms": p99_s * 1e3,
    }
    data_per_s = statistics.median(data_rates)
    if "line" in what:
        figures[f"{what}: ratio of data to the line"] = data_per_s / LINE_BYTES_PER_S
    else:
        figures[f"{what}: data, MB/s"] = data_per_s / 1e6
    return figures


def _readers(url: str) -> Readers:
    host, _, port = url.removeprefix("http://").rpartition(":")
    arguments = [host, port, "/b/large", str(FILE_BYTES), str(READER_CONNECTIONS)]
    return Readers([sys.executable, SCRIPT, *arguments] for _ in range(READERS))


if __name__ == "__main__":
    sys.exit(main())
