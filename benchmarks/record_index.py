"""What does the index of a dataset cost: memory and disk for a million records, and the time to build and to open it?

For each kind of dataset: what a process has resident, and to itself, once it has opened the dataset and looked up every
record; what its loader processes have, forked and spawned, over those of a dataset of a few records; what they are
handed; the file of the index. Building is timed with a progress bar, the objects in the cache already, over reading the
same bytes from it with as many threads; opening an index that is there, over listing the objects and reading its file.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow as pa
import pyarrow.parquet as pq
from _common import interleaved, median_ratio, parser, report

import stoker
from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache
from stoker.data.framing import mds, recordio, tar, tfrecord
from stoker.data.index_build import JOBS
from stoker.settings import CacheSettings

TOKEN = "token-of-this-benchmark"
READER = str(Path(__file__).parent / "scripts" / "index_reader.py")
RECORD_BYTES = 100
IN_FILE = 10_000
PIECE_BYTES = 8 * 2**20
ROWS_IN_GROUP = 1000
GOAL_BUILD, GOAL_OPEN, GOAL_BYTES = 2.0, 1.5, 100


class Filled(NamedTuple):
    """A dataset in a folder below the origin's."""

    kind: str
    records: int
    url: str


class Setting(NamedTuple):
    """The cache that all of it is read through."""

    endpoint: str
    client: CacheClient
    own: Path

    @property
    def cache(self) -> CacheSettings:
        return CacheSettings(self.endpoint, TOKEN, self.own, 10**9)


def main() -> int:
    """Print bytes for each record and the ratios, for each kind of dataset."""
    made = parser((__doc__ or "").partition("\n")[0])
    made.add_argument("--records", type=int, help="default: 1000000, with --quick 100000")
    made.add_argument("--kinds", nargs="*", default=list(FILES), choices=list(FILES))
    arguments = made.parse_args()
    records = arguments.records or (100_000 if arguments.quick else 1_000_000)
    rounds = 3 if arguments.quick else 5
    figures: dict[str, Any] = {"records of each kind": records}
    with tempfile.TemporaryDirectory() as name:
        origin = Path(name, "origin")
        with EmbeddedCache(Path(name, "cache"), 10**11, {"b": _made(origin)}, TOKEN) as cache:
            assert cache.endpoint is not None
            with CacheClient(cache.endpoint.unix_url, TOKEN) as client:
                setting = Setting(cache.endpoint.unix_url, client, Path(name, "own"))
                for kind in arguments.kinds:
                    print(f"… {kind}", file=sys.stderr, flush=True)
                    few = _fill(origin, kind, f"{kind}-few", 10 if kind == "objects" else IN_FILE)
                    many = _fill(origin, kind, f"{kind}-many", records)
                    figures |= _memory(setting, few, many) | _times(setting, many, rounds)
    figures["load average"] = os.getloadavg()[0]
    report("record_index", figures, arguments.json)
    return 0


# -- datasets ----------------------------------------------------------------------------------------------------


def _made(folder: Path) -> str:
    folder.mkdir()
    return str(folder)


def _lines() -> bytes:
    return b"".join(b"%0*d\n" % (RECORD_BYTES - 1, number) for number in range(IN_FILE))


def _jsonl() -> bytes:
    return b"".join(b'{"x": "%0*d"}\n' % (RECORD_BYTES - 10, number) for number in range(IN_FILE))


def _csv() -> bytes:
    return b"number,text\n" + b"".join(b"%d,%s\n" % (n, b"x" * (RECORD_BYTES - 8)) for n in range(IN_FILE))


def _tar() -> bytes:
    body = bytes(RECORD_BYTES) + bytes(-RECORD_BYTES % 512)
    members = (tar.head(f"{number:09}.bin", RECORD_BYTES) + body for number in range(IN_FILE))
    return b"".join(members) + bytes(1024)


def _mds() -> bytes:
    framed = mds.framed({"x": bytes(RECORD_BYTES)}, mds.Columns(["x"], ["bytes"], [None]))
    return mds.shard_head([len(framed)] * IN_FILE) + framed * IN_FILE


def _table() -> pa.Table:
    return pa.table({"x": [b"%0*d" % (RECORD_BYTES, number) for number in range(IN_FILE)]})


def _parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(_table(), out, row_group_size=ROWS_IN_GROUP)
    return out.getvalue()


def _arrow() -> bytes:
    out = io.BytesIO()
    with pa.ipc.new_file(out, _table().schema) as writer:
        writer.write_table(_table(), max_chunksize=ROWS_IN_GROUP)
    return out.getvalue()


FILES: Mapping[str, Callable[[], bytes]] = {
    "objects": lambda: bytes(RECORD_BYTES),
    "tar": _tar,
    "tfrecord": lambda: tfrecord.framed(bytes(RECORD_BYTES)) * IN_FILE,
    "recordio": lambda: recordio.framed(bytes(RECORD_BYTES)) * IN_FILE,
    "lines": _lines,
    "jsonl": _jsonl,
    "csv": _csv,
    "mds": _mds,
    "parquet": _parquet,
    "arrow": _arrow,
}
"""What one file of a kind has in it."""


def _fill(origin: Path, kind: str, name: str, records: int) -> Filled:
    folder = origin / name
    folder.mkdir()
    data, suffix = FILES[kind](), {"objects": "bin", "lines": "txt", "recordio": "rec"}.get(kind, kind)
    in_file = 1 if kind == "objects" else IN_FILE
    count = records // in_file
    for number in range(count):
        below = folder / f"shard-{number // 1000:05}"
        if number % 1000 == 0:
            below.mkdir()
        (below / f"sample-{number:012}.{suffix}").write_bytes(data)
    if kind == "mds":
        for below in folder.iterdir():
            below.joinpath("index.json").write_text(_mds_index(sorted(below.iterdir())))
    return Filled(kind, count * in_file, f"stoker://b/{name}/")


def _mds_index(files: list[Path]) -> str:
    shards = [
        {
            "format": "mds", "compression": None, "hashes": [], "samples": IN_FILE, "version": 2, "zip_data": None,
            "column_encodings": ["bytes"], "column_names": ["x"], "column_sizes": [None], "size_limit": None,
            "raw_data": {"basename": file.name, "bytes": file.stat().st_size, "hashes": {}},
        }
        for file in files
    ]  # fmt: skip
    return json.dumps({"version": 2, "shards": shards})


# -- figures -----------------------------------------------------------------------------------------------------


def _memory(setting: Setting, few: Filled, many: Filled) -> dict[str, Any]:
    small, large = _looked_up(setting, few), _looked_up(setting, many)
    records = large["records"] - small["records"]
    assert large["records"] == many.records

    def more(stage: str, what: str) -> float:
        each: float = (large[stage][what] - small[stage][what]) / records
        return round(each, 1)

    return {
        f"{many.kind}: bytes a record resident (goal {GOAL_BYTES}), of its own": (
            f"{more('looked up', 'resident')}, {more('looked up', 'own')}"
        ),
        f"{many.kind}: the same in a forked loader process": f"{more('fork', 'resident')}, {more('fork', 'own')}",
        f"{many.kind}: the same in a spawned one": f"{more('spawn', 'resident')}, {more('spawn', 'own')}",
        f"{many.kind}: bytes a record handed to it": round(
            (large["pickled"] - small["pickled"]) / records, 3
        ),
        f"{many.kind}: bytes a record on disk": round(large["file"] / large["records"], 1),
    }


def _looked_up(setting: Setting, filled: Filled) -> dict[str, Any]:
    """In a process that finds the index; another one has built it."""
    asked = {
        "endpoint": setting.endpoint, "token": TOKEN, "folder": str(setting.own), "url": filled.url,
        "format": filled.kind,
    }  # fmt: skip
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, READER, json.dumps(asked)], stdout=subprocess.PIPE, text=True, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _times(setting: Setting, filled: Filled, rounds: int) -> dict[str, Any]:
    data = _opened(setting, filled)
    path = getattr(data.records.index, "path", None) if hasattr(data.records, "index") else None
    sides: dict[str, Callable[[], float]] = {
        "build": partial(_build, setting, filled),
        "read": partial(_read, setting, filled),
        "open": partial(_open, setting, filled),
        "list": partial(_list, setting, filled, path),
    }
    found = interleaved(sides, rounds)
    bound = "list" if filled.kind == "objects" else "read"
    return {
        f"{filled.kind}: build, s": statistics.median(found["build"]),
        f"{filled.kind}: build ratio to {'listing' if bound == 'list' else 'reading the bytes'} (goal {GOAL_BUILD})": (
            median_ratio(found["build"], found[bound])
        ),
        f"{filled.kind}: open, s": statistics.median(found["open"]),
        f"{filled.kind}: open ratio to listing and reading the file (goal {GOAL_OPEN})": (
            median_ratio(found["open"], found["list"])
        ),
    }


def _opened(setting: Setting, filled: Filled) -> stoker.Dataset:
    """With a progress bar that nobody looks at."""
    said: list[Any] = []
    data = stoker.Dataset(filled.url, format=filled.kind, cache=setting.cache, on_progress=said.append)
    assert len(data) == filled.records
    return data


def _build(setting: Setting, filled: Filled) -> float:
    for path in (setting.own / "indexes").glob("*.index"):
        path.unlink()
    return _open(setting, filled)


def _open(setting: Setting, filled: Filled) -> float:
    began = time.perf_counter()
    _opened(setting, filled)
    return time.perf_counter() - began


def _read(setting: Setting, filled: Filled) -> float:
    """All bytes of all objects, in pieces as large as those that are scanned; nothing for objects that are not."""
    if filled.kind == "objects":
        return 0.0
    began = time.perf_counter()
    prefix = filled.url.removeprefix("stoker://b/")
    pieces = [
        (info.key, start, min(start + PIECE_BYTES, info.size_bytes))
        for info in setting.client.list_objects("b", prefix)
        for start in range(0, info.size_bytes, PIECE_BYTES)
    ]

    def read(piece: tuple[str, int, int]) -> int:
        return len(setting.client.read("b", *piece))

    with ThreadPoolExecutor(JOBS) as pool:
        assert sum(pool.map(read, pieces)) > 0
    return time.perf_counter() - began


def _list(setting: Setting, filled: Filled, path: Path | None) -> float:
    """What opening cannot do without: which objects there are now, and the bytes of the index."""
    began = time.perf_counter()
    setting.client.list_objects("b", filled.url.removeprefix("stoker://b/"))
    if path is not None and path.exists():
        path.read_bytes()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
