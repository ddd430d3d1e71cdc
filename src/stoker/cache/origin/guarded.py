"""Any origin, asked with patience and restraint: see `cache/limits.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from stoker.base.clock import Clock
from stoker.base.exposition import Histogram
from stoker.base.rng import Rng
from stoker.cache.limits import CLOSED, OPEN, Breaker, Latencies, OriginLimits, Pace, retry_after_s
from stoker.cache.origin.port import (
    Entries,
    ListsFolders,
    Opened,
    Origin,
    OriginCounters,
    Part,
    ReadRefused,
    begun,
    folder_of,
    open_in_two,
    sites_of,
)
from stoker.errors import ObjectChanged, ObjectNotFound, OriginError, WriteRefused
from stoker.wire.cache_api import ObjectInfo

T = TypeVar("T")
_HEDGE_BEYOND = 0.99


class GuardedOrigin:
    """Retries, limits, a breaker, and second requests beside slow ones where that is asked for.

    Raises what the origin raises; OriginError at once while the breaker is open.
    """

    _left_alone: type[OriginError] = OriginError

    def __init__(self, origin: Origin, limits: OriginLimits, clock: Clock, rng: Rng) -> None:
        self._origin = origin
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._bytes = Pace(limits.bytes_per_s)
        self._requests = Pace(limits.requests_per_s)
        self._breaker = Breaker(limits)
        self._read_times = Latencies()
        self.retries = 0
        """Requests that were made again because one had failed."""
        self.errors = 0
        """Requests that failed, and answers that broke off."""
        self.latencies = Histogram()
        """Seconds to the answer of those that did not; of content, to its first bytes."""
        self.hedges = 0
        """Second requests beside slow ones; their bytes are in `counters` with the others."""

    @property
    def url(self) -> str:
        return self._origin.url

    @property
    def counters(self) -> OriginCounters:
        return self._origin.counters

    @property
    def is_limited(self) -> bool:
        """Whether who comes later may have to wait for who came before."""
        return self._limits.bytes_per_s > 0 or self._limits.requests_per_s > 0

    @property
    def is_busy(self) -> bool:
        """Whether one more request would have to wait, or make others wait, or is not let through."""
        now = self._clock.now()
        return self._breaker.state != CLOSED or self._bytes.is_late(now) or self._requests.is_late(now)

    @property
    def state(self) -> str:
        """Of the breaker: closed, open or probing."""
        return self._breaker.state

    async def stat(self, key: str) -> ObjectInfo:
        return await self._ask(0, lambda: self._origin.stat(key))

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        def read() -> Awaitable[bytes]:
            return self._timed(self._origin.read(key, start, stop, version))

        if not self._limits.hedges:
            return await self._ask(stop - start, read)
        return await self._ask(stop - start, lambda: self._hedged(stop - start, read))

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[Part, None]:
        """Goes on where it stood after a failure, with a request for what is missing: a retry like any other.

        `attempts_max` bounds the failures in a row without a byte between them. With hedges it is one part:
        only of whole answers can the first to come be taken.
        """
        if self._limits.hedges:
            yield await self.read(key, start, stop, version)
            return
        async with aclosing(self._streamed(key, start, stop, version, 0)) as parts:
            async for part in parts:
                yield part

    async def _streamed(
        self, key: str, start: int, stop: int, version: str, attempt: int
    ) -> AsyncGenerator[Part, None]:
        """`attempt`: so many were made already."""
        while True:
            attempt += 1
            await self._wait_for_turn(stop - start)
            is_answered, began = False, self._clock.now()
            try:
                async with aclosing(self._origin.stream(key, start, stop, version)) as parts:
                    async for part in parts:
                        if not is_answered:
                            self._answered_since(began)
                        is_answered = True
                        self._breaker.succeeded()
                        start += len(part)
                        yield part
                if not is_answered:
                    self._breaker.succeeded()
                return
            except (ObjectNotFound, ObjectChanged, ReadRefused):
                self._breaker.succeeded()
                raise
            except OriginError as error:
                if is_answered:
                    attempt = 1
                    if start == stop:
                        self._has_failed(error)
                        raise  # nothing is missing that could be asked for again
                await self._after_failure(error, attempt)
            except BaseException:
                if not is_answered:
                    self._breaker.gave_up()
                raise

    async def open(self, key: str, stop: int) -> Opened:
        """What comes is counted once it is known how much that is, and waits for its turn then. With hedges in two: as
        `stream`."""
        if self._limits.hedges:
            return await open_in_two(self, key, stop)
        info, parts = await self._ask(0, lambda: self._origin.open(key, stop), is_all=False)
        stop = min(stop, info.size_bytes)
        delay_s = self._bytes.delay_s(stop, self._clock.now())
        return Opened(info, await begun(self._followed(key, stop, info.version, parts, delay_s)))

    async def _followed(
        self, key: str, stop: int, version: str, first: AsyncGenerator[Part, None], delay_s: float
    ) -> AsyncGenerator[Part, None]:
        """Parts that are coming, and after a failure a request for what is missing."""
        start = 0
        try:
            async with aclosing(first) as parts:
                yield b""
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                async for part in parts:
                    self._breaker.succeeded()
                    start += len(part)
                    yield part
                if not start:
                    self._breaker.succeeded()
                return
        except (ObjectNotFound, ObjectChanged, ReadRefused):
            raise
        except OriginError as error:
            await self._after_failure(error, 1)
            if start == stop:
                raise  # nothing is missing that could be asked for again
            self._bytes.give_back(stop - start)
        async with aclosing(self._streamed(key, start, stop, version, 0 if start else 1)) as parts:
            async for part in parts:
                yield part

    async def folder(self, prefix: str, after: str | None, limit: int) -> Entries | None:
        """See `ListsFolders`."""
        if not isinstance(self._origin, ListsFolders):
            return None
        return await self._ask(0, lambda: folder_of(self._origin, prefix, after, limit))

    async def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        """Asked again only before its first page: an origin may find out later that it cannot be gone on with."""
        attempt, is_out = 0, False
        while True:
            attempt += 1
            await self._wait_for_turn(0)
            began = self._clock.now()
            try:
                async with aclosing(self._origin.list(prefix, after, limit)) as pages:
                    async for page in pages:
                        self._breaker.succeeded()
                        if not is_out:
                            self._answered_since(began)
                        is_out = True
                        yield page
                self._breaker.succeeded()
                return
            except (ObjectNotFound, ReadRefused):
                self._breaker.succeeded()
                raise
            except OriginError as error:
                if is_out:
                    self._has_failed(error)
                    raise
                await self._after_failure(error, attempt)
            except BaseException:
                self._breaker.gave_up()
                raise

    async def sites(self, asked: int) -> int:
        """At once, and whatever was said before: see `ReadsThrough`."""
        return await sites_of(self._origin, asked)

    async def close(self) -> None:
        await self._origin.close()

    async def _ask(self, size_bytes: int, request: Callable[[], Awaitable[T]], *, is_all: bool = True) -> T:
        """`is_all`: with the answer the origin has done what it was asked for; else that is still to be seen."""
        attempt = 0
        while True:
            attempt += 1
            await self._wait_for_turn(size_bytes)
            began = self._clock.now()
            try:
                answer = await request()
                self._answered_since(began)
            except (ObjectNotFound, ObjectChanged, ReadRefused, WriteRefused):
                self._breaker.succeeded()
                raise
            except OriginError as error:
                await self._after_failure(error, attempt)
            except BaseException:
                self._breaker.gave_up()
                raise
            else:
                if is_all:
                    self._breaker.succeeded()
                else:
                    self._breaker.gave_up()
                return answer

    async def _wait_for_turn(self, size_bytes: int) -> None:
        """Raises OriginError where the origin is left alone, also if that has begun while this request waited."""
        self._check_breaker()
        now = self._clock.now()
        delay_s = max(self._requests.delay_s(1, now), self._bytes.delay_s(size_bytes, now))
        if delay_s <= 0:
            return
        try:
            await asyncio.sleep(delay_s)
        except BaseException:
            self._requests.give_back(1)
            self._bytes.give_back(size_bytes)
            self._breaker.gave_up()
            raise
        if self._breaker.state == OPEN:
            self._check_breaker()

    def _check_breaker(self) -> None:
        verdict = self._breaker.ask(self._clock.now())
        if not verdict.is_allowed:
            raise self._left_alone(f"{self.url} is left alone: {verdict.why}")

    async def _after_failure(self, error: OriginError, attempt: int) -> None:
        """Wait before the next attempt. Raises the error if there is none."""
        self._has_failed(error)
        delay_s = retry_after_s(self._limits, attempt, self._rng)
        if delay_s is None:
            raise error
        await asyncio.sleep(delay_s)
        if self._breaker.state != CLOSED:
            raise error  # the others have found out meanwhile: what it said is better than that it is left alone
        self.retries += 1

    def _has_failed(self, error: OriginError) -> None:
        self.errors += 1
        self._breaker.failed(str(error), self._clock.now())

    def _answered_since(self, began: float) -> None:
        self.latencies.add(self._clock.now() - began)

    def _has_room_for(self, size_bytes: int) -> bool:
        """Whether one more request may go out at once; it is counted as gone out."""
        now = self._clock.now()
        if self._requests.delay_s(1, now) <= 0:
            if self._bytes.delay_s(size_bytes, now) <= 0:
                return True
            self._bytes.give_back(size_bytes)
        self._requests.give_back(1)
        return False

    async def _timed(self, request: Awaitable[bytes]) -> bytes:
        began = self._clock.now()
        data = await request
        self._read_times.add(self._clock.now() - began)
        return data

    async def _hedged(self, size_bytes: int, request: Callable[[], Awaitable[bytes]]) -> bytes:
        """The first of two to come, the second of which begins late. A failure counts once both have failed."""
        patience_s = self._read_times.percentile_s(_HEDGE_BEYOND)
        first = asyncio.ensure_future(request())
        both = {first}
        try:
            if patience_s is not None:
                await asyncio.wait(both, timeout=patience_s)
            if patience_s is None or first.done() or not self._has_room_for(size_bytes):
                return await first
            self.hedges += 1
            both.add(asyncio.ensure_future(request()))
            while True:
                done, waiting = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                good = [task for task in done if task.exception() is None]
                if good or not waiting:
                    return await (good or list(done))[0]
                both = waiting
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
