"""What a store keeps where it knows what is read next, against the offline optimum (Belady)."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.base.rng import Rng
from stoker.cache.coming import ComingReads, Stream
from stoker.cache.farthest import Sample, latest
from stoker.cache.store.foreseen import Choice, Foreseen, segments_drawn
from stoker.cache.store.lots import KeptBucket, PrefixRule
from stoker.cache.store.store import Store
from tests.clocks import HandClock

BLOCK = 1 << 22
RECORD = 4096
WINDOW_PART = 100
FOREVER = 1 << 60


def belady(reads: Sequence[int], capacity: int, counted_from: int) -> float:
    """The part of the reads from there on that hits, where what is read latest leaves, or never comes in."""
    follows, last = [FOREVER] * len(reads), {}
    for position in range(len(reads) - 1, -1, -1):
        follows[position] = last.get(reads[position], FOREVER)
        last[reads[position]] = position
    held: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for position, record in enumerate(reads):
        if record in held:
            hits += position >= counted_from
        elif len(held) >= capacity:
            while held.get(latest[0][1]) != -latest[0][0]:
                heapq.heappop(latest)
            if -latest[0][0] <= follows[position]:
                continue
            del held[heapq.heappop(latest)[1]]
        held[record] = follows[position]
        heapq.heappush(latest, (-follows[position], record))
    return hits / (len(reads) - counted_from)


class Run:
    """Readers, each of its own order, of records that a store fetches ahead of them."""

    def __init__(self, folder: Path, capacity: int, policy: str, record_bytes: int = RECORD) -> None:
        self.clock = HandClock()
        self.record = bytes(record_bytes)
        self.store = Store(folder, capacity * record_bytes, BLOCK, self.clock, Rng(1))
        self.bucket = self.store.open_bucket("b", "memory://b", policy=policy)
        self.window = max(1, capacity // WINDOW_PART)
        self.coming = ComingReads()
        self.streams: list[tuple[Stream, Sequence[int]]] = []
        self.fetched = 0

    def announce(self, reads: Sequence[int], group: str = "", round_reads: int | None = None) -> None:
        stream = Stream(group or f"job-{len(self.streams)}", 0, read_s=1.0, now=self.clock.now())
        step = round_reads or len(reads)
        for start in range(0, len(reads), step):
            keys = [str(record) for record in reads[start : start + step]]
            ids = np.frombuffer(self.store.index.ids(self.bucket.number, keys), dtype=np.uint64)
            positions = np.arange(start, start + len(ids))
            stream.announce(start, len(ids), ids, positions, start // step if round_reads else None)
        self.coming.put(str(len(self.streams)), stream)
        self.streams.append((stream, reads))

    async def read(self, counted_from: int = 0) -> float:
        """All of it, in turn; the part of the reads from there on that was not fetched."""
        self.store.holdings.set_coming(self.bucket, self.coming)
        longest = max(len(reads) for _, reads in self.streams)
        ahead = [0] * len(self.streams)
        counted = total = 0
        for position in range(longest):
            for number, (stream, reads) in enumerate(self.streams):
                if position >= len(reads):
                    continue
                while ahead[number] < min(len(reads), position + self.window):
                    counted += await self._fetch(reads[ahead[number]]) and position >= counted_from
                    ahead[number] += 1
                counted += await self._fetch(reads[position]) and position >= counted_from
                total += position >= counted_from
                stream.advance(position + 1, self.clock.now())
            self.clock.at += 1.0
            assert self.store.room.used_bytes <= self.store.room.limit_bytes
        return 1 - counted / total

    def has(self, key: str) -> bool:
        return self.store.holds(self.bucket.number, key, "v", 0)

    async def put(self, key: str, bucket: KeptBucket | None = None, **why: bool) -> bool:
        """Whether it is stored."""
        known = self.store.learn((bucket or self.bucket).number, key, "v", len(self.record))
        return await self.store.put(known, 0, self.record, **why)

    async def _fetch(self, record: int) -> bool:
        """Whether it had to be."""
        if self.has(str(record)):
            return False
        await self.put(str(record), is_foreseen=True)
        return True


def epochs(records: int, count: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [record for _ in range(count) for record in chance.sample(range(records), records)]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("part", "policy"),
    [(0.1, "lru"), (0.3, "uniform"), (0.5, "lru"), (0.5, "uniform"), (0.8, "replica-aware")],
)
def test_shuffled_epochs_hit_as_often_as_the_optimum(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, part: float, policy: str
) -> None:
    records, capacity = 2000, int(2000 * part)
    reads = epochs(records, 3)
    run = Run(tmp_path, capacity, policy)
    run.announce(reads, round_reads=records)
    hits = loop.run_until_complete(run.read(counted_from=records))
    assert hits >= 0.98 * belady(reads, capacity, records)
    assert run.store.clearing.rewritten_bytes < 0.1 * len(reads) * RECORD


def test_of_what_a_node_reads_only_what_it_reads_again_is_kept(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    """One of four nodes: each epoch it reads another quarter of the records."""
    reads = [record for epoch in range(6) for record in epochs(4000, 1, seed=epoch)[:1000]]
    run = Run(tmp_path, 500, "lru")
    run.announce(reads, round_reads=1000)
    hits = loop.run_until_complete(run.read(counted_from=1000))
    assert hits >= 0.95 * belady(reads, 500, 1000)


def test_jobs_of_different_orders_share_what_is_kept(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    first, second = epochs(1500, 3, seed=1), epochs(1500, 3, seed=2)
    run = Run(tmp_path, 600, "lru")
    run.announce(first, "a", 1500)
    run.announce(second, "b", 1500)
    hits = loop.run_until_complete(run.read())
    together = [record for pair in zip(first, second, strict=True) for record in pair]
    assert hits >= 0.94 * belady(together, 600, 0)


def test_small_segments_leave_several_to_a_choice(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at all of them for each record that is stored took most of a small server's time."""
    chosen: list[int] = []
    choose = Foreseen._choose

    def counted(self: Foreseen, *arguments: Any) -> list[Choice]:
        found = choose(self, *arguments)
        chosen.append(len(found))
        return found

    monkeypatch.setattr(Foreseen, "_choose", counted)
    first, second = epochs(1000, 2, seed=1), epochs(1000, 2, seed=2)
    run = Run(tmp_path, 520, "lru")
    run.announce(first, "a", 1000)
    run.announce(second, "b", 1000)
    hits = loop.run_until_complete(run.read())
    together = [record for pair in zip(first, second, strict=True) for record in pair]
    assert hits >= 0.93 * belady(together, 520, 0)
    assert max(chosen) > 1
    left_bytes = run.store.clearing.evicted_bytes + run.store.clearing.rewritten_bytes
    segment_bytes = 2 * RECORD
    assert len(chosen) < 0.6 * left_bytes / segment_bytes


@pytest.mark.parametrize(("streams", "drawn"), [(0, 512), (1, 512), (64, 128), (4096, 128)])
def test_the_more_streams_the_fewer_segments_are_looked_at(streams: int, drawn: int) -> None:
    assert segments_drawn(streams) == drawn


def test_only_what_is_about_as_bad_as_the_first_leaves_with_it() -> None:
    samples = [
        Sample(1, np.array([1.0, 2.0, 3.0, 90.0])),
        Sample(2, np.array([91.0, 93.0, 95.0, 97.0])),
        Sample(3, np.array([1.0, 85.0, 86.0, 90.0])),
        Sample(4, np.array([92.0, 94.0, 96.0, 98.0])),
    ]
    leaving = latest(samples, 5.0, most=4)
    assert [one.number for one in leaving] == [2, 4]
    assert [one.number for one in latest(samples, 5.0, most=1)] == [2]
    assert latest(samples, 99.0, most=4) == []
    assert len(latest(samples, 99.0, is_forced=True, most=4)) == 1


def test_what_is_read_often_is_kept(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    chance = np.random.default_rng(1)
    reads = (chance.zipf(1.2, 8000) % 3000).tolist()
    run = Run(tmp_path, 400, "lru")
    run.announce(reads)
    hits = loop.run_until_complete(run.read())
    assert hits >= 0.98 * belady(reads, 400, 0)


def test_large_objects_are_kept_block_by_block(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    reads = epochs(80, 4)
    run = Run(tmp_path, 40, "lru", record_bytes=1_200_000)
    run.announce(reads, round_reads=80)
    hits = loop.run_until_complete(run.read(counted_from=80))
    assert hits >= 38 / 40 * belady(reads, 40, 80), "one block is on its way, and one is read"


def test_what_is_written_anew_is_of_the_kind_that_it_was_packed_with(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    async def story(run: Run) -> None:
        run.store.holdings.set_coming(run.bucket, run.coming)
        foreseen = run.store.clearing.foreseen
        number, index = run.bucket.number, run.store.index
        kinds = {}
        for record in range(300):
            # Found with when it is read, and not: the same.
            assert foreseen.newcomer(number, str(record), None, is_foreseen=False) is not None
            kinds[str(record)] = foreseen.kind_of(number, str(record))
            assert foreseen.kind_of(number, str(record)) == kinds[str(record)]
            await run.put(str(record))
        assert len(set(kinds.values())) > 2
        segments = [n for n, held in index.containers().items() if not held.is_large]
        pieces = [pair for segment in segments for pair in index.pieces(segment, with_keys=True)]
        assert len(pieces) == 300
        assert await foreseen.kinds_of([piece for piece, _ in pieces]) == [kinds[key] for _, key in pieces]
        together = [{kinds[key] for _, key in index.pieces(segment, with_keys=True)} for segment in segments]
        assert all(len(some) == 1 for some in together)

    run = Run(tmp_path, 400, "lru")
    run.announce([*range(200), *range(100), *range(250), *range(50)], round_reads=200)
    run.announce([*range(100), *range(150, 350), *range(100)], "other")
    loop.run_until_complete(story(run))


def test_what_is_pinned_stays_and_is_stored(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    """Packed among others before it was pinned, while others are read in an order that is known."""

    async def story(run: Run) -> tuple[int, int]:
        store = run.store
        for number in range(400):
            await run.put(f"p{number}" if number % 4 == 0 else f"n{number}")
        rules = [PrefixRule("p", 0, True)]
        run.bucket = store.open_bucket("b", "memory://b", rules=rules)
        await run.read()
        before = sum(run.has(f"p{number}") for number in range(0, 400, 4))
        return before, sum([await run.put(f"p-late-{number}") for number in range(20)])

    run = Run(tmp_path, 420, "lru")
    run.announce(list(range(1000, 1600)))
    assert loop.run_until_complete(story(run)) == (100, 20)


def test_a_load_takes_no_room_from_what_it_brought(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    async def story(run: Run) -> int:
        run.store.holdings.set_coming(run.bucket, run.coming)
        with run.store.clearing.loading("b", run.store.now_s()):
            return sum([await run.put(str(number), is_loading=True) for number in range(600)])

    run = Run(tmp_path, 200, "lru")
    run.announce([0])
    stored = loop.run_until_complete(story(run))
    assert 150 < stored <= 200
    assert run.store.clearing.evicted_bytes == 0


def test_announcing_reads_of_a_bucket_gives_none_of_it_to_others(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    async def story(run: Run) -> int:
        for number in range(150):
            await run.put(str(number))
        run.store.holdings.set_coming(run.bucket, run.coming)
        other = run.store.open_bucket("other", "memory://other")
        for number in range(400):
            await run.put(str(number), other)
        return sum(run.has(str(number)) for number in range(150))

    run = Run(tmp_path, 200, "uniform")
    run.announce([0, 1, 2])
    assert loop.run_until_complete(story(run)) == 150
