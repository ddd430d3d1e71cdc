"""How an origin is asked: the pure rules, and an origin behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.clock import SystemClock
from stoker.base.rng import Rng
from stoker.cache.limits import (
    CLOSED,
    HEDGE_FROM_SAMPLES,
    OPEN,
    PROBING,
    Breaker,
    Latencies,
    OriginLimits,
    Pace,
    retry_after_s,
)
from stoker.cache.origin.guarded import GuardedOrigin
from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.origin.port import Opened
from stoker.errors import ObjectChanged, ObjectNotFound, OriginError, ShortBody
from stoker.testing.cache_fakes import FaultyOrigin
from tests.clocks import HandClock

LIMITS = OriginLimits(breaker_failures=3, breaker_first_s=1.0, breaker_limit_s=4.0)


def test_the_breakers_story() -> None:
    breaker = Breaker(LIMITS)
    for _ in range(2):
        assert breaker.ask(0.0).is_allowed
        breaker.failed("reset", 0.0)
    breaker.succeeded()
    for now in (0.0, 0.1, 0.2):
        assert breaker.ask(now).is_allowed
        breaker.failed("reset", now)
    assert breaker.state == OPEN
    refused = breaker.ask(0.7)
    assert refused == (False, "it failed 3 times in a row (last: reset); asked again in 0.5 s")
    assert breaker.ask(1.2).is_allowed
    assert breaker.state == PROBING
    assert breaker.ask(1.2) == (
        False,
        "it failed 3 times in a row (last: reset); asked again once one request has come back",
    )
    breaker.failed("still down", 1.3)
    assert not breaker.ask(3.2).is_allowed, "twice the time"
    assert breaker.ask(3.3).is_allowed
    breaker.gave_up()
    assert breaker.ask(3.4).is_allowed, "who was cancelled says nothing: another may see"
    for expected_s in (4.0, 4.0):
        breaker.failed("still down", 10.0)
        assert not breaker.ask(10.0 + expected_s - 0.01).is_allowed
        assert breaker.ask(10.0 + expected_s).is_allowed
    breaker.succeeded()
    assert breaker.state == CLOSED
    assert breaker.ask(20.0).is_allowed


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 100)), min_size=1, max_size=50), st.integers(1, 500)
)
def test_no_more_goes_out_than_the_rate_and_in_order(steps: list[tuple[float, int]], rate: int) -> None:
    pace, now, last = Pace(rate), 100.0, 0.0
    sent: list[tuple[float, int]] = []
    for passes_s, amount in steps:
        now += passes_s
        at = now + pace.delay_s(amount, now)
        assert at >= last
        last = at
        sent.append((at, amount))
    for i, (first, _) in enumerate(sent):
        for j in range(i, len(sent)):
            before_last = sum(amount for _, amount in sent[i:j])
            assert before_last <= rate * (sent[j][0] - first + 0.05) + 1e-6
    assert Pace(0).delay_s(1e9, 5.0) == 0.0


def test_how_long_the_slowest_take_is_known_after_some_requests() -> None:
    times = Latencies()
    for number in range(HEDGE_FROM_SAMPLES - 1):
        times.add(float(number))
    assert times.percentile_s(0.99) is None
    for number in range(1000):
        times.add(float(number))
    assert times.percentile_s(0.99) == pytest.approx(994, abs=1)
    assert times.percentile_s(1.0) == 999


def test_retries_wait_longer_each_time_and_end() -> None:
    rng = Rng(1)
    limits = OriginLimits(attempts_max=3, retry_first_s=1.0, retry_limit_s=1.5)
    first = [retry_after_s(limits, 1, rng) for _ in range(100)]
    second = [retry_after_s(limits, 2, rng) for _ in range(100)]
    assert all(wait is not None and 0 <= wait <= 1 for wait in first)
    assert any(wait is not None and 1 < wait <= 1.5 for wait in second)
    assert retry_after_s(limits, 3, rng) is None


class Guarded:
    """A memory origin that fails on demand, behind the rules."""

    def __init__(self, limits: OriginLimits, clock: HandClock | None = None) -> None:
        self.memory = MemoryOrigin("m")
        self.memory.put("k", b"content")
        self.faulty = FaultyOrigin(self.memory)
        self.clock = clock
        self.origin = GuardedOrigin(self.faulty, limits, clock or SystemClock(), Rng(1))

    async def read(self, key: str = "k") -> bytes:
        info = await self.memory.stat("k")
        return await self.origin.read(key, 0, 7, info.version)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30))


QUICK = OriginLimits(retry_first_s=0.001, breaker_failures=5)


def test_what_fails_for_a_moment_is_asked_for_again() -> None:
    async def story() -> None:
        guarded = Guarded(QUICK)
        guarded.faulty.faults.extend([OriginError("reset"), ShortBody("cut"), OriginError("503")])
        guarded.faulty.stat_faults.append(OriginError("reset"))
        assert await guarded.read() == b"content"
        assert (await guarded.origin.stat("k")).size_bytes == 7
        assert guarded.origin.retries == 4

    run(story())


def test_what_will_not_change_is_not_asked_for_again() -> None:
    async def story() -> None:
        guarded = Guarded(QUICK)
        for error in (ObjectNotFound("gone"), ObjectChanged("new")):
            guarded.faulty.faults.append(error)
            with pytest.raises(type(error)):
                await guarded.read()
        assert guarded.origin.retries == 0
        assert guarded.origin.state == CLOSED

    run(story())


def test_an_origin_that_is_down_is_left_alone_and_found_again() -> None:
    async def story() -> None:
        guarded = Guarded(QUICK, HandClock())
        guarded.faulty.faults.extend([OriginError("down")] * 5)
        for _ in range(2):
            with pytest.raises(OriginError, match="down"):
                await guarded.read()
        assert guarded.origin.state == OPEN
        requests = guarded.memory.counters.requests
        with pytest.raises(OriginError, match="left alone: it failed 5 times in a row"):
            await guarded.read()
        assert guarded.memory.counters.requests == requests + 1, "a stat of this test's own"
        assert guarded.clock is not None
        guarded.clock.at += 1.0
        assert await guarded.read() == b"content"
        assert guarded.origin.state == CLOSED

    run(story())


def test_a_reader_that_leaves_while_it_probes_lets_the_next_one_probe() -> None:
    async def story() -> None:
        guarded = Guarded(QUICK, HandClock())
        guarded.faulty.faults.extend([OriginError("down")] * 5)
        for _ in range(2):
            with pytest.raises(OriginError):
                await guarded.read()
        assert guarded.clock is not None
        guarded.clock.at += 1.0
        guarded.faulty.delay_s = 10.0
        probe = asyncio.create_task(guarded.read())
        await asyncio.sleep(0.01)
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        guarded.faulty.delay_s = 0.0
        assert await guarded.read() == b"content"

    run(story())


class Breaks(FaultyOrigin):
    """Its lists break off after so many pages, so many times."""

    def __init__(self, origin: MemoryOrigin, after_pages: int, times: int, error: BaseException) -> None:
        super().__init__(origin)
        self.after_pages, self.times, self.error = after_pages, times, error

    async def list(self, prefix: str, after: str | None = None, limit: int = 1000) -> Any:
        count = 0
        async for page in super().list(prefix, after, limit):
            if count == self.after_pages and self.times:
                self.times -= 1
                raise self.error
            count += 1
            yield page


def listed(
    after_pages: int, times: int, error: BaseException
) -> tuple[GuardedOrigin, Coroutine[Any, Any, Any]]:
    memory = MemoryOrigin("m")
    for number in range(5):
        memory.put(f"k{number}", b"x")
    origin = GuardedOrigin(Breaks(memory, after_pages, times, error), QUICK, SystemClock(), Rng(1))

    async def keys() -> list[str]:
        return [info.key async for page in origin.list("", None, 2) for info in page]

    return origin, keys()


def test_a_list_is_asked_for_again_until_its_first_page_is_out() -> None:
    async def story() -> None:
        origin, keys = listed(0, 2, OriginError("reset"))
        assert await keys == [f"k{number}" for number in range(5)]
        assert origin.retries == 2
        origin, keys = listed(1, 1, OriginError("it is not in order; list again"))
        with pytest.raises(OriginError, match="list again"):
            await keys
        assert origin.retries == 0

    run(story())


@pytest.mark.parametrize("error", [ValueError("a defect"), asyncio.CancelledError(), ObjectNotFound("gone")])
def test_whatever_ends_a_probe_lets_the_next_one_go_out(error: BaseException) -> None:
    async def story() -> None:
        clock = HandClock()
        memory = MemoryOrigin("m")
        memory.put("k", b"content")
        faulty = Breaks(memory, 0, 1, error)
        origin = GuardedOrigin(faulty, QUICK, clock, Rng(1))
        faulty.stat_faults.extend([OriginError("down")] * 5)
        for asks in (lambda: origin.list("").__anext__(), lambda: origin.stat("k")):
            for _ in range(2):
                with pytest.raises(OriginError):
                    await origin.stat("k")
            assert origin.state == OPEN
            clock.at += 100.0
            if faulty.times == 0:
                faulty.stat_faults.append(error)  # type: ignore[arg-type]
            with pytest.raises(type(error)):
                await asks()
            assert (await origin.stat("k")).size_bytes == 7
            faulty.stat_faults.extend([OriginError("down")] * 5)

    run(story())


def test_many_failures_at_once_are_one_reason_to_leave_it_alone() -> None:
    breaker = Breaker(LIMITS)
    for _ in range(40):
        breaker.failed("hiccup", 5.0)
    assert not breaker.ask(5.9).is_allowed
    assert breaker.ask(6.0).is_allowed, "a second, not the most there is"


def test_who_leaves_the_queue_leaves_no_gap() -> None:
    async def story() -> None:
        guarded = Guarded(OriginLimits(bytes_per_s=700.0))
        tasks = [asyncio.create_task(guarded.read()) for _ in range(200)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await asyncio.wait_for(guarded.read(), 60) == b"content"

    run(story())


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_request_beside_one_that_is_slower_than_the_others_were(fails: bool) -> None:
    async def story() -> None:
        guarded = Guarded(OriginLimits(hedges=True, retry_first_s=0.001))
        for _ in range(HEDGE_FROM_SAMPLES):
            assert await guarded.read() == b"content"
        assert guarded.origin.hedges == 0
        before = guarded.memory.counters.requests
        slow = asyncio.get_running_loop().create_future()
        read = guarded.faulty.read
        calls = []

        async def slow_once(key: str, start: int, stop: int, version: str) -> bytes:
            calls.append(key)
            number = len(calls)
            if number == 1:
                await slow
            if number == 2 and fails:
                slow.set_result(None)
                raise OriginError("the second one fails")
            return await read(key, start, stop, version)

        guarded.faulty.read = slow_once  # type: ignore[method-assign]
        assert await guarded.read() == b"content"
        assert (len(calls), guarded.origin.hedges, guarded.origin.retries) == (2, 1, 0)
        assert guarded.memory.counters.requests == before + 2, "a stat of this test's own, and one read"
        assert slow.cancelled() or fails

    run(story())


def test_no_second_request_unless_asked_for() -> None:
    async def story() -> None:
        guarded = Guarded(QUICK)
        for _ in range(HEDGE_FROM_SAMPLES):
            await guarded.read()
        guarded.faulty.delay_s = 0.05
        await guarded.read()
        assert guarded.origin.hedges == 0

    run(story())


class Gated(MemoryOrigin):
    """Opens nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__("m")
        self.gate = asyncio.Event()

    async def open(self, key: str, stop: int) -> Opened:
        await self.gate.wait()
        return await super().open(key, stop)


def test_what_is_opened_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)

    async def story() -> None:
        memory = Gated()
        memory.put("k", bytes(100_000))
        origin = GuardedOrigin(memory, OriginLimits(bytes_per_s=100_000.0), HandClock(), Rng(1))
        opening = asyncio.gather(*(origin.open("k", 1_000_000) for _ in range(4)))
        await asyncio.sleep(0)
        memory.gate.set()
        opened = await opening
        monkeypatch.setattr("stoker.cache.origin.guarded.asyncio.sleep", sleep)
        for _, parts in opened:
            async with aclosing(parts) as stream:
                assert len(b"".join([part async for part in stream])) == 100_000
        assert delays == pytest.approx([0.95, 1.95, 2.95], abs=0.06)

    asyncio.run(story())
