"""How fast is a warm, shuffled epoch of 100 KiB records through `stoker.Loader` against torch's DataLoader on files?

Every side ends with the same: batches of 64 records as one uint8 tensor in the training process, a byte of each page
of which is looked at. A sample is an array over what was read; the DataLoader reads the original local files by
`open().read()`. "torch on node" is the DataLoader over the same dataset as ours.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _common import interleaved, median_ratio, parser, report
from torch.utils.data import DataLoader

from stoker import Dataset, Loader
from stoker.cache.embedded import EmbeddedCache

SIZE_BYTES = 100 * 1024
BATCH = 64
WORKERS = (0, 1, 2, 4, 8)
GOAL_NODE, GOAL_REMOTE = 1.4, 0.95


class Files:
    """The original files as a map-style dataset."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, record: int) -> Any:
        with open(self.paths[record], "rb") as file:
            return decode(file.read())


def main() -> int:
    """Print records per second, ours over those of the files, for each number of workers."""
    made = parser((__doc__ or "").partition("\n")[0])
    made.add_argument("--records", type=int, default=2048)
    made.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    made.add_argument("--profile", action="store_true", help="print loader.stats of each side as well")
    arguments = made.parse_args()
    rounds = 5 if arguments.quick else 9
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "files")
        folder.mkdir()
        for number in range(arguments.records):
            Path(folder, f"{number:06}").write_bytes(os.urandom(SIZE_BYTES))
        with EmbeddedCache(f"{name}/cache", 10**9, {"b": str(folder)}, "benchmark-token") as cache:
            assert cache.endpoint is not None
            node, remote = cache.endpoint.unix_url, cache.endpoint.url
            for workers in arguments.workers:
                made_by: dict[str, Callable[[], Any]] = {
                    "files": partial(_torch, Files(sorted(map(str, folder.iterdir()))), workers),
                    "node": partial(_ours, _dataset(node), workers),
                    "torch on node": partial(_torch, _dataset(node), workers),
                    "remote": partial(_ours, _dataset(remote), workers),
                }
                figures |= _measured(workers, made_by, rounds, is_told=arguments.profile)
    figures["load average"] = os.getloadavg()[0]
    report("loader", figures, arguments.json)
    return 0


def decode(data: Any) -> Any:
    """The record as an array that shares its memory."""
    return np.frombuffer(data, dtype=np.uint8)


def _dataset(endpoint: str) -> Dataset:
    os.environ["STOKER_CACHE_ENDPOINT"] = endpoint
    os.environ["STOKER_CACHE_TOKEN"] = "benchmark-token"
    data = Dataset("stoker://b/", decode=decode)
    assert len(data)  # attached here, and so in forked processes
    return data


def _torch(data: Any, workers: int) -> DataLoader[Any]:
    return DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )


def _ours(data: Dataset, workers: int) -> Loader:
    return Loader(data, global_batch_size=BATCH, shuffle=True, seed=1, num_workers=workers)


def _measured(
    workers: int, made_by: dict[str, Callable[[], Any]], rounds: int, *, is_told: bool
) -> dict[str, object]:
    loaders = {side: make() for side, make in made_by.items()}
    sides = {side: partial(_epoch, loader) for side, loader in loaders.items()}
    for run in sides.values():
        run()
    for loader in loaders.values():
        if isinstance(loader, Loader):
            loader.stats.reset()
    found = interleaved(sides, rounds)
    rates = {side: [1 / seconds for seconds in found[side]] for side in found}
    records = len(loaders["files"].dataset)
    figures: dict[str, object] = {
        f"{workers} workers, files, records/s": round(statistics.median(rates["files"]) * records)
    }
    goals = {"node": f" (goal {GOAL_NODE})" if workers else "", "torch on node": ""}
    goals["remote"] = f" (goal {GOAL_REMOTE})" if workers == 1 else ""
    for side, goal in goals.items():
        figures[f"{workers} workers, {side} ratio{goal}"] = median_ratio(rates[side], rates["files"])
    for side, loader in loaders.items():
        if isinstance(loader, Loader):
            if is_told:
                print(side, loader.stats)
            loader.close()
    return figures


def _epoch(batches: Iterable[torch.Tensor]) -> float:
    started = time.perf_counter()
    records = 0
    for batch in batches:
        assert int(batch[:, ::4096].sum()) > 0
        records += len(batch)
    assert records
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
