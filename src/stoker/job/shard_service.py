"""Dynamic shards as one of the master's services. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from stoker.job.events import Record
from stoker.job.services import Served
from stoker.job.shards import Decision, Reply, Requeued, Shards
from stoker.wire.exits import Reason
from stoker.wire.job import Answer, WorkerAnswer, World
from stoker.wire.shards import ShardStatus, decode_call, encode

BLAMED: frozenset[Reason] = frozenset({"user-error", "crashed", "oom", "device-oom", "device-error"})
"""Ends that the records a worker was at may have brought about: these count as failures of its shards."""
LEASES_SHOWN = 1000


class Lease(NamedTuple):
    """A shard in a worker's hands."""

    number: int
    worker: str
    left_s: float
    failures: int


class ShardService:
    """The service behind `stoker.shards`. Raises WireError for records that cannot be read."""

    def __init__(self, records: Mapping[str, bytes] | None = None, now: float = 0.0) -> None:
        self.shards = Shards()
        self._answers: list[WorkerAnswer] = []
        self._records: dict[str, bytes | None] = {}
        self._events: list[Record] = []
        self._take_over(self.shards.restore(records or {}, now))

    @property
    def failure(self) -> str:
        """See the port."""
        return self.shards.failed

    @property
    def work_done(self) -> int:
        """See the port: shards of all datasets."""
        return sum(queue.done for queue in self.shards.queues.values())

    def call(self, worker: str, number: int, body: bytes, now: float) -> None:
        """See the port. Raises WireError."""
        self._take_over(self.shards.call(worker, number, decode_call(body), now))

    def on_world(self, world: World | None, live: Iterable[str], now: float) -> None:
        """Shards of workers that live no more go back."""
        for worker in sorted(self.shards.workers - set(live)):
            self._take_over(self.shards.worker_gone(worker, now, "the job goes on without it"))

    def on_left(self, worker: str) -> None:
        """See the port: it hands its shards back by itself."""

    def on_finished(self, worker: str) -> None:
        """See the port: what it holds goes back with its end."""

    def on_exit(self, worker: str, reason: Reason, why: str, now: float) -> None:
        """Its shards go back; if they may have brought the end about, that counts as a failure of each."""
        self._take_over(self.shards.worker_gone(worker, now, f"it {why}", blame=reason in BLAMED))

    def on_tick(self, now: float) -> None:
        """Leases run out."""
        self._take_over(self.shards.tick(now))

    def take(self) -> Served:
        """See the port."""
        served = Served(tuple(self._answers), self._records, tuple(self._events))
        self._answers, self._records, self._events = [], {}, []
        return served

    def leases(self, dataset: str, now: float) -> tuple[Lease, ...]:
        """Who holds which shard of a dataset, the leases that end first; of many not all."""
        queue = self.shards.queues[dataset]
        return tuple(
            Lease(number, queue.open[number].worker, max(0.0, until - now), queue.open[number].failures)
            for number, until in islice(queue.doing.items(), LEASES_SHOWN)
        )

    def status(self) -> list[ShardStatus]:
        """How far every dataset is."""
        return self.shards.status()

    def _take_over(self, decision: Decision) -> None:
        self._records.update(decision.keep)
        for effect in decision.effects:
            if isinstance(effect, Reply):
                answer = Answer(number=effect.request_id, body=encode(effect.answer))
                self._answers.append(WorkerAnswer(effect.worker, answer))
            elif isinstance(effect, Requeued):
                kind = "shard-failed" if effect.is_failure else "shard-returned"
                which = {"dataset": effect.dataset, "shard": effect.number, "failures": effect.failures}
                self._events.append(Record(kind, effect.why, which))
