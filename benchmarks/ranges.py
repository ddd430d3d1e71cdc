"""How fast are ranges of 100 KiB of tar-like objects through the cache against `os.pread` of the same local files?"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from _common import interleaved, median_ratio, parser, report

from stoker.cache.client.client import ByteRange, CacheClient
from stoker.cache.embedded import EmbeddedCache

OBJECTS, OBJECT_BYTES = 4, 64 * 1024 * 1024
SIZES = {"100KiB": 100 * 1024, "2KiB": 2 * 1024}
BATCH = 64
TOKEN = "benchmark-token"
Reader = Callable[[Sequence[ByteRange]], Sequence[bytes | memoryview]]


def main() -> int:
    """Print ranges per second through the cache over those of the files, and what a record costs this process."""
    arguments = parser(__doc__ or "").parse_args()
    rounds, batches = (5, 8) if arguments.quick else (15, 32)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "origin")
        folder.mkdir()
        keys = [f"{number:03}.tar" for number in range(OBJECTS)]
        for key in keys:
            (folder / key).write_bytes(os.urandom(OBJECT_BYTES))
        with EmbeddedCache(f"{name}/cache", 10**9, {"b": str(folder)}, TOKEN) as cache:
            assert cache.endpoint is not None
            with (
                CacheClient(cache.endpoint.unix_url, TOKEN) as near,
                CacheClient(cache.endpoint.url, TOKEN) as far,
            ):
                hold(near, keys)
                for label, size_bytes in SIZES.items():
                    figures |= one_size(label, folder, keys, size_bytes, near, far, rounds, batches)
    figures["load average"] = os.getloadavg()[0]
    report("ranges", figures, arguments.json)
    return 0


def hold(client: CacheClient, keys: Sequence[str]) -> None:
    """Have all of them held."""
    for key in keys:
        for start in range(0, OBJECT_BYTES, OBJECT_BYTES // 4):
            client.read_ranges("b", [ByteRange(key, start, start + OBJECT_BYTES // 4)])
    while client.status().held_bytes < OBJECTS * OBJECT_BYTES:
        time.sleep(0.05)


def one_size(
    label: str,
    folder: Path,
    keys: Sequence[str],
    size_bytes: int,
    near: CacheClient,
    far: CacheClient,
    rounds: int,
    batches: int,
) -> dict[str, object]:
    files = {key: os.open(folder / key, os.O_RDONLY) for key in keys}
    rng = np.random.default_rng(1)

    def some() -> list[list[ByteRange]]:
        starts = rng.integers(0, OBJECT_BYTES - size_bytes, (batches, BATCH))
        objects = rng.integers(0, len(keys), (batches, BATCH))
        return [
            [ByteRange(keys[o], int(s), int(s) + size_bytes) for o, s in zip(*row, strict=True)]
            for row in zip(objects, starts, strict=True)
        ]

    def straight(ranges: Sequence[ByteRange]) -> list[bytes]:
        return [os.pread(files[part.key], part.stop - part.start, part.start) for part in ranges]

    readers: dict[str, Reader] = {
        "pread": straight,
        "near": lambda ranges: near.read_ranges("b", ranges),
        "views": lambda ranges: near.read_ranges("b", ranges, views=True),
        "far": lambda ranges: far.read_ranges("b", ranges),
    }
    cpu: dict[str, list[float]] = {name: [] for name in readers}
    sides = {name: partial(timed, read, some, cpu[name]) for name, read in readers.items()}
    for run in sides.values():
        run()
    for spent in cpu.values():
        spent.clear()
    found = interleaved(sides, rounds)
    for file in files.values():
        os.close(file)
    records = batches * BATCH
    figures: dict[str, object] = {
        f"{label} {side} ratio": median_ratio(found["pread"], found[side])
        for side in ("near", "views", "far")
    }
    for side, spent in cpu.items():
        figures[f"{label} {side} CPU us a record"] = sorted(spent)[len(spent) // 2] / records * 1e6
    return figures


def timed(
    read: Reader,
    some: Callable[[], list[list[ByteRange]]],
    cpu: list[float],
) -> float:
    """Seconds for some batches of which each byte is looked at once, as a decoder would."""
    plan = some()
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    for ranges in plan:
        for item in read(ranges):
            np.frombuffer(item, np.uint8).max()
    taken = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return taken


if __name__ == "__main__":
    sys.exit(main())
