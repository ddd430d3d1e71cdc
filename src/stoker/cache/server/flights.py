"""Runs the single-flight core on an event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from stoker.cache.flight import Abort, Cancelled, Decision, Deliver, Failed, Fetched, FlightTable, Start, Want
from stoker.errors import CorruptBlock, OriginError, StokerError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Flights(Generic[K, V]):
    """Fetches of one kind: `fetch(key)` runs once for all who ask for a key at the same time."""

    def __init__(self, fetch: Callable[[K], Awaitable[V]]) -> None:
        self._fetch = fetch
        self._table: FlightTable[K] = FlightTable()
        self._readers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[V]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outcomes: dict[int, tuple[V | None, StokerError | None]] = {}

    def __len__(self) -> int:
        return len(self._table)

    async def get(self, key: K) -> V:
        """What the fetch brings. Raises what it raises."""
        reader = next(self._readers)
        future: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._waiting[reader] = future
        self._run(self._table.step(Want(key, reader)))
        try:
            return await future
        except asyncio.CancelledError:
            self._run(self._table.step(Cancelled(key, reader)))
            raise
        finally:
            self._waiting.pop(reader, None)

    async def close(self) -> None:
        """Stop all fetches; whoever waits is cancelled."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for future in self._waiting.values():
            future.cancel()

    def _run(self, decision: Decision[K]) -> None:
        for effect in decision.effects:
            if isinstance(effect, Start):
                self._start(effect.key, effect.fetch)
            elif isinstance(effect, Deliver):
                self._deliver(effect)
            elif isinstance(effect, Abort):
                task = self._tasks.get(effect.fetch)
                if task is not None:
                    task.cancel()

    def _start(self, key: K, fetch: int) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(key, fetch))
        self._tasks[fetch] = task
        task.add_done_callback(lambda _: self._tasks.pop(fetch, None))

    def _deliver(self, effect: Deliver[K]) -> None:
        value, error = self._outcomes[effect.fetch]
        for reader in effect.readers:
            future = self._waiting.get(reader)
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(value)  # type: ignore[arg-type]
            else:
                # A copy for each reader: an exception that is raised twice collects two tracebacks.
                future.set_exception(type(error)(*error.args))

    async def _carry_out(self, key: K, fetch: int) -> None:
        event: Fetched[K] | Failed[K]
        try:
            self._outcomes[fetch] = (await self._fetch(key), None)
            event = Fetched(key, fetch)
        except StokerError as error:
            self._outcomes[fetch] = (None, error)
            event = Failed(key, fetch, final=not isinstance(error, (OriginError, CorruptBlock)))
        except Exception as error:
            # A defect must not leave readers waiting: they are told, and the defect goes on to the loop.
            self._outcomes[fetch] = (None, OriginError(f"the cache failed: {type(error).__name__}: {error}"))
            self._run(self._table.step(Failed(key, fetch, final=True)))
            raise
        try:
            self._run(self._table.step(event))
        finally:
            del self._outcomes[fetch]
