"""Writes behind the rules of `cache/limits.py`: what is tried again, what is not, and what counts against an origin."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stoker.base.rng import Rng
from stoker.cache.limits import CLOSED, OPEN, OriginLimits
from stoker.cache.origin.guarded_writes import GuardedWritableOrigin
from stoker.cache.origin.local_writing import WritableLocalOrigin
from stoker.cache.origin.memory_writing import WritableMemoryOrigin
from stoker.cache.origin.port import Part
from stoker.cache.origin.s3_signing import Credentials
from stoker.cache.origin.users import OriginUser
from stoker.cache.origin.writing_port import Owner
from stoker.errors import OriginError, PreconditionFailed, WriteDenied, WrongBodyLength
from stoker.testing.cache_origin_writable import Trouble, body
from stoker.wire.cache_api import ObjectInfo
from tests.clocks import HandClock

QUICK = OriginLimits(retry_first_s=0.001, breaker_failures=3)


class Flaky(WritableMemoryOrigin):
    """Fails as it is told, after it has done what it was asked for."""

    def __init__(self) -> None:
        super().__init__("m")
        self.faults: list[Exception] = []
        self.deletes = 0

    async def put(self, key: str, parts: AsyncIterable[Part], *rest: Any, **terms: Any) -> ObjectInfo:
        info = await super().put(key, parts, *rest, **terms)
        if self.faults:
            raise self.faults.pop()
        return info

    async def delete(self, key: str) -> None:
        self.deletes += 1
        await super().delete(key)
        if self.faults:
            raise self.faults.pop()


class World:
    def __init__(self, limits: OriginLimits = QUICK) -> None:
        self.flaky = Flaky()
        self.clock = HandClock()
        self.origin = GuardedWritableOrigin(self.flaky, limits, self.clock, Rng(1))


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30))


def test_a_body_is_not_sent_twice_and_what_removes_is() -> None:
    async def story() -> None:
        world = World()
        world.flaky.faults = [OriginError("no answer")]
        with pytest.raises(OriginError, match="no answer"):
            await world.origin.put("k", body(b"one"), 3)
        assert world.origin.retries == 0
        assert world.origin.counters.bytes_written == 3
        world.flaky.faults = [OriginError("no answer")]
        await world.origin.delete("k")
        assert (world.origin.retries, world.flaky.deletes) == (1, 2)

    run(story())


def test_an_origin_that_fails_is_left_alone_and_no_body_is_taken_for_it() -> None:
    async def story() -> None:
        world, taken = World(), 0

        async def counted() -> AsyncGenerator[bytes, None]:
            nonlocal taken
            taken += 1
            yield b"one"

        world.flaky.faults = [OriginError("down")] * 3
        for _ in range(3):
            with pytest.raises(OriginError, match="down"):
                await world.origin.put("k", counted(), 3)
        assert world.origin.state == OPEN
        with pytest.raises(OriginError, match="left alone"):
            await world.origin.put("k", counted(), 3)
        assert taken == 3
        world.clock.at += 2.0
        await world.origin.put("k", counted(), 3)
        assert world.origin.state == CLOSED

    run(story())


@pytest.mark.parametrize("error", [Trouble(), OriginError("the other one is down")])
def test_what_a_body_fails_with_says_nothing_of_the_origin(error: Exception) -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield b"on"
        raise error

    async def story() -> None:
        world = World()
        for _ in range(10):
            with pytest.raises(type(error)):
                await world.origin.put("k", failing(), 3)
        upload = await world.origin.begin_upload("k")
        for _ in range(10):
            with pytest.raises(type(error)):
                await world.origin.put_part("k", upload, 1, failing(), 3)
        assert (world.origin.state, world.origin.retries) == (CLOSED, 0)

    run(story())


def test_refusals_are_answers() -> None:
    async def story() -> None:
        world = World()
        await world.origin.put("k", body(b"one"), 3)
        for _ in range(5):
            with pytest.raises(WrongBodyLength):
                await world.origin.put("k", body(b"one"), 4)
            with pytest.raises(PreconditionFailed):
                await world.origin.put("k", body(b"two"), 3, if_none_match=True)
        assert (world.origin.state, world.origin.retries) == (CLOSED, 0)
        assert await world.origin.read("k", 0, 3, (await world.origin.stat("k")).version) == b"one"

    run(story())


def test_writes_wait_for_their_turn_among_requests() -> None:
    async def story() -> None:
        world = World(OriginLimits(requests_per_s=10.0))
        assert not world.origin.is_busy
        await world.origin.put("k", body(b"one"), 3)
        assert world.origin.is_busy

    run(story())


def test_all_users_of_an_origin_are_within_its_guard(tmp_path: Path) -> None:
    async def story() -> None:
        limits = OriginLimits(retry_first_s=0.001, breaker_failures=1)
        origin = GuardedWritableOrigin(WritableLocalOrigin(str(tmp_path)), limits, HandClock(), Rng(1))
        mine = OriginUser(Owner(os.getuid(), os.getgid()))
        await origin.written_as(mine).put("a", body(b"x"), 1)
        assert origin.counters.bytes_written == 1
        assert origin.written_as(None) is origin
        with pytest.raises(WriteDenied, match="no Unix user there"):
            origin.written_as(OriginUser(credentials=Credentials("K", "S")))
        with pytest.raises(OriginError):
            await origin.once(_broken)
        assert origin.state == OPEN
        with pytest.raises(OriginError, match="left alone"):
            await origin.written_as(mine).put("a", body(b"y"), 1)
        world = World()
        with pytest.raises(WriteDenied, match="knows no users"):
            world.origin.written_as(mine)

    run(story())


async def _broken() -> None:
    raise OriginError("no answer")
