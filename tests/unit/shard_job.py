"""The core of dynamic shards with a journal, a clock and the numbers of everybody's calls, for tests."""

from __future__ import annotations

from typing import TypeVar

from stoker.job.shards import Decision, FailJob, Reply, Shards
from stoker.wire.shards import (
    DatasetRegistered,
    DatasetSpec,
    ExportShards,
    GetShardStatus,
    LeaseShard,
    Outcome,
    RecordSplit,
    RegisterDataset,
    ReportShard,
    Shard,
    ShardAnswer,
    ShardCall,
    ShardLeased,
    ShardMessage,
    ShardReported,
    ShardState,
    ShardStatus,
    Split,
    decode_answer,
    decode_call,
    encode,
)

A = TypeVar("A", bound=ShardMessage)
TIMEOUT_S = 30.0


class Job:
    """One job; its records are all that survives `restart`."""

    def __init__(self, split: Split | None = None, *, max_failures: int = 3) -> None:
        self.core = Shards()
        self.records: dict[str, bytes] = {}
        self.now = 100.0
        self.calls: dict[str, int] = {}
        self.replies: dict[tuple[str, int], ShardAnswer] = {}
        self.decision = Decision((), (), "")
        self.spec = DatasetSpec(split or RecordSplit(30, 10), TIMEOUT_S, max_failures)
        self.get(DatasetRegistered, "w0", RegisterDataset("train", self.spec))

    def take(self, decision: Decision) -> Decision:
        self.decision = decision
        for key, value in decision.keep:
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = value
        for effect in decision.effects:
            if isinstance(effect, Reply):
                self.replies[effect.worker, effect.request_id] = decode_answer(encode(effect.answer))
        return decision

    def ask(self, worker: str, call: ShardCall, number: int = 0) -> ShardAnswer | None:
        if not number:
            number = self.calls[worker] = self.calls.get(worker, 0) + 1
        self.replies.pop((worker, number), None)
        self.take(self.core.call(worker, number, decode_call(encode(call)), self.now))
        return self.replies.get((worker, number))

    def get(self, expected: type[A], worker: str, call: ShardCall, number: int = 0) -> A:
        answer = self.ask(worker, call, number)
        assert isinstance(answer, expected), answer
        return answer

    def lease(self, worker: str) -> Shard:
        return self.get(ShardLeased, worker, LeaseShard("train")).shard

    def wait(self, worker: str) -> int:
        assert self.ask(worker, LeaseShard("train")) is None
        return self.calls[worker]

    def report(
        self, worker: str, shard: Shard, outcome: Outcome = "done", reason: str = "", lease: int = 0
    ) -> ShardReported:
        holds = [n for (w, n), a in self.replies.items() if w == worker and a == ShardLeased(shard, n)]
        lease = lease or max(holds, default=0)
        call = ReportShard("train", shard.number, lease, outcome, reason, shard.rewinds)
        return self.get(ShardReported, worker, call)

    def status(self) -> ShardStatus:
        return self.get(ShardStatus, "w0", GetShardStatus("train"))

    def state(self) -> ShardState:
        return self.get(ShardState, "w0", ExportShards("train"))

    def tick(self, seconds: float) -> Decision:
        self.now += seconds
        return self.take(self.core.tick(self.now))

    def gone(self, worker: str, *, blame: bool = False) -> Decision:
        return self.take(self.core.worker_gone(worker, self.now, "killed by signal 9", blame=blame))

    def restart(self) -> Decision:
        self.core = Shards()
        return self.take(self.core.restore(self.records, self.now))

    def failure(self) -> str:
        return next(effect.why for effect in self.decision.effects if isinstance(effect, FailJob))
