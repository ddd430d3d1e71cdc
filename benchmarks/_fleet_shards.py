"""Simulated workers that lease dynamic shards and report them done, as fast as the master answers."""

from __future__ import annotations

import time
from collections import Counter

from _fleet import Agent, Fleet, Worker

from stoker.wire.job import Answer, Call, WorkerCall
from stoker.wire.shards import (
    DatasetRegistered,
    DatasetSpec,
    LeaseShard,
    NoMoreShards,
    RecordSplit,
    RegisterDataset,
    ReportShard,
    ShardCall,
    ShardLeased,
    ShardReported,
    decode_answer,
    encode,
)

DATASET = "bench"
SHARD_SIZE = 100
LEASE_TIMEOUT_S = 60.0


class ShardWork:
    """One dataset that all workers of a fleet work through."""

    def __init__(self, fleet: Fleet, shards: int) -> None:
        split = RecordSplit(records=shards * SHARD_SIZE, shard_size=SHARD_SIZE, shuffle=True, seed=1)
        self.spec = DatasetSpec(split, LEASE_TIMEOUT_S)
        self.shards = shards
        self.accepted: Counter[int] = Counter()
        """How often a report on each shard was accepted."""
        self.reporting: set[_Loop] = set()
        """Whose report is not answered yet: that there are no more shards may be heard before, on another stream."""
        self.unanswered: Counter[int] = Counter()
        """Reports whose worker vanished before it had an answer."""
        self.leases = 0
        self.errors: Counter[str] = Counter()
        self.began_at = self.ended_at = 0.0
        fleet.on_worker = self._on_worker

    @property
    def is_over(self) -> bool:
        """Whether a worker was told that there are no more shards, and every report is answered."""
        return self.ended_at > 0 and not self.reporting

    def _on_worker(self, agent: Agent, worker: Worker) -> None:
        self.began_at = self.began_at or time.monotonic()
        worker.calls = _Loop(self, agent, worker)

    def vanish(self, fleet: Fleet, agent: Agent) -> None:
        """An agent ends in the middle of its work."""
        for worker in agent.workers.values():
            if worker.calls in self.reporting:
                self.reporting.discard(worker.calls)
                self.unanswered[worker.calls.reported] += 1
        fleet.end(agent)

    def verdict(self) -> dict[str, int | float]:
        """What became of all shards."""
        reported = set(self.accepted) | set(self.unanswered)
        return {
            "seconds": self.ended_at - self.began_at,
            "leases": self.leases,
            "accepted twice": sum(count > 1 for count in self.accepted.values()),
            "never reported": self.shards - len(reported),
            "report unanswered": len(set(self.unanswered) - set(self.accepted)),
            "errors": sum(self.errors.values()),
        }


class _Loop:
    """One worker's calls: the next goes out when the last is answered."""

    def __init__(self, work: ShardWork, agent: Agent, worker: Worker) -> None:
        self.work, self.agent, self.worker = work, agent, worker
        self.number = 0
        self.reported = -1
        """The shard that was reported on last."""
        self._call(RegisterDataset(DATASET, work.spec))

    def _call(self, call: ShardCall) -> None:
        self.number += 1
        name = self.worker.spec.worker
        self.agent.send(WorkerCall(name, Call(self.number, "shards", encode(call))))

    def on_answer(self, answer: Answer) -> None:
        work = self.work
        if answer.number != self.number:
            return
        work.reporting.discard(self)
        if answer.error:
            work.errors[answer.error] += 1
            return
        match decode_answer(answer.body):
            case ShardLeased(shard, lease):
                work.leases += 1
                self.reported = shard.number
                work.reporting.add(self)
                self._call(ReportShard(DATASET, shard.number, lease, rewinds=shard.rewinds))
            case ShardReported(accepted, why):
                if accepted:
                    work.accepted[self.reported] += 1
                else:
                    work.errors[why] += 1
                self._call(LeaseShard(DATASET))
            case NoMoreShards():
                work.ended_at = work.ended_at or time.monotonic()
            case DatasetRegistered():
                self._call(LeaseShard(DATASET))
            case other:
                work.errors[repr(other)] += 1
