"""Runs the single-flight core for blocks: one fetch, and everybody who wants the block reads along."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TypeVar

from stoker.cache.flight import Cancelled, Want
from stoker.cache.server.flights import FlightRunner
from stoker.cache.server.landing import Landing
from stoker.errors import OriginError, StokerError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Ticket:
    """One reader's part in a fetch, which it leaves when it needs it no more: also after an error."""

    __slots__ = ("_leave", "error", "landing", "on_over")

    def __init__(self, landing: Landing, leave: Callable[[], None]) -> None:
        self.landing = landing
        self.error: StokerError | None = None
        self.on_over: Callable[[], None] | None = None
        """Called once the fetch has ended in whatever way, if the ticket was not left before."""
        self._leave: Callable[[], None] | None = leave

    async def more(self, beyond: int) -> int:
        """How many bytes are there, as soon as they are more than `beyond`. Raises what the fetch failed with."""
        while self.landing.filled <= beyond:
            if self.error is not None:
                raise self.error
            await self.landing.changed(beyond)
        return self.landing.filled

    async def whole(self) -> memoryview | None:
        """All bytes; None if they are in the store by now. Raises what the fetch failed with."""
        if not self.landing.is_whole:
            await self.more(self.landing.size_bytes - 1)
        return None if self.landing.is_stored else self.landing.data

    def leave(self) -> None:
        """Nothing is wanted of it any more."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Fetches(FlightRunner[K, None]):
    """`fetch(key, landing)` fills the landing from where it stands, once for all who want the block. `store(key,
    landing)` follows, and until it is done those who come read the same bytes."""

    def __init__(
        self,
        fetch: Callable[[K, Landing], Awaitable[None]],
        store: Callable[[K, Landing], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._fetch = fetch
        self._store = store
        self._tickets: dict[int, Ticket] = {}
        self._landings: dict[K, Landing] = {}
        self.storing: set[asyncio.Task[None]] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._landings

    def join(self, key: K, size_bytes: int) -> Ticket:
        """Want a block of that size. The reader leaves the ticket in the end."""
        landing = self._landings.get(key)
        if landing is not None and landing.is_whole:
            return Ticket(landing, lambda: None)
        if landing is None:
            landing = self._landings[key] = Landing(size_bytes)
        reader = next(self._readers)
        ticket = self._tickets[reader] = Ticket(landing, lambda: self._left(key, reader))
        self._step(Want(key, reader))
        return ticket

    async def close(self) -> None:
        """Stop all fetches; whoever waits is told."""
        await self._end_all()
        await asyncio.gather(*self.storing, return_exceptions=True)
        for reader in list(self._tickets):
            self._tell(reader, OriginError("the cache server stops"))

    def _left(self, key: K, reader: int) -> None:
        ticket = self._tickets.pop(reader, None)
        if ticket is None:
            return
        if ticket.landing.granted_bytes and self._table.readers(key) == (reader,):
            return  # it was asked for: what comes is worth more than to ask once more
        self._step(Cancelled(key, reader))

    async def _bring(self, key: K) -> None:
        landing = self._landings[key]
        await self._fetch(key, landing)

    async def _afterwards(self, key: K) -> None:
        landing, task = self._landings[key], asyncio.current_task()
        assert task is not None
        self.storing.add(task)
        try:
            # Whoever was told of its version in this turn looks for it in the next two. They are to find it coming:
            # if it were here by then, what was fetched for them would count as a hit.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await self._store(key, landing)
        finally:
            self.storing.discard(task)
            if self._landings.get(key) is landing:
                del self._landings[key]

    def _tell(self, reader: int, outcome: StokerError | None) -> None:
        ticket = self._tickets.pop(reader, None)
        if ticket is None:
            return
        if outcome is not None:
            ticket.error = outcome
            ticket.landing.wake()
        if ticket.on_over is not None:
            ticket.on_over()

    def _given_up(self, key: K) -> None:
        self._landings.pop(key, None)


async def leave_all(tasks: Sequence[asyncio.Task[T]], found_in: Callable[[T], object]) -> None:
    """Nothing is wanted any more of what these tasks look for; `found_in` says what one has found."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        found = None if isinstance(result, BaseException) else found_in(result)
        if isinstance(found, Ticket):
            found.leave()
