"""The port: a service that a job's workers call through their agents. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from stoker.job.events import Record
from stoker.wire.exits import Reason
from stoker.wire.job import Answer, Call, WorkerAnswer, World


class Served(NamedTuple):
    """What a service has to say since it was last asked."""

    answers: tuple[WorkerAnswer, ...] = ()
    records: Mapping[str, bytes | None] = {}
    """To be kept (None: removed) before the answers go out."""
    events: tuple[Record, ...] = ()
    """For the event log."""


class Service(Protocol):
    """One service of the master's. A call may be answered later; asked again it gets the same answer."""

    @property
    def failure(self) -> str:
        """Why the job must end; empty: it goes on."""
        ...

    @property
    def work_done(self) -> int:
        """Pieces of work that are done: progress of scripts that commit no steps."""
        ...

    def call(self, worker: str, number: int, body: bytes, now: float) -> None:
        """A worker asks. Raises StokerError for a call that cannot be."""
        ...

    def on_world(self, world: World | None, live: Iterable[str], now: float) -> None:
        """The newest world has changed, or the workers that live have."""
        ...

    def on_left(self, worker: str) -> None:
        """A member of the newest world has left it, to be in the next one."""
        ...

    def on_finished(self, worker: str) -> None:
        """A member's training function has returned, in a world that is not about to change."""
        ...

    def on_exit(self, worker: str, reason: Reason, why: str, now: float) -> None:
        """A worker has ended; `why` goes on from "it …". Not said of those that went with their node."""
        ...

    def on_tick(self, now: float) -> None:
        """Time has passed."""
        ...

    def take(self) -> Served:
        """What there is to say, once."""
        ...


class Desk:
    """Hands calls to the services and collects what they say."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self.services = dict(services)
        self._refused: list[WorkerAnswer] = []

    def call(self, worker: str, call: Call, now: float) -> None:
        """Pass a call on; one to an unknown service is refused."""
        service = self.services.get(call.service)
        if service is None:
            self.refuse(worker, call.number, f"this master has no service {call.service!r}: upgrade it")
            return
        service.call(worker, call.number, call.body, now)

    def refuse(self, worker: str, number: int, why: str) -> None:
        """The call cannot be answered."""
        self._refused.append(WorkerAnswer(worker, Answer(number=number, error=why)))

    def on_world(self, world: World | None, live: Iterable[str], now: float) -> None:
        names = list(live)
        for service in self.services.values():
            service.on_world(world, names, now)

    def on_left(self, worker: str) -> None:
        for service in self.services.values():
            service.on_left(worker)

    def on_finished(self, worker: str) -> None:
        for service in self.services.values():
            service.on_finished(worker)

    def on_exit(self, worker: str, reason: Reason, why: str, now: float) -> None:
        for service in self.services.values():
            service.on_exit(worker, reason, why, now)

    def on_tick(self, now: float) -> None:
        for service in self.services.values():
            service.on_tick(now)

    @property
    def failure(self) -> str:
        """Why the job must end; empty: it goes on."""
        return next((service.failure for service in self.services.values() if service.failure), "")

    @property
    def work_done(self) -> int:
        return sum(service.work_done for service in self.services.values())

    def take(self) -> Served:
        """All that the services have to say."""
        answers, self._refused = self._refused, []
        records: dict[str, bytes | None] = {}
        events: list[Record] = []
        for service in self.services.values():
            served = service.take()
            answers += served.answers
            records.update(served.records)
            events += served.events
        return Served(tuple(answers), records, tuple(events))
