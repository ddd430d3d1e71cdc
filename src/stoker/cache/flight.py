"""Single flight: of all who want the same thing, one leads the fetch and the rest join it. Pure.

`step(event)` returns the effects that the shell must carry out. A fetch belongs to the flight and not to
its leader, so a leader that goes away hands the running fetch to the next reader, whom it disturbs in
nothing. A fetch that fails is the leader's failure: the next reader is promoted and starts another, up to
`attempts_max`; a failure that will not go away by itself (`final`) is everyone's at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Want(NamedTuple, Generic[K]):
    """A reader asks for `key`. Reader numbers are never used twice."""

    key: K
    reader: int


class Fetched(NamedTuple, Generic[K]):
    """Fetch number `fetch` of `key` has brought it."""

    key: K
    fetch: int


class Failed(NamedTuple, Generic[K]):
    """Fetch number `fetch` of `key` has failed; `final` says that another try would fail alike."""

    key: K
    fetch: int
    final: bool


class Cancelled(NamedTuple, Generic[K]):
    """A reader no longer waits for `key`."""

    key: K
    reader: int


class Start(NamedTuple, Generic[K]):
    """Begin a fetch on behalf of `leader`."""

    key: K
    fetch: int
    leader: int


class Deliver(NamedTuple, Generic[K]):
    """Hand these readers the outcome of the fetch: what it brought or, if `failed`, its error."""

    key: K
    fetch: int
    readers: tuple[int, ...]
    failed: bool


class Abort(NamedTuple, Generic[K]):
    """Stop the fetch: nobody waits for it."""

    key: K
    fetch: int


class Decision(NamedTuple, Generic[K]):
    """Effects, in order, and the reason for them."""

    effects: tuple[Start[K] | Deliver[K] | Abort[K], ...]
    why: str


class _Flight:
    __slots__ = ("attempt", "fetch", "readers")

    def __init__(self, fetch: int, reader: int) -> None:
        self.fetch = fetch
        self.attempt = 1
        self.readers: dict[int, None] = {reader: None}

    @property
    def leader(self) -> int:
        return next(iter(self.readers))


class FlightTable(Generic[K]):
    """All flights of one kind."""

    def __init__(self, attempts_max: int = 3) -> None:
        self._attempts_max = attempts_max
        self._flights: dict[K, _Flight] = {}
        self._fetches = 0

    def __len__(self) -> int:
        return len(self._flights)

    def leader(self, key: K) -> int | None:
        """Who leads the flight for `key`; None if there is none."""
        flight = self._flights.get(key)
        return None if flight is None else flight.leader

    def readers(self, key: K) -> tuple[int, ...]:
        """Who waits for `key`, the leader first."""
        flight = self._flights.get(key)
        return () if flight is None else tuple(flight.readers)

    def step(self, event: Want[K] | Fetched[K] | Failed[K] | Cancelled[K]) -> Decision[K]:
        """What to do about the event. Events about fetches and readers that are no more change nothing."""
        if isinstance(event, Want):
            return self._want(event)
        flight = self._flights.get(event.key)
        if flight is None:
            return Decision((), "no flight for it")
        if isinstance(event, Cancelled):
            return self._cancelled(flight, event)
        if event.fetch != flight.fetch:
            return Decision((), "from a fetch that was replaced")
        if isinstance(event, Fetched):
            del self._flights[event.key]
            return Decision((Deliver(event.key, event.fetch, tuple(flight.readers), False),), "fetched")
        return self._failed(flight, event)

    def _want(self, event: Want[K]) -> Decision[K]:
        flight = self._flights.get(event.key)
        if flight is not None:
            flight.readers[event.reader] = None
            return Decision((), "joined")
        self._fetches += 1
        self._flights[event.key] = _Flight(self._fetches, event.reader)
        return Decision((Start(event.key, self._fetches, event.reader),), "first to ask")

    def _cancelled(self, flight: _Flight, event: Cancelled[K]) -> Decision[K]:
        if event.reader not in flight.readers:
            return Decision((), "that reader does not wait")
        led = flight.leader == event.reader
        del flight.readers[event.reader]
        if not flight.readers:
            del self._flights[event.key]
            return Decision((Abort(event.key, flight.fetch),), "the last reader left")
        return Decision((), "the next reader leads the running fetch" if led else "a follower left")

    def _failed(self, flight: _Flight, event: Failed[K]) -> Decision[K]:
        if event.final or flight.attempt >= self._attempts_max or len(flight.readers) == 1:
            del self._flights[event.key]
            why = "final" if event.final else "no reader or attempt left"
            return Decision((Deliver(event.key, event.fetch, tuple(flight.readers), True),), why)
        failed = flight.leader
        del flight.readers[failed]
        self._fetches += 1
        flight.fetch = self._fetches
        flight.attempt += 1
        return Decision(
            (Deliver(event.key, event.fetch, (failed,), True), Start(event.key, flight.fetch, flight.leader)),
            f"follower promoted, attempt {flight.attempt}",
        )
