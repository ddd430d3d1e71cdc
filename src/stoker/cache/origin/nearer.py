"""An origin, read through a nearer fleet while that answers.

The origin has the last word: what the nearer fleet cannot say, is not sure of, says is not there, or says is another
version now, is asked of the origin itself; and what stops amid its bytes goes on from there. One that fails again and
again is left alone for a while. Where the origin cannot be asked either, what the nearer fleet still knows is taken.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from stoker.base.clock import Clock
from stoker.cache.limits import CLOSED, Breaker, OriginLimits
from stoker.cache.origin.fleet_origin import OriginAway
from stoker.cache.origin.fleet_servers import FleetUnreachable
from stoker.cache.origin.port import (
    Entries,
    Opened,
    Origin,
    OriginCounters,
    Part,
    ReadRefused,
    begun,
    check_length,
    folder_of,
    sites_of,
)
from stoker.errors import CacheError, ObjectChanged, ObjectNotFound, OriginError
from stoker.wire.cache_api import ObjectInfo

log = logging.getLogger("stoker.cache")
_LIMITS = OriginLimits(breaker_failures=3)


class Nearer(Origin, Protocol):
    """What stands nearer: `stat` and `open` say only what it is sure of."""

    async def known(self, key: str) -> ObjectInfo:
        """What it knows, however sure it is of that. Raises as `stat`."""
        ...


class NearerOrigin:
    """`counters` and `url` are the origin's: what comes from `nearer` is counted there. Lives on one event loop."""

    def __init__(self, nearer: Nearer, origin: Origin, clock: Clock) -> None:
        self.nearer = nearer
        self._origin = origin
        self._clock = clock
        self._breaker = Breaker(_LIMITS)
        self._is_silent = False
        self._is_refusing = False

    @property
    def url(self) -> str:
        return self._origin.url

    @property
    def counters(self) -> OriginCounters:
        return self._origin.counters

    @property
    def nearer_state(self) -> str:
        """Of the breaker: closed, open or probing."""
        return self._breaker.state

    async def stat(self, key: str) -> ObjectInfo:
        if self._is_near():
            with self._asking() as asking:
                info = await self.nearer.stat(key)
                asking.is_answered = True
                return info
        try:
            return await self._origin.stat(key)
        except OriginError as error:
            return await self._known(key, error)

    async def read(self, key: str, start: int, stop: int, version: str) -> bytes:
        async with aclosing(self.stream(key, start, stop, version)) as parts:
            data = b"".join([part async for part in parts])
        return check_length(self.url, key, data, start, stop)

    async def stream(self, key: str, start: int, stop: int, version: str) -> AsyncGenerator[Part, None]:
        if not self._is_near():
            first = self._origin.stream(key, start, stop, version)
        else:
            first = self._followed(key, start, stop, version, self.nearer.stream(key, start, stop, version))
        async with aclosing(first) as parts:
            async for part in parts:
                if part:
                    yield part

    async def open(self, key: str, stop: int) -> Opened:
        if self._is_near():
            with self._asking():  # what came of it is seen with its bytes
                info, parts = await self.nearer.open(key, stop)
                stop = min(stop, info.size_bytes)
                return Opened(info, await begun(self._followed(key, 0, stop, info.version, parts)))
        try:
            return await self._origin.open(key, stop)
        except OriginError as error:
            info = await self._known(key, error)
        return Opened(info, self.stream(key, 0, min(stop, info.size_bytes), info.version))

    async def list(
        self, prefix: str, after: str | None = None, limit: int = 1000
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        """One data set has the same keys wherever it is read: what stops goes on behind the last of them."""
        if self._is_near():
            with self._asking() as asking:
                async with aclosing(self.nearer.list(prefix, after, limit)) as pages:
                    async for page in pages:
                        after = page[-1].key
                        asking.is_taken = True
                        yield page
                        asking.is_taken = False
                asking.is_answered = True
                return
        async with aclosing(self._origin.list(prefix, after, limit)) as pages:
            async for page in pages:
                yield page

    async def folder(self, prefix: str, after: str | None, limit: int) -> Entries | None:
        """See `ListsFolders`."""
        if self._is_near():
            with self._asking() as asking:
                entries = await folder_of(self.nearer, prefix, after, limit)
                asking.is_answered = True
                return entries
        return await folder_of(self._origin, prefix, after, limit)

    async def sites(self, asked: int) -> int:
        """See `ReadsThrough`: the longer way of the two."""
        return max(await sites_of(self.nearer, asked), await sites_of(self._origin, asked))

    async def close(self) -> None:
        await self.nearer.close()
        await self._origin.close()

    async def _known(self, key: str, error: OriginError) -> ObjectInfo:
        """What is known nearby, where the origin failed. Raises that error where it is nothing."""
        if self._is_silent or isinstance(error, ReadRefused):
            raise error
        try:
            return await self.nearer.known(key)
        except CacheError:
            raise error from None

    async def _followed(
        self, key: str, start: int, stop: int, version: str, near: AsyncGenerator[Part, None]
    ) -> AsyncGenerator[Part, None]:
        """What is near, and from the origin what is missing of it. The first part is nothing: see `begun`."""
        with self._asking() as asking:
            async with aclosing(near) as parts:
                yield b""
                async for part in parts:
                    start += len(part)
                    asking.is_taken = True
                    yield part
                    asking.is_taken = False
            asking.is_answered = True
            return
        if start < stop:
            async with aclosing(self._origin.stream(key, start, stop, version)) as rest:
                async for part in rest:
                    yield part

    def _is_near(self) -> bool:
        return self._breaker.ask(self._clock.now()).is_allowed

    def _asking(self) -> _Asking:
        return _Asking(self._ended)

    def _ended(self, error: BaseException | None, is_enough: bool) -> None:
        """What came of asking the nearer fleet."""
        if isinstance(error, OriginError):
            self._is_silent = isinstance(error, FleetUnreachable)
            is_good = self._is_of_one_key(error)
            if not is_good:
                self._failed(error)
                return
        else:
            is_good = is_enough or isinstance(error, ObjectNotFound | ObjectChanged)
        if is_good:
            self._is_silent = False
            self._breaker.succeeded()
        else:
            self._breaker.gave_up()

    def _is_of_one_key(self, error: OriginError) -> bool:
        """Whether it says something of what was asked for, and nothing of the fleet."""
        if isinstance(error, ReadRefused) and not self._is_refusing:
            self._is_refusing = True
            log.warning("what the nearer fleet refuses is read from the origin itself: %s", error)
        return isinstance(error, ReadRefused | OriginAway)

    def _failed(self, error: OriginError) -> None:
        was_closed = self._breaker.state == CLOSED
        self._breaker.failed(str(error), self._clock.now())
        if was_closed and self._breaker.state != CLOSED:
            log.warning("%s is read from the origin itself for a while: %s", self.nearer.url, error)


class _Asking:
    """Asking the nearer fleet; `ended` is told what came of it. Where that is no answer it goes on behind: the origin
    has the last word. `is_answered`: all came that was asked for; `is_taken`: who asked has what came so far, and may
    leave."""

    def __init__(self, ended: Callable[[BaseException | None, bool], None]) -> None:
        self._ended = ended
        self.is_answered = False
        self.is_taken = False

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        is_left = error is None or isinstance(error, GeneratorExit)
        self._ended(error, is_left and (self.is_answered or self.is_taken))
        return isinstance(error, OriginError | ObjectNotFound | ObjectChanged)
