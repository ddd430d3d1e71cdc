"""The naive twin of the core of dynamic shards: told of each call and its answer, it knows what must be true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from stoker.job.shard_queue import OTHERS_SOUGHT
from stoker.job.shard_split import StreamSplitter
from stoker.job.shards import Decision, FailJob, Reply, Requeued, Shards
from stoker.wire.shards import (
    DatasetSpec,
    ExportShards,
    ImportShards,
    LeaseShard,
    NoMoreShards,
    RecordSplit,
    ReportShard,
    Shard,
    ShardCall,
    ShardLeased,
    ShardReported,
    ShardState,
    StateLoaded,
    StreamSplit,
    encode,
)

Slot = tuple[str, int]
"""A dataset and a shard number."""
Call = tuple[str, int]
"""A worker and the number of its call."""
Record = tuple[str, int, str, int]
"""Dataset, epoch, partition, record number."""


@dataclass
class Lease:
    """A live lease."""

    holder: Call
    until: float


def expected_records(spec: DatasetSpec) -> int:
    """How many records will be done in all; a stream's are counted when they are fed."""
    split = spec.split
    if isinstance(split, StreamSplit):
        return 0
    return split.epochs * (split.records if isinstance(split, RecordSplit) else split.high - split.low)


class Model:
    """Holds everything for ever. `check` raises with the world's story."""

    def __init__(self, specs: Mapping[str, DatasetSpec], check: Callable[[bool, str], None]) -> None:
        self.specs = specs
        self.check = check
        self.totals = {name: expected_records(spec) for name, spec in specs.items()}
        self.done: set[Record] = set()
        self.leases: dict[Slot, Lease] = {}
        self.shards: dict[Slot, Shard] = {}
        self.failures: Counter[Slot] = Counter()
        self.asked: dict[Call, str] = {}
        self.reported: dict[Call, bool] = {}
        self.carried_out: set[Call] = set()
        self.checkpoints: dict[bytes, set[Record]] = {}
        self.rewinds: Counter[str] = Counter()
        self.peak = 0
        """Most leases at a time."""

    # -- what happens -------------------------------------------------------------------------------------

    def call(self, caller: Call, call: ShardCall, decision: Decision) -> None:
        """What a call must have done, told from its answer alone."""
        mine = [e.answer for e in decision.effects if isinstance(e, Reply) and e[:2] == caller]
        answer = mine[0] if mine else None
        is_first = caller not in self.carried_out
        if isinstance(call, LeaseShard):
            self.asked[caller] = call.dataset
        elif isinstance(call, ReportShard) and isinstance(answer, ShardReported):
            before = self.reported.setdefault(caller, answer.accepted)
            self.check(before == answer.accepted, f"{caller} gets another answer than before")
            if is_first:
                self.report(caller[0], call, accepted=answer.accepted)
        elif isinstance(call, ExportShards) and isinstance(answer, ShardState):
            done = self.done_of(call.dataset)
            self.check(
                self.checkpoints.setdefault(encode(answer), done) == done, "one state for two progresses"
            )
        elif isinstance(call, ImportShards) and is_first:
            self.check(isinstance(answer, StateLoaded), f"a state is refused: {answer}")
            self.rewind(call.state)
        else:
            self.check(not isinstance(call, ReportShard), f"a report is answered with {answer}")
        if isinstance(call, ReportShard | ImportShards):
            self.carried_out.add(caller)

    def report(self, worker: str, call: ReportShard, *, accepted: bool) -> None:
        slot, holder = (call.dataset, call.number), (worker, call.lease)
        lease = self.leases.get(slot)
        if accepted:
            current = call.rewinds == self.rewinds[call.dataset]
            self.check(current, f"{call} is about what has been put back since")
        if accepted and call.outcome == "done":
            self.leases.pop(slot, None)
            self.failures.pop(slot, None)
            shard = self.shards[slot]
            for record in range(shard.start, shard.stop):
                key = (call.dataset, shard.epoch, shard.partition, record)
                self.check(key not in self.done, f"{key} is done twice")
                self.done.add(key)
        elif accepted:
            self.check(lease is not None and lease.holder == holder, f"{slot} goes back without a lease")
            self.end_lease(slot, failed=call.outcome == "failed")
        # The worker has had its answer to that call: whatever else was given to it goes back.
        for other in [slot for slot, lease in self.leases.items() if lease.holder == holder]:
            self.end_lease(other, failed=False)

    def end_lease(self, slot: Slot, *, failed: bool) -> None:
        del self.leases[slot]
        self.failures[slot] += failed

    def worker_gone(self, worker: str, *, blame: bool) -> None:
        for slot in [slot for slot, lease in self.leases.items() if lease.holder[0] == worker]:
            self.end_lease(slot, failed=blame)

    def tick(self, now: float) -> None:
        for slot in [slot for slot, lease in self.leases.items() if lease.until <= now]:
            self.end_lease(slot, failed=True)

    def master_restarted(self, now: float) -> None:
        for (dataset, _), lease in self.leases.items():
            lease.until = now + self.specs[dataset].lease_timeout_s

    def rewind(self, state: ShardState) -> None:
        self.rewinds[state.dataset] += 1
        self.done -= self.done_of(state.dataset)
        self.done |= self.checkpoints[encode(state)]
        for slots in (self.leases, self.failures):
            for slot in [slot for slot in slots if slot[0] == state.dataset]:
                del slots[slot]

    # -- what is said -------------------------------------------------------------------------------------

    def observe(self, decision: Decision, now: float) -> None:
        """Compare the effects of a decision with what must be true after it."""
        for effect in decision.effects:
            if isinstance(effect, Reply) and isinstance(effect.answer, ShardLeased):
                self.check(effect.answer.lease == effect.request_id, f"{effect} names another call")
                self.granted((effect.worker, effect.request_id), effect.answer.shard, now)
            elif isinstance(effect, Reply) and isinstance(effect.answer, NoMoreShards):
                dataset = self.asked[effect[:2]]
                self.check(self.is_complete(dataset), f"{dataset} is said to be finished")
            elif isinstance(effect, Requeued):
                slot = (effect.dataset, effect.number)
                self.check(effect.failures == self.failures[slot], f"{slot}: {effect} is counted wrongly")
            elif isinstance(effect, FailJob):
                self.check(self.is_exhausted((effect.dataset, effect.number)), f"{effect} too early")
                name = f"shard {effect.number} of dataset {effect.dataset!r}"
                says = name in effect.why and "last with: " in effect.why
                self.check(says, f"{effect} does not say what failed")

    def granted(self, holder: Call, shard: Shard, now: float) -> None:
        slot = (self.asked[holder], shard.number)
        live = self.leases.get(slot)
        if live is None:
            self.leases[slot] = Lease(holder, now + self.specs[slot[0]].lease_timeout_s)
            self.shards[slot] = shard
            self.peak = max(self.peak, len(self.leases))
        else:
            self.check(live.holder == holder, f"{slot} is leased to {live} and to {holder}")
            self.check(self.shards[slot] == shard, f"{slot} has changed in the hands of {holder}")

    def compare(self, core: Shards, kept: Mapping[str, bytes], known: AbstractSet[str]) -> None:
        """The core holds the same leases, and neither it nor the journal anything that is over."""
        doing = {(name, number) for name, queue in core.queues.items() for number in queue.doing}
        self.check(doing == self.leases.keys(), f"leases: the core has {doing}, the model {self.leases}")
        room = len(core.workers)
        for name, queue in core.queues.items():
            again = len(queue.todo_again)
            self.check(len(queue.open) == len(queue.doing) + again, f"{name}: open shards drift")
            self.check(again <= self.peak + OTHERS_SOUGHT, f"{name}: {again} shards are todo again")
            partitions = queue.splitter.partitions if isinstance(queue.splitter, StreamSplitter) else {}
            room += 2 + len(queue.open) + len(partitions)
        self.check(len(kept) <= room, f"{len(kept)} records are kept where {room} would do")
        self.check(core.workers <= known, f"the dead are remembered: {core.workers - known}")

    def compare_twin(self, core: Shards, kept: Mapping[str, bytes], now: float) -> None:
        """A master that started from the records would know the same."""
        twin = Shards()
        twin.restore(kept, now)
        for name, queue in core.queues.items():
            other = twin.queues[name]
            self.check(other.state() == queue.state(), f"{name}: the records are of another state")
            self.check(other.doing.keys() == queue.doing.keys(), f"{name}: the records have other leases")

    # -- questions ----------------------------------------------------------------------------------------

    def done_of(self, dataset: str) -> set[Record]:
        return {record for record in self.done if record[0] == dataset}

    def is_complete(self, dataset: str) -> bool:
        return len(self.done_of(dataset)) == self.totals[dataset]

    def is_exhausted(self, slot: Slot) -> bool:
        return self.failures[slot] >= self.specs[slot[0]].max_failures

    def has_failed(self) -> bool:
        return any(self.is_exhausted(slot) for slot in list(self.failures))
