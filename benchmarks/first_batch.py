"""How long does a training process wait for its first batch, when the dataset is a million objects of an object store?

The origin answers lists with 1,000 keys a page, each answer after a wait, as S3 does. Cold: a new cache server, and a
node that knows nothing; warm: the same cache, and the node has the index. No list can be had sooner than by as many
pages, asked for as many at once as the loader does: `pages x wait / at once`, or than the origin itself can answer them
(a client that only counts bytes). Ratios are to the longer of both; "one by one" is what it takes to list page after
page.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from _common import parser, report
from _origin import many_objects, taken
from _serving import rss_bytes

from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache
from stoker.data.listing import JOBS, list_all

SCRIPT = str(Path(__file__).parent / "scripts" / "first_batch.py")
TOKEN = "token-of-this-benchmark"
SIZE_BYTES = 1000
PAGE = 1000
STAGES = ("attach", "list", "index", "first batch", "in all", "later batches", "epoch announced", "peak MB")
GOAL = 2.0


class Setting(NamedTuple):
    """The origin, and what is asked of it."""

    port: int
    objects: int
    wait_s: float


def main() -> int:
    """Print the parts of cold and warm starts, with and without loader processes, and ratios to what is possible."""
    made = parser((__doc__ or "").partition("\n")[0])
    made.add_argument("--objects", type=int, help="default: 1000000, with --quick 100000")
    made.add_argument("--wait", type=float, default=0.05, help="seconds to each answer (%(default)s)")
    made.add_argument("--rounds", type=int, help="default: 5, with --quick 3")
    made.add_argument("--workers", type=int, nargs="*", default=(0, 4))
    arguments = made.parse_args()
    objects = arguments.objects or (100_000 if arguments.quick else 1_000_000)
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    starts: dict[str, list[dict[str, float]]] = {}
    bounds: dict[str, list[float]] = {}
    with many_objects(objects, SIZE_BYTES, arguments.wait) as port:
        setting = Setting(port, objects, arguments.wait)
        for number in range(rounds):
            for workers in arguments.workers:
                print(f"round {number}, {workers} workers …", file=sys.stderr, flush=True)
                _round(setting, workers, number, starts)
            bounds.setdefault("origin alone", []).append(_origin_alone(setting))
            bounds.setdefault("one by one", []).append(_one_by_one(setting))
    figures = _figures(setting, starts, bounds)
    figures["load average"] = os.getloadavg()[0]
    report("first_batch", figures, arguments.json)
    return 0


def _round(setting: Setting, workers: int, number: int, starts: dict[str, list[dict[str, float]]]) -> None:
    with tempfile.TemporaryDirectory() as name, _cache(setting, name) as cache:
        assert cache.endpoint is not None
        asked = {
            "endpoint": cache.endpoint.unix_url, "token": TOKEN, "folder": f"{name}/own", "workers": workers,
            "seed": number, "announce": True,
        }  # fmt: skip
        for kind in ("cold", "warm"):
            taken(setting.port)
            done = subprocess.run(
                [sys.executable, SCRIPT, json.dumps(asked)], stdout=subprocess.PIPE, text=True, check=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            found["lists"] = taken(setting.port)["lists"]
            found["server MB"] = rss_bytes(cache.endpoint.pid) / 1e6
            starts.setdefault(f"{kind}, {workers} workers", []).append(found)


def _cache(setting: Setting, folder: str) -> EmbeddedCache:
    origin = f"s3://bucket?endpoint=http://127.0.0.1:{setting.port}"
    return EmbeddedCache(Path(folder, "cache"), 10**10, {"b": origin}, TOKEN)


def _one_by_one(setting: Setting) -> float:
    """Through a new cache, page after page."""
    with tempfile.TemporaryDirectory() as name, _cache(setting, name) as cache:
        assert cache.endpoint is not None
        with CacheClient(cache.endpoint.unix_url, TOKEN) as client:
            began = time.perf_counter()
            found = list_all(
                lambda prefix, after, limit: client.list_page("b", prefix, after, limit), "", lambda: False
            )
            took = time.perf_counter() - began
    assert len(found.keys) == setting.objects
    return took


def _origin_alone(setting: Setting) -> float:
    """All pages by a client that knows where each begins, and looks at none."""
    pages = range(0, setting.objects, PAGE)
    keys = [f"train/shard-{first // 1000 - 1:05}/sample-{first - 1:012}.bin" for first in pages]

    def ask(jobs: range) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", setting.port)
        size = 0
        for number in jobs:
            after = f"&start-after={keys[number]}" if number else ""
            connection.request("GET", f"/bucket?list-type=2{after}")
            body = connection.getresponse().read()
            size += len(re.findall(rb"<Key>", body[:1000]))
        connection.close()
        return size

    began = time.perf_counter()
    with ThreadPoolExecutor(JOBS) as pool:
        assert sum(pool.map(ask, (range(first, len(pages), JOBS) for first in range(JOBS)))) > 0
    return time.perf_counter() - began


def _figures(
    setting: Setting, starts: dict[str, list[dict[str, float]]], bounds: dict[str, list[float]]
) -> dict[str, Any]:
    pages = -(-setting.objects // PAGE)
    latency_s = pages * setting.wait_s / JOBS
    alone_s = statistics.median(bounds["origin alone"])
    one_s = statistics.median(bounds["one by one"])
    bound_s = max(latency_s, alone_s)
    figures: dict[str, Any] = {
        "objects, rounds": f"{setting.objects}, {len(bounds['one by one'])}",
        "wait for each answer, s": setting.wait_s,
        f"{pages} pages x wait / {JOBS} at once, s": latency_s,
        "the origin alone, s": alone_s,
        "listed one by one, s": one_s,
    }
    for name, found in starts.items():
        parts = {
            stage: round(statistics.median(one[stage] for one in found), 3)
            for stage in (*STAGES, "lists", "server MB")
        }
        for stage, value in parts.items():
            figures[f"{name}: {stage}" + ("" if stage in ("peak MB", "lists", "server MB") else ", s")] = (
                value
            )
        figures[f"{name}: list ratio to what is possible (goal {GOAL})"] = round(parts["list"] / bound_s, 3)
        figures[f"{name}: first batch ratio to what is possible (goal {GOAL})"] = round(
            parts["in all"] / bound_s, 3
        )
        figures[f"{name}: list ratio to one by one"] = round(parts["list"] / one_s, 3)
    return figures


if __name__ == "__main__":
    sys.exit(main())
