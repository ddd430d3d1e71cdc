"""A nearer fleet in front of an origin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from stoker.cache.limits import CLOSED, OPEN
from stoker.cache.origin.fleet_origin import OriginAway
from stoker.cache.origin.fleet_servers import FleetUnreachable
from stoker.cache.origin.memory import MemoryOrigin
from stoker.cache.origin.nearer import NearerOrigin
from stoker.cache.origin.port import Opened, ReadRefused
from stoker.errors import ObjectChanged, ObjectNotFound, OriginError, ShortBody
from stoker.testing.cache_origin import listed, streamed
from stoker.wire.cache_api import ObjectInfo
from tests.unit.cache_far import DATA


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    wall = now


class Near(MemoryOrigin):
    """A fleet that is well, and knows what it has."""

    async def known(self, key: str) -> ObjectInfo:
        return await super().stat(key)


class Stumbling(Near):
    """Its bodies fail after so many parts, with `error`; lists one page."""

    error: Exception = OriginError("stumbled")
    parts = 1
    is_well = False

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[bytes, None]:
        some = super().stream(key, start, stop, version) if self.is_well else self._some(start)
        async with aclosing(some) as parts:
            async for part in parts:
                yield part

    async def open(self, key: str, stop: int) -> Opened:
        return Opened(await self.known(key), self._some(0))

    async def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        async with aclosing(super().list(prefix, after, 1)) as pages:
            async for page in pages:
                yield page
                raise self.error

    async def _some(self, start: int) -> AsyncGenerator[bytes, None]:
        for number in range(self.parts):
            self.counters.bytes_read += 10
            yield DATA[start + 10 * number : start + 10 * (number + 1)]
        raise self.error


class Unsure(Near):
    """Answers questions about versions with `error`, and has bytes and what it knew."""

    error: Exception = OriginAway("its origin is away")

    async def stat(self, key: str) -> ObjectInfo:
        raise self.error

    async def open(self, key: str, stop: int) -> Opened:
        raise self.error


class Away(MemoryOrigin):
    """Nothing can be asked of it while it `is_away`."""

    is_away = True

    async def stat(self, key: str) -> ObjectInfo:
        self._check()
        return await super().stat(key)

    async def open(self, key: str, stop: int) -> Opened:
        self._check()
        return await super().open(key, stop)

    def _check(self) -> None:
        if self.is_away:
            raise OriginError("the origin is away")


def with_objects(origin: MemoryOrigin) -> None:
    for key in ("a", "b", "c"):
        origin.put(key, DATA)


def both_of(near: Near, origin: MemoryOrigin, clock: Hands | None = None) -> NearerOrigin:
    with_objects(near)
    with_objects(origin)
    return NearerOrigin(near, origin, clock or Hands())


async def opened_bytes(origin: NearerOrigin, stop: int) -> bytes:
    opened = await origin.open("a", stop)
    async with aclosing(opened.parts) as parts:
        return b"".join([part async for part in parts])


@pytest.mark.parametrize("error", [OriginError("x"), ShortBody("x"), ObjectChanged("x"), ObjectNotFound("x")])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_stops_amid_its_bytes_goes_on_from_the_origin(error: Exception, count: int) -> None:
    async def story() -> None:
        near, origin = Stumbling("near"), MemoryOrigin("origin")
        both = both_of(near, origin)
        near.error, near.parts = error, count
        version = (await both.stat("a")).version
        assert b"".join(await streamed(both, "a", 0, 1000, version)) == DATA[:1000]
        assert await both.read("a", 0, 1000, version) == DATA[:1000]
        assert origin.counters.bytes_read == 2 * (1000 - 10 * count), "what has come is not fetched twice"
        assert await opened_bytes(both, 1000) == DATA[:1000]
        assert [info.key for info in await listed(both, "", None, 2)] == ["a", "b", "c"]

    asyncio.run(story())


def test_what_stops_amid_its_bytes_goes_on_in_that_version_or_says_that_it_changed() -> None:
    async def story() -> None:
        origin = MemoryOrigin("origin")
        both = both_of(Stumbling("near"), origin)
        version = (await both.stat("a")).version
        origin.put("a", DATA[::-1])
        for asked in (streamed(both, "a", 0, 1000, version), opened_bytes(both, 1000)):
            with pytest.raises(ObjectChanged):
                await asked

    asyncio.run(story())


def test_a_nearer_fleet_whose_bodies_break_off_is_left_alone_for_a_while() -> None:
    """However well its heads come."""

    async def story() -> None:
        near = Stumbling("near")
        both = both_of(near, MemoryOrigin("origin"))
        for _ in range(3):
            assert both.nearer_state == CLOSED
            assert await opened_bytes(both, 100) == DATA[:100]
        assert both.nearer_state == OPEN
        before = near.counters.requests
        assert await both.stat("a")
        assert await opened_bytes(both, 100) == DATA[:100]
        assert near.counters.requests == before

    asyncio.run(story())


@pytest.mark.parametrize("is_whole", [True, False])
def test_one_that_is_well_again_is_read_again(is_whole: bool) -> None:
    """Who leaves with what came so far has had an answer."""

    async def story() -> None:
        clock, near = Hands(), Stumbling("near", part_bytes=10)
        both = both_of(near, MemoryOrigin("origin"), clock)
        version = (await near.stat("a")).version
        for _ in range(3):
            await both.read("a", 0, 100, version)
        assert both.nearer_state == OPEN
        clock.at, near.is_well = clock.at + 2.0, True
        async with aclosing(both.stream("a", 0, 100, version)) as parts:
            async for _ in parts:
                if not is_whole:
                    break
        assert both.nearer_state == CLOSED

    asyncio.run(story())


def test_what_the_nearer_fleet_is_not_sure_of_the_origin_says() -> None:
    async def story() -> None:
        near, origin = Unsure("near"), MemoryOrigin("origin")
        both = both_of(near, origin)
        origin.put("a", DATA[::-1])
        for _ in range(10):
            assert await both.stat("a") == origin.find("a")
            assert await opened_bytes(both, 100) == DATA[::-1][:100]
        with pytest.raises(ObjectNotFound):
            await both.stat("none")
        assert both.nearer_state == CLOSED, "it lives, and has bytes"

    asyncio.run(story())


def test_what_the_nearer_fleet_still_knows_is_taken_where_the_origin_is_away_as_well() -> None:
    async def story() -> None:
        near, origin = Unsure("near"), Away("origin")
        both = both_of(near, origin)
        origin.put("a", DATA[::-1])
        for _ in range(10):
            assert await both.stat("a") == near.find("a")
            assert await opened_bytes(both, 100) == DATA[:100]
        with pytest.raises(OriginError, match="the origin is away"):
            await both.stat("none")  # that it knows of none is no reason to believe that there is none
        origin.is_away = False
        assert await both.stat("a") == origin.find("a")

    asyncio.run(story())


def test_a_nearer_fleet_that_nobody_reaches_is_not_asked_what_it_knows() -> None:
    async def story() -> None:
        near = Unsure("near")
        near.error = FleetUnreachable("nobody answers")
        both = both_of(near, Away("origin"))
        for _ in range(5):
            with pytest.raises(OriginError, match="the origin is away"):
                await both.stat("a")
        assert near.counters.requests == 0
        assert both.nearer_state == OPEN

    asyncio.run(story())


def test_what_the_nearer_fleet_refuses_the_origin_gives(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        near = Unsure("near")
        near.error = ReadRefused("near does not let us read this")
        both = both_of(near, MemoryOrigin("origin"))
        for _ in range(10):
            assert (await both.stat("a")).size_bytes == len(DATA)
            assert await opened_bytes(both, 100) == DATA[:100]
        assert both.nearer_state == CLOSED

    with caplog.at_level(logging.WARNING, "stoker.cache"):
        asyncio.run(story())
    assert caplog.text.count("near does not let us read this") == 1, "told once"


def test_a_nearer_fleet_that_fails_again_and_again_is_left_alone_for_a_while() -> None:
    async def story() -> None:
        near = Stumbling("near")
        both = both_of(near, MemoryOrigin("origin"))
        near.parts = 0
        version = (await near.stat("a")).version
        for _ in range(10):
            assert b"".join(await streamed(both, "a", 0, 10, version)) == DATA[:10]
        assert both.nearer_state == OPEN
        before = near.counters.requests
        assert await both.stat("a")
        assert near.counters.requests == before

    asyncio.run(story())


def test_the_origin_has_the_last_word_on_what_is_not_there_or_changed() -> None:
    async def story() -> None:
        near, origin = Near("near"), MemoryOrigin("origin")
        both = both_of(near, origin)
        origin.put("new", b"new")
        for _ in range(10):
            assert (await both.stat("new")).size_bytes == 3
            with pytest.raises(ObjectNotFound):
                await both.stat("none")
        origin.put("a", b"changed")
        version = (await origin.stat("a")).version
        assert await both.read("a", 0, 7, version) == b"changed"
        assert both.nearer_state == CLOSED, "these are answers"
        assert near.counters.requests > 0

    asyncio.run(story())
