"""What does a large index cost: memory for each object, and the time from the start of a server to its first answer?

A real `stoker cache serve` on folders with 10 million objects (1 million with --quick), in three kinds: only known;
packed, 100 KiB each, in segments of 64 MiB; and blocks of 4 MiB of large objects of 1,000 blocks. The index is written
by the native part itself. The files are sparse, of the right number and sizes, so that the start looks at as many as it
would; the object that is asked for first has its bytes, which are verified before they are served. A file is what a
start has to look at, so a folder of large objects of one block each is measured as well, with a tenth of the objects.

Memory is that of the process over that of a server with an empty folder.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from _common import interleaved, parser, report
from _serving import Asker, rss_bytes, serve
from _web import cpu_s

from stoker._native import Files, Index, crc32c
from stoker.cache.layout import DEFAULT_BLOCK_SIZE_BYTES as BLOCK_BYTES
from stoker.cache.origin.open import open_origin
from stoker.cache.segments import SEGMENT_BYTES_MAX, pages_bytes

CAPACITY_BYTES = 10**15
"""More than all that these folders say they hold."""
PACKED_BYTES = 100 * 1024
LARGE_BLOCKS = 1000
LOOK_UPS = 2000
GOAL_START_S = 3.0
GOAL_MB_PER_MILLION = 100.0


class Start(NamedTuple):
    """One start of a server. `first_s`: from the start of the process to the end of the first answer; `cpu_s`: what
    processors did for it until then."""

    first_s: float
    cpu_s: float
    rss_bytes: float
    look_up_s: float


class Filled(NamedTuple):
    """A folder to start on. `pieces`: objects or blocks, whichever are more; `first`: what to ask for."""

    folder: Path
    origin: Path
    pieces: int
    objects: int
    method: str
    first: str
    headers: tuple[str, ...]


def main() -> int:
    """Print bytes for each object, seconds to the first answer, and what they would be for a billion."""
    arguments = parser(__doc__ or "").parse_args()
    rounds, count = (3, 10**6) if arguments.quick else (5, 10**7)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        origin = Path(name, "origin")
        origin.mkdir()
        kinds: dict[str, tuple[int, Callable[[_Filling, int], None]]] = {
            "empty": (1, _known),
            "known": (count, _known),
            "packed": (count, _packed),
            "blocks": (count, _large),
            "files": (count // 10, _one_block),
        }
        folders = {}
        for kind, (pieces, fill) in kinds.items():
            began = time.perf_counter()
            folders[kind] = _Filling(Path(name, kind), origin).fill(pieces, fill)
            print(f"… {kind}: {pieces} in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        starts: dict[str, list[Start]] = {kind: [] for kind in kinds}

        def started(kind: str) -> float:
            starts[kind].append(_start(folders[kind]))
            return starts[kind][-1].first_s

        interleaved({kind: partial(started, kind) for kind in kinds}, rounds)
        empty = _median(starts["empty"])
        figures["an empty folder: s to the first answer"] = empty.first_s
        for kind in ("known", "packed", "blocks", "files"):
            figures |= _figures(kind, folders[kind], _median(starts[kind]), empty)
    report("index_scale", figures, arguments.json)
    return 0


class _Filling:
    """The folder of a cache server, as it is after it was stopped."""

    def __init__(self, folder: Path, origin: Path) -> None:
        self.folder = folder
        self.origin = origin
        folder.mkdir()
        self.now_s = int(time.time())
        self.index = Index(str(folder / "index"), BLOCK_BYTES)
        self.bucket = self.index.bucket("b", open_origin(str(origin)).url)
        self._files = Files(str(folder / "files"), 16)

    def fill(self, pieces: int, fill: Callable[[_Filling, int], None]) -> Filled:
        fill(self, pieces)
        self.index.sync()
        is_held = bool(self.index.containers())
        method, headers = ("GET", ("Range: bytes=0-1023",)) if is_held else ("HEAD", ())
        objects = len(self.index)
        del self.index
        return Filled(self.folder, self.origin, pieces, objects, method, f"/b/{key_of(0)}", headers)

    def learn(self, number: int, size_bytes: int) -> None:
        self.index.learn(self.bucket, key_of(number), version_of(number), size_bytes, False, self.now_s)

    def hold(self, number: int, block: int | None, container: int, offset: int, crc: int) -> None:
        self.index.hold(
            self.bucket, key_of(number), version_of(number), block, container, offset, crc, self.now_s
        )

    def file(self, container: int, size_bytes: int, data: bytes = b"") -> None:
        """A container with these bytes at its beginning, and nothing behind."""
        path = self._files.path(container)
        if container % 4096 == 0 or container == 1:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(data)
            file.truncate(size_bytes)


def key_of(number: int) -> str:
    """41 bytes, as names of samples have them."""
    return f"train/shard-{number // 1000:05}/sample-{number:012}.jpg"


def version_of(number: int) -> str:
    """32 bytes, as the ETags of object stores have them."""
    return f"{number:032x}"


def _known(filling: _Filling, pieces: int) -> None:
    for number in range(pieces):
        filling.learn(number, PACKED_BYTES)


def _packed(filling: _Filling, pieces: int) -> None:
    data = os.urandom(PACKED_BYTES)
    in_segment = SEGMENT_BYTES_MAX // pages_bytes(PACKED_BYTES)
    for number in range(pieces):
        container, place = number // in_segment + 1, number % in_segment
        if place == 0:
            filling.file(container, SEGMENT_BYTES_MAX, b"" if number else data)
        filling.learn(number, PACKED_BYTES)
        filling.hold(
            number, None, container, place * pages_bytes(PACKED_BYTES), 0 if number else crc32c(data)
        )


def _large(filling: _Filling, pieces: int, blocks: int = LARGE_BLOCKS) -> None:
    data = os.urandom(BLOCK_BYTES)
    for number in range(pieces // blocks):
        filling.file(number + 1, blocks * BLOCK_BYTES, b"" if number else data)
        filling.learn(number, blocks * BLOCK_BYTES)
        for block in range(blocks):
            filling.hold(number, block, number + 1, 0, 0 if number or block else crc32c(data))


def _one_block(filling: _Filling, pieces: int) -> None:
    _large(filling, pieces, 1)


def _start(filled: Filled) -> Start:
    began = time.perf_counter()
    with serve(filled.folder, filled.origin, capacity_bytes=CAPACITY_BYTES) as server:
        asker = Asker(server.address)
        asker.ask(filled.first, filled.method, *filled.headers)
        first_s = time.perf_counter() - began
        took_cpu_s, memory_bytes = cpu_s(server.pid), rss_bytes(server.pid)
        chance = random.Random(1)
        times = []
        for _ in range(LOOK_UPS):
            target = f"/b/{key_of(chance.randrange(filled.objects))}"
            asked_at = time.perf_counter()
            asker.ask(target, "HEAD")
            times.append(time.perf_counter() - asked_at)
        asker.close()
    return Start(first_s, took_cpu_s, memory_bytes, statistics.median(times))


def _median(starts: list[Start]) -> Start:
    return Start(*(statistics.median(column) for column in zip(*starts, strict=True)))


def _figures(kind: str, filled: Filled, start: Start, empty: Start) -> dict[str, object]:
    each_bytes = (start.rss_bytes - empty.rss_bytes) / filled.pieces
    what = f"{filled.pieces:,} {kind}"
    file_bytes = os.stat(filled.folder / "index").st_size
    return {
        f"{what}: s to the first answer (goal {GOAL_START_S:g})": start.first_s,
        f"{what}: CPU s until then, less an empty one's": start.cpu_s - empty.cpu_s,
        f"{what}: MB a million (goal {GOAL_MB_PER_MILLION:g})": each_bytes,
        f"{what}: GB a billion": each_bytes,
        f"{what}: MB of the index file a million": file_bytes / filled.pieces,
        f"{what}: HEAD of one by chance, ratio to an empty one": start.look_up_s / empty.look_up_s,
    }


if __name__ == "__main__":
    sys.exit(main())
