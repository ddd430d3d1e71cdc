"""What does an order of groups save where rows are decoded by row groups, and how well does it mix them?

Parquet files are read by `stoker.Loader`: as they lie, in an order of all rows, and in orders of groups with several
windows; by one rank, and by each of four in turn. Row groups that are decoded are counted over all ranks; a process
holds 24 of them. An order of all rows is followed for some steps only.

How well rows are mixed is told by what a training sees: data lies sorted, so that all rows of a group are of one class,
and softmax regression goes over it once. Its error is that after the epoch, over the one after an order of all rows.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import parser, report

import stoker
from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache
from stoker.data.formats.parquet import ParquetLayout
from stoker.data.group_order import GroupOrder
from stoker.data.session import session
from stoker.settings import CacheSettings
from stoker.wire.cache_api import BucketAdded, BucketSpec

FILES, BATCH, WIDTH = 8, 256, 128
WINDOWS = (1, 4, 16, 64)
SIDES: dict[str, dict[str, Any]] = {
    "as they lie": {},
    "all rows": {"shuffle": True},
    **{f"{window} groups": {"shuffle": "groups", "shuffle_window": window} for window in WINDOWS},
}
HELD_GROUPS = 24
STEPS_OF_ALL = 40
TOKEN = "token-of-this-benchmark"
CLASSES, DIMENSIONS = 10, 20


class Counted(NamedTuple):
    """An epoch, or the steps of it that were followed."""

    rows: int
    decoded: int
    cpu_s: float


def main() -> int:
    """Print what is decoded, what that costs, and how training fares."""
    made = parser((__doc__ or "").partition("\n")[0])
    made.add_argument("--rows", type=int, help="of a row group; default: 4000, with --quick 1000")
    made.add_argument("--groups", type=int, help="of a file; default: 16, with --quick 12")
    arguments = made.parse_args()
    rows = arguments.rows or (1000 if arguments.quick else 4000)
    groups = arguments.groups or (12 if arguments.quick else 16)
    figures: dict[str, Any] = mixing(256, 1000 if arguments.quick else 2000)
    with tempfile.TemporaryDirectory() as name:
        origin = Path(name, "origin")
        origin.mkdir()
        for number in range(FILES):
            write(origin / f"{number}.parquet", rows, groups, number)
        cache = EmbeddedCache(Path(name, "cache"), capacity_bytes=10**10, token=TOKEN)
        endpoint = cache.start().unix_url
        try:
            with CacheClient(endpoint, TOKEN) as client:
                spec = BucketSpec(f"file://{origin}", "lru")
                client.call("PUT", "/-/buckets/b", BucketAdded, msgspec.json.encode(spec))
            settings = CacheSettings(endpoint, TOKEN, Path(name, "own"), 10**6)
            for side in SIDES:
                print(f"{side} …", file=sys.stderr)
                figures |= measured(settings, side, HELD_GROUPS * rows * WIDTH * 4)
        finally:
            cache.stop()
    report("group_order", figures, arguments.json)
    return 0


def write(path: Path, rows: int, groups: int, number: int) -> None:
    """Rows as of a tokenised text: what is decoded is not what lies in the file."""
    values = np.random.default_rng(number).zipf(1.3, rows * groups * WIDTH).clip(max=50_000).astype(np.int32)
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(values), WIDTH)
    pq.write_table(pa.table({"tokens": tokens}), path, row_group_size=rows, compression="zstd")


def measured(settings: CacheSettings, side: str, held_bytes: int) -> dict[str, Any]:
    """Figures of one order, by one rank and by four."""
    figures: dict[str, Any] = {}
    for world in (1, 4):
        ranks = []
        for rank in range(world):
            data = stoker.Dataset("stoker://b/", cache=settings, held_bytes=held_bytes)
            ranks.append(epoch(data, side, rank, world))
        rows, decoded = sum(one.rows for one in ranks), sum(one.decoded for one in ranks)
        name = f"{side}, {world} ranks" if world > 1 else f"{side}, 1 rank"
        per_group = decoded * len(data) / rows / len(data.groups())
        figures |= {
            f"{name}: decodings of a row group": round(per_group, 2),
            f"{name}: CPU us a row": round(sum(one.cpu_s for one in ranks) / rows * 1e6, 1),
        }
    return figures


def epoch(data: stoker.Dataset, side: str, rank: int, world: int) -> Counted:
    """One rank's reads."""
    live = session()
    live.rank, live.world_size = rank, world
    counted = itertools.count()
    inner = ParquetLayout.decode

    def decode(*arguments: Any) -> Any:
        next(counted)
        return inner(*arguments)

    ParquetLayout.decode = decode  # type: ignore[method-assign, assignment]
    rows = 0
    try:
        with stoker.Loader(data, global_batch_size=BATCH, collate_fn=len, **SIDES[side]) as loader:
            len(loader)
            began = time.process_time()
            for count in itertools.islice(loader, STEPS_OF_ALL if side == "all rows" else None):
                rows += count
            return Counted(rows, next(counted), time.process_time() - began)
    finally:
        ParquetLayout.decode = inner  # type: ignore[method-assign]
        live.rank, live.world_size = 0, 1


def mixing(groups: int, rows: int) -> dict[str, Any]:
    """How neighbours differ, and what a training makes of sorted data."""
    firsts = np.arange(groups, dtype=np.int64) * rows
    figures: dict[str, Any] = {}
    errors: dict[int, list[float]] = {}
    for window in (groups, *reversed(WINDOWS)):
        distances = []
        for seed in range(5):
            order = GroupOrder(firsts, groups * rows, seed=seed, epoch=0, window=window).at(0, groups * rows)
            distances.append(float(np.abs(np.diff(order)).mean() / (groups * rows / 3)))
            errors.setdefault(window, []).append(trained(order // rows * CLASSES // groups, seed))
        name = "all rows" if window == groups else f"{window} groups"
        figures[f"{name}: distance of neighbours, of that in a random order"] = round(np.mean(distances), 3)
        ratio = np.mean(errors[window]) / np.mean(errors[groups])
        figures[f"{name}: error after an epoch over sorted data, ratio"] = round(float(ratio), 3)
    return figures


def trained(classes: np.ndarray[Any, np.dtype[np.int64]], seed: int) -> float:
    """The share of errors of softmax regression that saw rows of those classes, one after the other."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(CLASSES, DIMENSIONS)) * 0.6
    weights, bias = np.zeros((DIMENSIONS, CLASSES)), np.zeros(CLASSES)
    for first in range(0, len(classes), BATCH):
        labels = classes[first : first + BATCH]
        seen = centers[labels] + rng.normal(size=(len(labels), DIMENSIONS))
        scores = seen @ weights + bias
        likely = np.exp(scores - scores.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        likely[np.arange(len(labels)), labels] -= 1
        weights -= 0.1 * seen.T @ likely / len(labels)
        bias -= 0.1 * likely.mean(axis=0)
    labels = rng.integers(0, CLASSES, 20_000)
    scores = (centers[labels] + rng.normal(size=(len(labels), DIMENSIONS))) @ weights + bias
    return float((scores.argmax(axis=1) != labels).mean())


if __name__ == "__main__":
    sys.exit(main())
