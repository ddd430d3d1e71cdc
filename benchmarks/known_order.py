"""How near does a cache that knows the order come to the optimum, when the dataset is larger than it?

A shuffled dataset of 100 KiB records behind an origin of limited bandwidth is read by `stoker.Loader` for some epochs,
through caches of a part of its size: with its order announced, and without, with the policies lru and uniform. A step
of fixed time stands in for the accelerator. Hits are bytes that did not come from the origin, over those of the offline
optimum (Belady's, which for shuffled epochs is the part of the dataset that fits); the time of an epoch is over its
bound, max(compute, bytes missed / bandwidth).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from _common import parser, report

import stoker
from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache
from stoker.settings import CacheSettings
from stoker.wire.cache_api import BucketAdded, BucketSpec

SIZE_BYTES = 100 * 1024
BATCH = 32
PARTS = (0.1, 0.3, 0.5, 0.8)
SIDES = ("known", "uniform", "lru")
TOKEN = "token-of-this-benchmark"
GOAL_HITS, GOAL_TIME = 0.98, 1.05


class Epoch(NamedTuple):
    """What one epoch took, and what of it the steps did; bytes that came from the origin."""

    wall_s: float
    compute_s: float
    origin_bytes: int


def main() -> int:
    """Print hits over the optimum's and time over its bound, for each part of the dataset that fits."""
    made = parser((__doc__ or "").partition("\n")[0])
    made.add_argument("--records", type=int, help="how many of 100 KiB; default: 10000, with --quick 3000")
    made.add_argument("--epochs", type=int, help="with the cold one; default: 6, with --quick 4")
    made.add_argument("--bandwidth", type=float, default=100e6, help="of the origin, in bytes/s")
    made.add_argument("--step", type=float, default=0.02, help="seconds of compute for each 32 records")
    made.add_argument("--parts", type=float, nargs="*", default=PARTS)
    arguments = made.parse_args()
    records = arguments.records or (3000 if arguments.quick else 10_000)
    epochs = arguments.epochs or (4 if arguments.quick else 6)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        origin = Path(name, "origin")
        origin.mkdir()
        for number in range(records):
            (origin / f"{number:06d}.bin").write_bytes(os.urandom(SIZE_BYTES))
        for part in arguments.parts:
            for side in SIDES:
                print(f"{part:.0%} of the dataset, {side} …", file=sys.stderr)
                folder = Path(name, f"{side}-{part}")
                found = list(run(folder, origin, int(records * SIZE_BYTES * part), side, epochs, arguments))
                figures |= told(f"{part:.0%}, {side}", found, part, records * SIZE_BYTES, arguments.bandwidth)
    report("known_order", figures, arguments.json)
    return 0


def run(
    folder: Path, origin: Path, capacity_bytes: int, side: str, epochs: int, arguments: Any
) -> Iterator[Epoch]:
    """The epochs of one loader, through a cache of its own."""
    cache = EmbeddedCache(folder, capacity_bytes=capacity_bytes, token=TOKEN)
    endpoint = cache.start().unix_url
    try:
        with CacheClient(endpoint, TOKEN) as client:
            policy = "uniform" if side == "uniform" else "lru"
            spec = BucketSpec(f"file://{origin}", policy, origin_bytes_per_s=arguments.bandwidth)
            client.call("PUT", "/-/buckets/b", BucketAdded, msgspec.json.encode(spec))
            settings = CacheSettings(endpoint, TOKEN, folder / "own", 10**6)
            data = stoker.Dataset("stoker://b/", cache=settings, decode=len)
            loader = stoker.Loader(
                data, global_batch_size=BATCH, shuffle=True, num_workers=2, announce=side == "known"
            )
            with loader:
                before = client.status().origin_bytes
                for _ in range(epochs):
                    began, computed_s = time.perf_counter(), 0.0
                    for _batch in loader:
                        stepped = time.perf_counter()
                        time.sleep(arguments.step)
                        computed_s += time.perf_counter() - stepped
                    wall_s = time.perf_counter() - began
                    after = client.status().origin_bytes
                    yield Epoch(wall_s, computed_s, after - before)
                    before = after
    finally:
        cache.stop()


def told(name: str, epochs: list[Epoch], part: float, dataset_bytes: int, bandwidth: float) -> dict[str, Any]:
    """Figures of one run: hits after the cold epoch, time over the bound with it and after it."""
    warm = epochs[1:]
    hits = 1 - sum(epoch.origin_bytes for epoch in warm) / (dataset_bytes * len(warm))
    bounds = [epoch.wall_s / max(epoch.compute_s, epoch.origin_bytes / bandwidth) for epoch in epochs]
    return {
        f"{name}: hits over the optimum's (goal {GOAL_HITS})": round(hits / part, 3),
        f"{name}: cold epoch, time over its bound (goal {GOAL_TIME})": round(bounds[0], 3),
        f"{name}: warm epochs, time over their bound (goal {GOAL_TIME})": round(
            statistics.median(bounds[1:]), 3
        ),
        f"{name}: warm epochs, s": round(statistics.median(epoch.wall_s for epoch in warm), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
