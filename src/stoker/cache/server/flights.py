"""Runs the single-flight core on an event loop."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from stoker.cache.flight import Abort, Cancelled, Deliver, Failed, Fetched, FlightTable, Start, Want
from stoker.errors import CorruptBlock, OriginError, StokerError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class FlightRunner(ABC, Generic[K, V]):
    """Carries out what the table decides. What a fetch does, and who hears of it how, is for those who build on it."""

    def __init__(self) -> None:
        self._table: FlightTable[K] = FlightTable()
        self._readers = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._table)

    @abstractmethod
    async def _bring(self, key: K) -> V:
        """Fetch it."""

    @abstractmethod
    def _tell(self, reader: int, outcome: V | StokerError) -> None:
        """What a reader waited for; an error is the reader's own."""

    def _given_up(self, key: K) -> None:
        """Nobody waits for it any more."""

    async def _afterwards(self, key: K) -> None:
        """What is still to be done about what was fetched, once all who waited were told. It is not cancelled."""

    def _step(
        self, event: Want[K] | Cancelled[K] | Fetched[K] | Failed[K], outcome: V | StokerError | None = None
    ) -> None:
        for effect in self._table.step(event).effects:
            if isinstance(effect, Start):
                self._start(effect.key, effect.fetch)
            elif isinstance(effect, Deliver):
                self._deliver(effect, outcome)  # type: ignore[arg-type]  # of a fetch that has come to its end
            elif isinstance(effect, Abort):
                self._given_up(effect.key)
                task = self._tasks.get(effect.fetch)
                if task is not None:
                    task.cancel()

    def _deliver(self, effect: Deliver[K], outcome: V | StokerError) -> None:
        for reader in effect.readers:
            # A copy for each: an exception that is raised twice collects two tracebacks.
            copy = type(outcome)(*outcome.args) if isinstance(outcome, StokerError) else outcome
            self._tell(reader, copy)
        if effect.failed and self._table.leader(effect.key) is None:
            self._given_up(effect.key)

    async def _end_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: K, fetch: int) -> None:
        task = self._tasks[fetch] = asyncio.get_running_loop().create_task(self._carry_out(key, fetch))
        task.add_done_callback(lambda _: self._tasks.pop(fetch, None))

    async def _carry_out(self, key: K, fetch: int) -> None:
        if await self._fetch_once(key, fetch):
            # The same task goes on, for a new one costs as much as all that is decided here; nobody ends it now.
            self._tasks.pop(fetch, None)
            await self._afterwards(key)

    async def _fetch_once(self, key: K, fetch: int) -> bool:
        """Whether it was fetched."""
        event: Fetched[K] | Failed[K] = Fetched(key, fetch)
        outcome: V | StokerError
        try:
            outcome = await self._bring(key)
        except StokerError as error:
            outcome = error
            event = Failed(key, fetch, final=not isinstance(error, (OriginError, CorruptBlock)))
        except Exception as defect:
            # It must not leave readers waiting: they are told, and it goes on to the loop.
            told = OriginError(f"the cache failed: {type(defect).__name__}: {defect}")
            self._step(Failed(key, fetch, final=True), told)
            raise
        self._step(event, outcome)
        return isinstance(event, Fetched)


class Flights(FlightRunner[K, V]):
    """Fetches of one kind: `fetch(key)` runs once for all who ask for a key at the same time."""

    def __init__(self, fetch: Callable[[K], Awaitable[V]]) -> None:
        super().__init__()
        self._fetch = fetch
        self._waiting: dict[int, asyncio.Future[V]] = {}

    async def get(self, key: K) -> V:
        """What the fetch brings. Raises what it raises."""
        reader = next(self._readers)
        future: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._waiting[reader] = future
        self._step(Want(key, reader))
        try:
            return await future
        except asyncio.CancelledError:
            self._step(Cancelled(key, reader))
            raise
        finally:
            self._waiting.pop(reader, None)

    async def close(self) -> None:
        """Stop all fetches; whoever waits is cancelled."""
        await self._end_all()
        for future in self._waiting.values():
            future.cancel()

    async def _bring(self, key: K) -> V:
        return await self._fetch(key)

    def _tell(self, reader: int, outcome: V | StokerError) -> None:
        future = self._waiting.get(reader)
        if future is None or future.done():
            return
        if isinstance(outcome, StokerError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
