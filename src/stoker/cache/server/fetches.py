"""Runs the single-flight core for blocks: one fetch, and everybody who wants the block reads along."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from stoker.cache.flight import Abort, Cancelled, Decision, Deliver, Failed, Fetched, FlightTable, Start, Want
from stoker.cache.server.landing import Landing
from stoker.errors import CorruptBlock, OriginError, StokerError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Ticket:
    """One reader's part in a fetch, which it leaves when it needs it no more: also after an error."""

    __slots__ = ("_leave", "error", "landing")

    def __init__(self, landing: Landing, leave: Callable[[], None]) -> None:
        self.landing = landing
        self.error: StokerError | None = None
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


class Fetches(Generic[K]):
    """`fetch(key, landing)` fills the landing from where it stands, once for all who want the block. `store(key,
    landing)` follows, and until it is done those who come read the same bytes."""

    def __init__(
        self,
        fetch: Callable[[K, Landing], Awaitable[None]],
        store: Callable[[K, Landing], Awaitable[None]],
    ) -> None:
        self._fetch = fetch
        self._store = store
        self._table: FlightTable[K] = FlightTable()
        self._readers = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._landings: dict[K, Landing] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.storing: set[asyncio.Task[None]] = set()
        self._outcomes: dict[int, StokerError | None] = {}

    def __len__(self) -> int:
        return len(self._table)

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
        self._run(self._table.step(Want(key, reader)))
        return ticket

    async def close(self) -> None:
        """Stop all fetches; whoever waits is told."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self.storing, return_exceptions=True)
        for ticket in self._tickets.values():
            ticket.error = OriginError("the cache server stops")
            ticket.landing.wake()

    def _left(self, key: K, reader: int) -> None:
        ticket = self._tickets.pop(reader, None)
        if ticket is None:
            return
        if ticket.landing.granted_bytes and self._table.readers(key) == (reader,):
            return  # it was asked for: what comes is worth more than to ask once more
        self._run(self._table.step(Cancelled(key, reader)))

    def _run(self, decision: Decision[K]) -> None:
        for effect in decision.effects:
            if isinstance(effect, Start):
                self._start(effect.key, effect.fetch)
            elif isinstance(effect, Deliver):
                self._deliver(effect)
            elif isinstance(effect, Abort):
                self._landings.pop(effect.key, None)
                task_or_none = self._tasks.get(effect.fetch)
                if task_or_none is not None:
                    task_or_none.cancel()

    def _start(self, key: K, fetch: int) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(key, fetch))
        self._tasks[fetch] = task
        task.add_done_callback(lambda _: self._tasks.pop(fetch, None))

    def _deliver(self, effect: Deliver[K]) -> None:
        error = self._outcomes[effect.fetch]
        if error is not None and self._table.leader(effect.key) is None:
            self._landings.pop(effect.key, None)
        for reader in effect.readers:
            ticket = self._tickets.pop(reader, None)
            if ticket is not None and error is not None:
                # A copy for each reader: an exception that is raised twice collects two tracebacks.
                ticket.error = type(error)(*error.args)
                ticket.landing.wake()

    async def _carry_out(self, key: K, fetch: int) -> None:
        landing = self._landings[key]
        event: Fetched[K] | Failed[K] = Fetched(key, fetch)
        error: StokerError | None = None
        try:
            await self._fetch(key, landing)
        except StokerError as raised:
            error = raised
            event = Failed(key, fetch, final=not isinstance(error, (OriginError, CorruptBlock)))
        except Exception as defect:
            # It must not leave readers waiting: they are told, and it goes on to the loop.
            error = OriginError(f"the cache failed: {type(defect).__name__}: {defect}")
            event = Failed(key, fetch, final=True)
            raise
        finally:
            if not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                self._settle(event, error, landing)

    def _settle(self, event: Fetched[K] | Failed[K], error: StokerError | None, landing: Landing) -> None:
        if error is None:
            task = asyncio.get_running_loop().create_task(self._keep(event.key, landing))
            self.storing.add(task)
            task.add_done_callback(self.storing.discard)
        self._outcomes[event.fetch] = error
        try:
            self._run(self._table.step(event))
        finally:
            del self._outcomes[event.fetch]

    async def _keep(self, key: K, landing: Landing) -> None:
        try:
            await self._store(key, landing)
        finally:
            if self._landings.get(key) is landing:
                del self._landings[key]


async def leave_all(tasks: Sequence[asyncio.Task[T]], found_in: Callable[[T], object]) -> None:
    """Nothing is wanted any more of what these tasks look for; `found_in` says what one has found."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        found = None if isinstance(result, BaseException) else found_in(result)
        if isinstance(found, Ticket):
            found.leave()
