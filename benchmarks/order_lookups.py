"""What does it cost a cache to know when things are read next, for each object that is stored and each segment that
leaves?

In processor time of one process. *Ranks* are streams of one job, which read everything once between them in each of two
epochs; *jobs* are streams of one each, which all read the same, each in an order of its own. The yardstick is a look
into a plain dictionary of as many objects (two million at most), which holds one position of each.

The last lines are of 10,000 segments (1,000 with --quick) of 100 objects, as the index knows them: what the choice of
the one that leaves takes of the event loop, and of all threads; the first one draws pieces of every segment.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from _common import parser, report

from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cache.coming import U64, ComingReads, Stream
from stoker.cache.store.foreseen import Newcomer
from stoker.cache.store.store import Store

GOAL_US = {1: 20.0, 64: 100.0}
ROUNDS = 2
SEGMENT_OBJECTS = 100
BATCH = 16_384
"""Pieces that one choice looks at."""
DICT_MAX = 2_000_000
CHUNK = 65_536
"""Reads of one announcement."""


def announced(ids: U64, streams: int, *, are_ranks: bool) -> ComingReads:
    """Streams that read all of these in each round, together or each of them."""
    chance = np.random.default_rng(1)
    coming = ComingReads()
    made = [
        Stream("job" if are_ranks else f"job-{number}", 0, read_s=1e-3, now=0.0) for number in range(streams)
    ]
    for round_number in range(ROUNDS):
        order = chance.permutation(ids)
        for number, stream in enumerate(made):
            reads = order[number::streams] if are_ranks else chance.permutation(ids)
            for at in range(0, len(reads), CHUNK):
                part = np.ascontiguousarray(reads[at : at + CHUNK])
                positions = np.arange(stream.stop, stream.stop + len(part))
                stream.announce(stream.stop, len(part), part, positions, round_number)
    for number, stream in enumerate(made):
        coming.put(str(number), stream)
    return coming


def each_us(look: Callable[[int], object], ids: Iterable[int]) -> float:
    """Processor time of one look: the median of ten parts."""
    some = list(ids)
    parts = [some[part::10] for part in range(10)]
    figures = []
    for part in parts:
        began = time.process_time()
        for number in part:
            look(number)
        figures.append((time.process_time() - began) / len(part) * 1e6)
    return statistics.median(figures)


def look_ups(streams: int, reads: int, *, are_ranks: bool) -> dict[str, float]:
    """One by one, and many at once."""
    chance = np.random.default_rng(2)
    count = streams * reads // ROUNDS if are_ranks else reads // ROUNDS
    ids = chance.integers(0, 2**64 - 1, count, dtype=np.uint64)
    coming = announced(ids, streams, are_ranks=are_ranks)
    plain = dict.fromkeys(ids[:DICT_MAX].tolist(), 0)
    asked = chance.choice(ids[:DICT_MAX], 3000).tolist()
    one_us = each_us(lambda number: coming.next_of(number, -1, 0.0), asked)
    plain_us = each_us(plain.get, asked)
    began = time.process_time()
    coming.due(chance.choice(ids, BATCH), np.full(BATCH, -1))
    return {
        "one object us": one_us,
        "one object / look into a dict (ratio)": one_us / plain_us,
        f"{BATCH} pieces ms": (time.process_time() - began) * 1e3,
    }


async def choices(folder: Path, segments: int, streams: int, reads: int, count: int) -> dict[str, float]:
    """Which of the segments of a store leaves."""
    store = Store(folder, 1 << 30, 1 << 22, SystemClock(), Rng(1))
    try:
        bucket = store.open_bucket("b", "memory://b")
        keys = [str(number) for number in range(segments * SEGMENT_OBJECTS)]
        for number, key in enumerate(keys):
            container = 1 + number // SEGMENT_OBJECTS
            store.index.learn(bucket.number, key, "v", 1000, False, 1)
            store.index.hold(bucket.number, key, "v", None, container, number % SEGMENT_OBJECTS, 0, 1)
        for number in range(segments):
            store.holdings.segments.adopt(1 + number, bucket.lots[0].number, 1 << 20, 0)
        held = np.frombuffer(store.index.ids(bucket.number, keys), dtype=np.uint64)
        others = max(0, streams * reads // ROUNDS - len(held))
        ids = np.concatenate([held, np.random.default_rng(3).integers(0, 2**64 - 1, others, dtype=np.uint64)])
        store.holdings.set_coming(bucket, announced(ids, streams, are_ranks=True))
        lots = frozenset([bucket.lots[0].number])
        loop_ms, all_ms = [], []
        for _ in range(count):
            loop, everything = time.thread_time(), time.process_time()
            await store.clearing.foreseen.choose(lots, Newcomer(0.0, True))
            loop_ms.append((time.thread_time() - loop) * 1e3)
            all_ms.append((time.process_time() - everything) * 1e3)
    finally:
        store.holdings.close()
    return {
        "first choice, all threads, ms": all_ms[0],
        "choice, event loop, ms": statistics.median(loop_ms[1:]),
        "choice, all threads, ms": statistics.median(all_ms[1:]),
    }


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    reads = 100_000 if options.quick else 1_000_000
    figures: dict[str, float | str] = {}
    for streams in (1, 8, 64):
        for kind in ("ranks", "jobs")[: 1 if streams == 1 else 2]:
            for name, value in look_ups(streams, reads, are_ranks=kind == "ranks").items():
                figures[f"{streams} {kind}: {name}"] = value
        if (goal_us := GOAL_US.get(streams)) is not None:
            is_met = figures[f"{streams} ranks: one object us"] <= goal_us  # type: ignore[operator]
            figures[f"{streams} ranks: goal of {goal_us:.0f} us"] = "met" if is_met else "missed"
    segments = 1_000 if options.quick else 10_000
    with tempfile.TemporaryDirectory() as folder:
        for name, value in asyncio.run(choices(Path(folder), segments, 64, reads, 10)).items():
            figures[f"64 ranks, {segments} segments: {name}"] = value
    report("order_lookups", figures, options.json)


if __name__ == "__main__":
    main()
