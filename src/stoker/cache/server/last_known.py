"""What was known last goes on being told while an origin says nothing: who asks waits for a short time at most."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from stoker.base.clock import Clock
from stoker.cache.reach import Reach
from stoker.cache.server.buckets import Bucket
from stoker.errors import OriginError

T = TypeVar("T")
WAIT_S = 5.0
"""So long who could be told what was known last waits for what is so now."""


class LastKnown:
    """Of the buckets of one server. Lives on one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reach: defaultdict[str, Reach] = defaultdict(Reach)
        self._asking: set[asyncio.Task[Any]] = set()

    async def now_or_last(
        self,
        bucket: Bucket,
        name: str,
        ask: Callable[[], Coroutine[Any, Any, T]],
        last: Callable[[], T | None],
    ) -> T:
        """What `ask` says about a name, or, where the origin does not answer, what `last` knows. What comes after that
        is taken in all the same. Raises what `ask` raises; OriginError only if nothing is known."""
        reach, began = self._reach[bucket.name], self._clock.now()
        known = last()
        if known is None:
            return await self._asked(reach, name, began, ask, last)
        is_away = reach.is_away(name, began)
        if is_away and not reach.tries(began):
            return known
        asking = asyncio.get_running_loop().create_task(ask())
        self._asking.add(asking)
        asking.add_done_callback(partial(self._ended, reach, name, began, is_away))
        if is_away:
            return known
        try:
            # Where questions have to wait for each other, that is no silence of the origin's.
            await asyncio.wait([asking], timeout=None if bucket.origin.is_limited else WAIT_S)
        except asyncio.CancelledError:
            asking.cancel()
            raise
        if not asking.done():
            reach.failed(name, began, self._clock.now())
            return known
        if isinstance(asking.exception(), OriginError):
            return known
        return asking.result()

    def removed(self, bucket: Bucket) -> None:
        """There is no such bucket any more."""
        self._reach.pop(bucket.name, None)

    async def close(self) -> None:
        """Ask no more."""
        asking = list(self._asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _asked(
        self,
        reach: Reach,
        name: str,
        began: float,
        ask: Callable[[], Coroutine[Any, Any, T]],
        last: Callable[[], T | None],
    ) -> T:
        try:
            answer = await ask()
        except OriginError:
            reach.failed(name, began, self._clock.now())
            known = last()  # somebody else may have heard something
            if known is None:
                raise
            return known
        reach.answered(began)
        return answer

    def _ended(self, reach: Reach, name: str, began: float, was_try: bool, asking: asyncio.Task[Any]) -> None:
        self._asking.discard(asking)
        if was_try:
            reach.tried()
        if asking.cancelled():
            return
        error = asking.exception()
        if error is None:
            reach.answered(began)
        elif isinstance(error, OriginError):
            reach.failed(name, began, self._clock.now())
