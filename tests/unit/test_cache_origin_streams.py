"""Streams of origins where something goes wrong: behind the rules, in threads, over a slow line."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from stoker.base.rng import Rng
from stoker.cache.limits import CLOSED, HEDGE_FROM_SAMPLES, OPEN, PROBING, OriginLimits
from stoker.cache.origin import local, throttle
from stoker.cache.origin.fsspec_origin import FsspecOrigin
from stoker.cache.origin.guarded import GuardedOrigin
from stoker.cache.origin.local import LocalOrigin
from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.origin.throttle import ThrottledOrigin
from stoker.errors import ObjectChanged, ObjectNotFound, OriginError
from stoker.testing.cache_fakes import FaultyOrigin
from stoker.testing.cache_origin import streamed
from tests.clocks import HandClock

CONTENT = bytes(range(100))
QUICK = OriginLimits(retry_first_s=0.001, attempts_max=4, breaker_failures=6)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 60))


class Cuts(FaultyOrigin):
    """Its streams break off after so many bytes, each as the next of `cuts` says; None: not at all."""

    def __init__(self, origin: MemoryOrigin) -> None:
        super().__init__(origin)
        self.cuts: list[int | None] = []
        self.asked: list[tuple[int, int]] = []
        self.open_streams = 0

    async def stream(self, key: str, start: int, stop: int, version: str) -> Any:
        self.asked.append((start, stop))
        self.open_streams += 1
        self.cut_after_bytes = self.cuts.pop(0) if self.cuts else None
        try:
            async with aclosing(super().stream(key, start, stop, version)) as parts:
                async for part in parts:
                    yield part
        finally:
            self.open_streams -= 1


class Guarded:
    """An origin whose streams come in parts of ten bytes, behind the rules."""

    def __init__(self, limits: OriginLimits = QUICK) -> None:
        self.memory = MemoryOrigin("m", part_bytes=10)
        self.memory.put("k", CONTENT)
        self.faulty = Cuts(self.memory)
        self.clock = HandClock()
        self.origin = GuardedOrigin(self.faulty, limits, self.clock, Rng(1))

    async def parts(self, into: list[bytes], start: int = 0, stop: int = 100) -> None:
        info = await self.memory.stat("k")
        async with aclosing(self.origin.stream("k", start, stop, info.version)) as parts:
            async for part in parts:
                into.append(part)  # noqa: PERF401 - also those before a failure

    async def whole(self, start: int = 0, stop: int = 100) -> bytes:
        got: list[bytes] = []
        await self.parts(got, start, stop)
        return b"".join(got)

    async def failing(self, error: type[Exception], match: str | None = None) -> bytes:
        """What is yielded before the stream fails."""
        got: list[bytes] = []
        with pytest.raises(error, match=match):
            await self.parts(got)
        return b"".join(got)


def test_parts_pass_as_they_come() -> None:
    async def story() -> None:
        guarded = Guarded()
        got: list[bytes] = []
        await guarded.parts(got, 5, 38)
        assert [len(part) for part in got] == [10, 10, 10, 3]
        assert b"".join(got) == CONTENT[5:38]
        assert (guarded.origin.retries, guarded.faulty.open_streams) == (0, 0)

    run(story())


@pytest.mark.parametrize("first_cut", range(0, 100, 7))
def test_after_a_cut_it_goes_on_where_it_stood(first_cut: int) -> None:
    async def story() -> None:
        guarded = Guarded()
        guarded.faulty.cuts = [first_cut, 0, 11, 1]
        assert await guarded.whole() == CONTENT
        starts = [start for start, _ in guarded.faulty.asked]
        assert starts[:3] == [0, first_cut, first_cut]
        assert starts == sorted(starts)
        assert all(stop == 100 for _, stop in guarded.faulty.asked)
        assert guarded.origin.retries == len(starts) - 1
        assert guarded.origin.counters.bytes_read >= 100
        assert guarded.origin.state == CLOSED

    run(story())


def test_any_cuts_and_faults_leave_each_byte_out_once() -> None:
    async def story() -> None:
        rng = random.Random(3)
        for _ in range(200):
            guarded = Guarded(OriginLimits(retry_first_s=0.0, attempts_max=4, breaker_failures=100))
            guarded.faulty.cuts = [rng.choice([None, 1, 5, 10, 33, 99]) for _ in range(8)]
            guarded.faulty.faults.extend(rng.choice([None, OriginError("reset")]) for _ in range(4))
            start = rng.randrange(99)
            stop = rng.randrange(start + 1, 100)
            got: list[bytes] = []
            try:
                await guarded.parts(got, start, stop)
            except OriginError:
                assert CONTENT[start:stop].startswith(b"".join(got))
            else:
                assert b"".join(got) == CONTENT[start:stop]
            assert guarded.faulty.open_streams == 0

    run(story())


def test_failures_in_a_row_without_a_byte_are_bounded() -> None:
    async def story() -> None:
        guarded = Guarded()
        guarded.faulty.faults.extend([OriginError("down")] * 4)
        assert await guarded.failing(OriginError, "down") == b""
        assert len(guarded.faulty.asked) == 4

        guarded = Guarded()
        guarded.faulty.cuts = [0, 0, 25, 0, 0, 30]
        assert await guarded.whole() == CONTENT, "each row is shorter than the most there may be"
        assert guarded.origin.retries == 6

        guarded = Guarded()
        guarded.faulty.cuts = [25, 0, 0, 0]
        assert await guarded.failing(OriginError, "cut") == CONTENT[:25]
        assert guarded.faulty.asked == [(0, 100), (25, 100), (25, 100), (25, 100)]
        assert guarded.origin.retries == 3

    run(story())


def test_what_will_not_change_ends_it_and_is_an_answer() -> None:
    async def story() -> None:
        for error in (ObjectNotFound, ObjectChanged):
            guarded = Guarded()
            guarded.faulty.faults.extend([OriginError("reset"), error("final")])
            assert await guarded.failing(error) == b""
            assert (guarded.origin.retries, guarded.origin.state) == (1, CLOSED)
        guarded = Guarded()
        guarded.faulty.cuts = [25]
        put = iter([None, lambda: guarded.memory.put("k", b"new" * 40)])
        guarded.faulty.before_read = lambda _: (next(put) or (lambda: None))()
        assert await guarded.failing(ObjectChanged) == CONTENT[:25], "the rest would be of another version"

    run(story())


def test_a_failure_after_the_last_byte_leaves_nothing_to_ask_for() -> None:
    async def story() -> None:
        guarded = Guarded()
        guarded.faulty.cuts = [100]
        assert await guarded.failing(OriginError, "cut") == CONTENT
        assert len(guarded.faulty.asked) == 1

    run(story())


def test_an_origin_that_is_down_is_left_alone_by_streams_too() -> None:
    async def story() -> None:
        guarded = Guarded()
        guarded.faulty.faults.extend([OriginError("down")] * 6)
        await guarded.failing(OriginError, "down")
        await guarded.failing(OriginError, "down")
        assert guarded.origin.state == OPEN
        asked = len(guarded.faulty.asked)
        await guarded.failing(OriginError, "left alone: it failed 6 times in a row")
        assert len(guarded.faulty.asked) == asked
        guarded.clock.at += 1.0
        assert await guarded.whole() == CONTENT
        assert guarded.origin.state == CLOSED

    run(story())


def test_the_first_part_is_the_answer_that_others_wait_for() -> None:
    async def story() -> None:
        guarded = Guarded()
        guarded.faulty.faults.extend([OriginError("down")] * 6)
        for _ in range(2):
            await guarded.failing(OriginError)
        guarded.clock.at += 1.0
        info = await guarded.memory.stat("k")
        async with aclosing(guarded.origin.stream("k", 0, 100, info.version)) as slowly:
            assert await anext(slowly) == CONTENT[:10]
            assert guarded.origin.state == CLOSED
            assert await guarded.whole() == CONTENT
        assert guarded.faulty.open_streams == 0

    run(story())


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_who_leaves_a_stream_releases_everything(parts: int) -> None:
    async def story() -> None:
        guarded = Guarded()
        guarded.faulty.faults.extend([OriginError("down")] * 6)
        for _ in range(2):
            await guarded.failing(OriginError)
        guarded.clock.at += 1.0
        info = await guarded.memory.stat("k")
        stream = guarded.origin.stream("k", 0, 100, info.version)
        if parts == 0:
            guarded.faulty.delay_s = 10.0
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.01)
            assert guarded.origin.state == PROBING
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            guarded.faulty.delay_s = 0.0
        for _ in range(parts):
            await anext(stream)
        await stream.aclose()
        assert guarded.faulty.open_streams == 0
        assert await guarded.whole() == CONTENT

    run(story())


def test_who_leaves_the_queue_before_the_stream_begins_leaves_no_gap() -> None:
    async def story() -> None:
        guarded = Guarded(OriginLimits(bytes_per_s=10_000.0))
        tasks = [asyncio.create_task(guarded.whole()) for _ in range(10_000)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await asyncio.wait_for(guarded.whole(), 60) == CONTENT

    run(story())


def test_with_hedges_a_stream_is_one_part() -> None:
    async def story() -> None:
        guarded = Guarded(OriginLimits(hedges=True, retry_first_s=0.001))
        guarded.faulty.faults.append(OriginError("reset"))
        for _ in range(HEDGE_FROM_SAMPLES):
            got: list[bytes] = []
            await guarded.parts(got)
            assert got == [CONTENT]
        assert (guarded.faulty.asked, guarded.origin.retries) == ([], 1)

    run(story())


def test_a_file_stays_open_while_a_thread_reads_it_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k").write_bytes(bytes(3 * local.PART_BYTES))
    reading, go_on = threading.Event(), threading.Event()
    used: list[int] = []
    after: list[bool] = []

    def pread(fd: int, size_bytes: int, offset: int) -> bytes:
        used.append(fd)
        reading.set()
        go_on.wait(30)
        after.append(os.path.samestat(os.fstat(fd), os.stat(tmp_path / "k")))
        return bytes(size_bytes)

    async def story() -> None:
        origin = LocalOrigin(str(tmp_path))
        info = await origin.stat("k")
        monkeypatch.setattr(local.os, "pread", pread)
        reader = asyncio.create_task(streamed(origin, "k", 0, info.size_bytes, info.version))
        await asyncio.to_thread(reading.wait, 30)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert os.fstat(used[0]), "the thread is still at it"
        go_on.set()

    run(story())
    assert after == [True]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(used[0])


def test_a_file_that_is_written_to_while_a_part_is_read_yields_no_such_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = b"o" * 3 * local.PART_BYTES, b"n" * (3 * local.PART_BYTES + 1)
    (tmp_path / "k").write_bytes(old)
    real, calls = os.pread, iter(range(10))

    def pread(fd: int, size_bytes: int, offset: int) -> bytes:
        if next(calls) == 1:
            (tmp_path / "k").write_bytes(new)
        return real(fd, size_bytes, offset)

    async def story() -> None:
        origin = LocalOrigin(str(tmp_path))
        info = await origin.stat("k")
        monkeypatch.setattr(local.os, "pread", pread)
        async with aclosing(origin.stream("k", 0, info.size_bytes, info.version)) as parts:
            assert await anext(parts) == old[: local.PART_BYTES]
            with pytest.raises(ObjectChanged):
                await anext(parts)

    run(story())


def test_what_fsspec_reads_while_the_object_changes_is_not_yielded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k").write_bytes(b"o" * 100)

    async def story() -> None:
        origin = FsspecOrigin(f"local://{tmp_path}")
        info = await origin.stat("k")
        read = origin._read

        def read_amid_a_change(key: str, start: int, stop: int) -> bytes:
            (tmp_path / "k").write_bytes(b"n" * 101)
            return read(key, start, stop)

        monkeypatch.setattr(origin, "_read", read_amid_a_change)
        with pytest.raises(ObjectChanged):
            await anext(origin.stream("k", 0, 100, info.version))

    run(story())


def test_over_a_slow_line_parts_are_small_and_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock()

    async def sleep(delay_s: float) -> None:
        clock.at += delay_s

    async def story() -> None:
        memory = MemoryOrigin("m")
        info = memory.put("k", bytes(1_000_000))
        origin = ThrottledOrigin(memory, mbps=8.0, latency_ms=500.0, clock=clock)
        began = clock.at
        async with aclosing(origin.stream("k", 0, 1_000_000, info.version)) as parts:
            came = [(clock.at - began, len(part)) async for part in parts]
        assert came[0][0] == pytest.approx(0.5, abs=0.05), "the latency, once, and the first part"
        assert came[-1][0] == pytest.approx(1.5, abs=0.05), "a megabyte at a megabyte a second"
        assert max(size for _, size in came) <= 20_000
        assert sum(size for _, size in came) == 1_000_000

    monkeypatch.setattr(throttle.asyncio, "sleep", sleep)
    run(story())
