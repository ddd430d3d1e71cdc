"""How fast is a warm epoch through the cache against reading the same files straight from the local disk?"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from _common import interleaved, median_ratio, parser, report

from stoker import Dataset, Loader
from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache
from stoker.data.order import GlobalOrder

SIZES = {"1KiB": (1024, 16384), "100KiB": (100 * 1024, 2048)}
BATCH = 64
GOAL = 0.9
WORKERS = (0, 2)


class Files:
    """The same records as a map-style dataset without a cache."""

    def __init__(self, folder: str, keys: Sequence[str]) -> None:
        self.paths = [f"{folder}/{key}" for key in keys]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, record: int) -> Any:
        return decode(read(self.paths[record]))


def main() -> int:
    """Print records per second through the cache over those from the files, for each size and layout."""
    arguments = parser(__doc__ or "").parse_args()
    rounds, share = (5, 4) if arguments.quick else (9, 1)
    figures: dict[str, object] = {"goal": GOAL}
    with tempfile.TemporaryDirectory() as name:
        folders = {label: f"{name}/{label}" for label in SIZES}
        for label, (size_bytes, records) in SIZES.items():
            os.mkdir(folders[label])
            for number in range(records // share):
                Path(folders[label], f"{number:06}").write_bytes(os.urandom(size_bytes))
        buckets = {label.lower(): folder for label, folder in folders.items()}
        with (
            EmbeddedCache(f"{name}/cache", 10**9, buckets, "benchmark-token") as cache,
            cache.client() as client,
        ):
            assert cache.endpoint is not None
            os.environ["STOKER_CACHE_ENDPOINT"] = cache.endpoint.unix_url
            os.environ["STOKER_CACHE_TOKEN"] = "benchmark-token"
            for label, folder in folders.items():
                figures |= _size(label, folder, client, rounds)
            status = client.status()
            figures["hits read here"] = f"{status.local_hits} of {status.hits}"
    figures["load average"] = os.getloadavg()[0]
    report("warm_epoch", figures, arguments.json)
    return 0


def read(path: str) -> bytes:
    """A whole file, the way scripts do it."""
    with open(path, "rb") as file:
        return file.read()


def decode(data: bytes) -> Any:
    """The record as an array that shares its memory."""
    return np.frombuffer(data, dtype=np.uint8)


def collate(samples: list[Any]) -> int:
    """Bytes in the batch: what a batch is made of afterwards is the same on both sides, and not the question."""
    return sum(sample.nbytes for sample in samples)


def _size(label: str, folder: str, client: CacheClient, rounds: int) -> dict[str, float]:
    bucket = label.lower()
    keys = [info.key for info in client.list_objects(bucket)]
    paths = [f"{folder}/{key}" for key in keys]
    for first in range(0, len(keys), BATCH):
        client.read_many(bucket, keys[first : first + BATCH])
    figures: dict[str, float] = {}

    def files(batch: list[int]) -> list[bytes]:
        return [read(paths[number]) for number in batch]

    def cached(batch: list[int]) -> list[bytes]:
        return client.read_many(bucket, [keys[number] for number in batch])

    sides = {"cache": partial(_raw, cached, len(keys)), "files": partial(_raw, files, len(keys))}
    figures[f"{label} read_many ratio"] = _ratio(sides, rounds)
    for workers in WORKERS:
        data = Dataset(f"stoker://{bucket}/", decode=decode)
        loaders = {
            "cache": _loader(data, workers),
            "files": _loader(Files(folder, keys), workers),
        }
        sides = {side: partial(_epoch, loader) for side, loader in loaders.items()}
        figures[f"{label} loader, {workers} workers, ratio"] = _ratio(sides, rounds)
    return figures


def _loader(data: Any, workers: int) -> Loader:
    return Loader(
        data, global_batch_size=BATCH, shuffle=True, seed=1, num_workers=workers, collate_fn=collate
    )


def _ratio(sides: Mapping[str, Callable[[], float]], rounds: int) -> float:
    """Records per second of the cache over those of the files, after a round that does not count."""
    for run in sides.values():
        run()
    found = interleaved(sides, rounds)
    return median_ratio(found["files"], found["cache"])


def _raw(batch_of: Callable[[list[int]], list[bytes]], records: int) -> float:
    order = GlobalOrder(records, seed=1, epoch=0)
    started = time.perf_counter()
    for first in range(0, records, BATCH):
        batch = batch_of(order.at(first, min(first + BATCH, records)).tolist())
        assert batch
    return time.perf_counter() - started


def _epoch(loader: Loader) -> float:
    started = time.perf_counter()
    size_bytes = sum(loader)
    assert size_bytes
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
