"""How fast are epochs through Stoker, cold and warm, beside those of other loaders from the same slow S3 server?

The same records of 100 KiB in a real S3 server, in each loader's own layout, behind limits: so many bytes a second in
all and on each stream, and a first wait. Each side is a PyTorch DataLoader with as many workers, batches of the same
size, shuffled as the library does it, and nothing done with the batches. The cold epoch begins with an empty cache and
before the dataset is opened (lists and indexes count); the warm ones are the next of the same loader. Peers run in an
environment of their own: `python benchmarks/loader_peers.py --install build/loader-peers`, once.

Ratios are records/s of ours over those of the best peer: more is better.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from _common import interleaved, parser, report
from _peers import install, python_of, versions
from _s3 import BUCKET, KEYS, Limits, far_away, s3_server

from stoker import Dataset
from stoker.cache.embedded import EmbeddedCache

SCRIPTS = Path(__file__).parent / "scripts"
INSTALLED = Path(__file__).parents[1] / "build" / "loader-peers"
PEERS = ("s3fs", "filecache", "mosaicml", "litdata", "webdataset")
RECORD_BYTES = 100 * 1024
RECORDS_PER_SHARD = 512
"""50 MiB: near the 64 MB that MosaicML streaming and LitData make by themselves, and as many for each worker."""
BATCH = 64
WARM_EPOCHS = 2
COLD_GOAL = 1.5
WARM_GOAL = 1.0
TOKEN = "benchmark-token"


class Run(NamedTuple):
    """One run of one side: its cold epoch, and its warm ones."""

    cold: Mapping[str, float]
    warm: list[Mapping[str, float]]


class Setting(NamedTuple):
    """Where all sides read, and what."""

    url: str
    folder: Path
    peers_python: Path
    records: int
    workers: int


def main() -> int:
    """Print records/s and what came from the origin for each side, and the ratios."""
    arguments = _arguments()
    if arguments.install:
        install(arguments.install)
        return 0
    if not python_of(arguments.peers).exists():
        print(f"loader_peers: skipped, no peers: python {sys.argv[0]} --install {arguments.peers}")
        return 0
    rounds, records = (3, 4096) if arguments.quick else (5, 8192)
    limits = Limits(arguments.total * 1e6, arguments.stream * 1e6, arguments.wait)
    sides = [*(f"stoker {layout}" for layout in _layouts()), *PEERS]
    if arguments.only:
        sides = [side for side in sides if side in arguments.only.split(",")]
    os.environ |= KEYS
    figures: dict[str, object] = {"origin": str(limits), "peers": versions(arguments.peers)}
    figures["dataset"] = (
        f"{records} x {RECORD_BYTES} B, batches of {BATCH}, {arguments.workers} workers, {rounds} rounds"
    )
    with tempfile.TemporaryDirectory() as name, s3_server(Path(name)) as server:
        python = python_of(arguments.peers)
        _fill(python, server.url, Path(name) / "layouts", records)
        with far_away(server, limits) as url:
            setting = Setting(url, Path(name), python, records, arguments.workers)
            runs: dict[str, list[Run]] = {side: [] for side in sides}
            interleaved({side: partial(_run, side, setting, runs[side]) for side in sides}, rounds)
    for side in sides:
        figures |= _figures(side, runs[side], records)
    figures |= _ratios(runs, records)
    figures["load average"] = os.getloadavg()[0]
    report("loader_peers", figures, arguments.json)
    return 0


def _arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument(
        "--install", type=Path, metavar="DIR", help="make the peers' environment there, and end"
    )
    made.add_argument(
        "--peers", type=Path, default=INSTALLED, metavar="DIR", help="where it is (%(default)s)"
    )
    made.add_argument("--total", type=float, default=50, help="MB/s from the origin in all (%(default)s)")
    made.add_argument("--stream", type=float, default=10, help="MB/s on each stream (%(default)s)")
    made.add_argument("--wait", type=float, default=0.02, help="seconds to the first byte (%(default)s)")
    made.add_argument("--workers", type=int, default=2, help="of each DataLoader (%(default)s)")
    made.add_argument("--only", help="these sides: stoker objects,litdata")
    return made.parse_args()


def _layouts() -> Iterator[str]:
    """Those that Stoker reads."""
    yield "objects"
    if "format" in inspect.signature(Dataset.__init__).parameters:
        yield "tar"


def _fill(python: Path, url: str, folder: Path, records: int) -> None:
    asked = {"url": url, "bucket": BUCKET, "folder": str(folder), "records": records}
    asked |= {"record_bytes": RECORD_BYTES, "records_per_shard": RECORDS_PER_SHARD}
    command = [str(python), str(SCRIPTS / "fill_bucket.py"), json.dumps(asked)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _run(side: str, setting: Setting, runs: list[Run]) -> float:
    """One run of one side in new processes, with a cache that is new; returns the seconds of its cold epoch."""
    folder = setting.folder / "cache"
    folder.mkdir()
    try:
        with _command(side, setting, folder) as (command, environment):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(folder)
    cold, *warm = json.loads(done.stdout.strip().splitlines()[-1])
    for epoch in (cold, *warm):
        if not epoch["distinct"] == epoch["records"] == setting.records:
            raise RuntimeError(f"{side}: {epoch}")
    runs.append(Run(cold, warm))
    print(f"{side}: {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
    return float(cold["took_s"])


@contextlib.contextmanager
def _command(side: str, setting: Setting, folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    asked: dict[str, Any] = {"url": setting.url, "bucket": BUCKET, "folder": str(folder)}
    asked |= {
        "records": setting.records,
        "record_bytes": RECORD_BYTES,
        "records_per_shard": RECORDS_PER_SHARD,
    }
    asked |= {"batch": BATCH, "workers": setting.workers, "epochs": 1 + WARM_EPOCHS, "servers": []}
    library, _, layout = side.partition(" ")
    if library != "stoker":
        script = str(SCRIPTS / "peer_reader.py")
        yield [str(setting.peers_python), script, side, json.dumps(asked)], dict(os.environ)
        return
    buckets = {BUCKET: f"s3://{BUCKET}?endpoint={setting.url}"}
    with EmbeddedCache(folder, 20 * 10**9, buckets, TOKEN) as cache:
        assert cache.endpoint is not None
        known = {"STOKER_CACHE_ENDPOINT": cache.endpoint.unix_url, "STOKER_CACHE_TOKEN": TOKEN}
        asked["servers"] = [cache.endpoint.pid]
        command = [sys.executable, str(SCRIPTS / "stoker_reader.py"), layout, json.dumps(asked)]
        yield command, os.environ | known


def _figures(side: str, runs: list[Run], records: int) -> dict[str, object]:
    size_bytes = records * RECORD_BYTES
    cold = [run.cold for run in runs]
    warm = [epoch for run in runs for epoch in run.warm]
    cpu_ms = [1e3 * _median(some, "cpu_s") / records for some in (cold, warm)]
    return {
        f"{side}: cold, records/s": round(records / _median(cold, "took_s")),
        f"{side}: warm, records/s": round(records / _median(warm, "took_s")),
        f"{side}: first batch cold, s": _median(cold, "first_s"),
        f"{side}: origin bytes of the dataset's, cold": _median(cold, "body_bytes") / size_bytes,
        f"{side}: origin bytes of the dataset's, warm": _median(warm, "body_bytes") / size_bytes,
        f"{side}: origin requests, cold": _median(cold, "requests"),
        f"{side}: CPU ms a record, cold and warm": f"{cpu_ms[0]:.2f}, {cpu_ms[1]:.2f}",
        f"{side}: processors busy, cold and warm": f"{_median(cold, 'busy'):.2f}, {_median(warm, 'busy'):.2f}",
    }


def _ratios(runs: Mapping[str, list[Run]], records: int) -> dict[str, object]:
    """Ours over the best peer's, by medians."""
    cold = {side: records / _median([run.cold for run in some], "took_s") for side, some in runs.items()}
    warm = {
        side: records / _median([epoch for run in some for epoch in run.warm], "took_s")
        for side, some in runs.items()
    }
    figures: dict[str, object] = {}
    for what, rates, goal in (("cold", cold, COLD_GOAL), ("warm", warm, WARM_GOAL)):
        peers = {side: rate for side, rate in rates.items() if side in PEERS}
        if not peers:
            continue
        best = max(peers, key=lambda side: peers[side])
        for side, rate in rates.items():
            if side not in PEERS:
                figures[f"{what} ratio, {side} over {best} (goal {goal})"] = rate / peers[best]
    return figures


def _median(epochs: Iterable[Mapping[str, float]], name: str) -> float:
    return statistics.median(epoch[name] for epoch in epochs)


if __name__ == "__main__":
    sys.exit(main())
