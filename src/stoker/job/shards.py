"""Dynamic shards: which worker works on which records, when nobody knows beforehand how fast each of them is. PURE.

A shard goes todo → doing → done. Workers lease shards; one whose lease times out, whose worker is gone, or that was
handed back, is todo again and comes next. One that keeps failing fails the job; none is ever dropped. The first report
that a shard is done counts, whoever makes it.

Each entry point returns a `Decision`. Its records are to be kept, all or none, before its effects are carried out; then
a master that dies at any point goes on from the records (`restore`), and workers keep their leases. A call that is
repeated with its number does its work once, also over a restart. Calls that wait are not kept: who waits asks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from stoker.errors import ConfigError
from stoker.job.shard_queue import Changes, ShardQueue
from stoker.job.shard_records import SpecRecord, decode_records, worker_key
from stoker.job.shard_requests import WorkerCalls
from stoker.job.shard_split import StreamSplitter, check_dataset
from stoker.wire.shards import (
    AddRecords,
    CommitShards,
    DatasetRegistered,
    EndStream,
    ExportShards,
    GetShardStatus,
    ImportShards,
    LeaseShard,
    NoMoreShards,
    RegisterDataset,
    ReportShard,
    ShardAnswer,
    ShardCall,
    ShardLeased,
    ShardRefused,
    ShardReported,
    ShardsCommitted,
    ShardStatus,
    StateLoaded,
    StreamEnded,
    StreamExtended,
)

DATASETS_MAX = 1000
OPEN_CALLS_MAX = 1024
"""Shards that one worker may hold or wait for at a time."""


class Reply(NamedTuple):
    """Answer a worker's call."""

    worker: str
    request_id: int
    answer: ShardAnswer


class Requeued(NamedTuple):
    """A shard is todo again: for the event log."""

    dataset: str
    number: int
    failures: int
    why: str
    is_failure: bool = False
    """This time it counts as one."""


class FailJob(NamedTuple):
    """End the job: a shard keeps failing."""

    dataset: str
    number: int
    why: str


Effect = Reply | Requeued | FailJob


class Decision(NamedTuple):
    """What to keep (None: remove the record), then what to do, and why."""

    keep: tuple[tuple[str, bytes | None], ...]
    effects: tuple[Effect, ...]
    why: str


class Shards:
    """All datasets of one job. `now` is in seconds and never goes back."""

    def __init__(self) -> None:
        self.queues: dict[str, ShardQueue] = {}
        self.failed = ""
        """Why a shard has failed the job; empty: none has."""
        self._workers: dict[str, WorkerCalls] = {}
        self._changes: Changes = {}
        self._effects: list[Effect] = []

    # -- entry points -------------------------------------------------------------------------------------

    def call(self, worker: str, request_id: int, call: ShardCall, now: float) -> Decision:
        """A worker asks. Numbers of its calls go up; a repeated call has its old number. The answer is among the
        effects, or comes with a later decision."""
        try:
            match call:
                case LeaseShard():
                    why = self._lease(worker, request_id, call, now)
                case ReportShard():
                    why = self._report(worker, request_id, call, now)
                case CommitShards():
                    why = self._commit(worker, request_id, call, now)
                case RegisterDataset():
                    why = self._register(worker, request_id, call)
                case AddRecords() | EndStream():
                    why = self._extend(worker, request_id, call, now)
                case GetShardStatus(dataset):
                    why = self._reply(worker, request_id, self._queue(dataset).status(), "status")
                case ExportShards(dataset):
                    why = self._reply(worker, request_id, self._queue(dataset).state(), "state")
                case ImportShards():
                    why = self._import(worker, request_id, call, now)
        except ConfigError as error:
            why = self._reply(worker, request_id, ShardRefused(str(error)), f"refused: {error}")
        return self._decide(why)

    def worker_gone(self, worker: str, now: float, why: str, *, blame: bool = False) -> Decision:
        """A worker has ended, well or not: its shards go back. `blame` counts that as a failure of each of them, for a
        worker that ended by its script's doing (and not because its node was taken away, say)."""
        calls = self._workers.pop(worker, None)
        if calls is None:
            return self._decide(f"{worker} held nothing")
        self._changes[worker_key(worker)] = None
        for request_id, dataset in calls.waiting.items():
            del self.queues[dataset].waiting[worker, request_id]
        for dataset, number in calls.leases.values():
            self._requeue(self.queues[dataset], number, f"{worker} is gone: {why}", is_failure=blame)
        for dataset in dict.fromkeys(dataset for dataset, _ in calls.leases.values()):
            self._serve_waiting(self.queues[dataset], now)
        return self._decide(f"{worker} is gone: {len(calls.leases)} shards go back")

    def tick(self, now: float) -> Decision:
        """Take back the leases whose time is over."""
        count = 0
        for queue in self.queues.values():
            expired = queue.expired(now)
            for number in expired:
                entry = queue.open[number]
                del self._workers[entry.worker].leases[entry.request]
                reason = (
                    f"{entry.worker} did not finish it within {queue.spec.lease_timeout_s:g} s; if shards take that "
                    "long, raise lease_timeout_s or make shard_size smaller"
                )
                self._requeue(queue, number, reason, is_failure=True)
            if expired:
                count += len(expired)
                self._serve_waiting(queue, now)
        return self._decide(f"{count} leases timed out")

    def restore(self, records: Mapping[str, bytes], now: float) -> Decision:
        """Go on from what a former master kept; records of other services are passed over. Every lease is given its
        whole time again. Raises WireError for a record that cannot be read."""
        remembered = decode_records(records)
        self._workers = {worker: WorkerCalls(record) for worker, record in remembered.workers.items()}
        for dataset, kept in remembered.datasets.items():
            queue = self.queues[dataset] = ShardQueue(dataset, kept.spec, self._changes)
            queue.restore(kept, now)
            for number, entry in queue.open.items():
                if entry.worker:
                    self._calls(entry.worker).leases[entry.request] = (dataset, number)
                elif queue.has_failed(entry) and not self.failed:
                    self._fail(queue, number)
        return self._decide(f"{len(self.queues)} datasets restored")

    # -- for the shell ------------------------------------------------------------------------------------

    @property
    def workers(self) -> frozenset[str]:
        """Workers of whom something is known: after a restart, those that are not there any more are `worker_gone`."""
        return frozenset(self._workers)

    def next_deadline(self) -> float | None:
        """When the first lease will time out."""
        firsts = (next(iter(queue.doing.values()), None) for queue in self.queues.values())
        return min((first for first in firsts if first is not None), default=None)

    def status(self) -> list[ShardStatus]:
        """How far every dataset is."""
        return [queue.status() for queue in self.queues.values()]

    # -- calls --------------------------------------------------------------------------------------------

    def _lease(self, worker: str, request_id: int, call: LeaseShard, now: float) -> str:
        calls = self._calls(worker)
        queue = self._queue(call.dataset)
        queue.is_handed(worker, calls.handed(call), now)
        self._serve_waiting(queue, now)
        held = calls.leases.get(request_id)
        if held is not None:
            shard = self.queues[held[0]].open[held[1]].shard
            why = f"{worker} holds shard {held[1]} already"
            return self._reply(worker, request_id, ShardLeased(shard, request_id), why)
        if request_id in calls.waiting:
            return f"{worker} waits already"
        if self.failed:
            return self._refuse(worker, request_id)
        if queue.is_over:
            return self._reply(worker, request_id, NoMoreShards(), f"{queue.name} is finished")
        if request_id in calls.answered:
            raise ConfigError(
                f"call {request_id} of {worker} was answered, and its shard reported on, before"
            )
        if calls.open >= OPEN_CALLS_MAX:
            raise ConfigError(
                f"{worker} holds or waits for {calls.open} shards: report on them before it leases more"
            )
        if queue.is_dry:
            queue.waiting[worker, request_id] = None
            calls.waiting[request_id] = queue.name
            return f"{worker} waits for a shard of {queue.name}: {len(queue.doing)} are being worked on"
        return self._grant(queue, calls, worker, request_id, now)

    def _grant(self, queue: ShardQueue, calls: WorkerCalls, worker: str, request_id: int, now: float) -> str:
        shard = queue.lease(worker, request_id, now)
        assert shard is not None
        calls.leases[request_id] = (queue.name, shard.number)
        why = f"{worker} leases shard {shard.number} of {queue.name}"
        return self._reply(worker, request_id, ShardLeased(shard, request_id), why)

    def _report(self, worker: str, request_id: int, call: ReportShard, now: float) -> str:
        calls = self._calls(worker)
        if request_id in calls.answered:
            again = ShardReported(request_id not in calls.refused, "reported before")
            return self._reply(worker, request_id, again, f"{worker} repeats its report")
        queue = self._queue(call.dataset)
        accepted, why = queue.judge(worker, call)
        if accepted:
            entry = queue.open[call.number]
            if entry.worker:
                del self._workers[entry.worker].leases[entry.request]
            if call.outcome == "done":
                queue.finish(call.number)
            else:
                self._requeue(queue, call.number, call.reason or why, is_failure=call.outcome == "failed")
        self._settle(worker, calls, call.lease, now)
        self._is_over(worker, calls, request_id, accepted=accepted)
        self._reply(worker, request_id, ShardReported(accepted, why), why)
        self._serve_waiting(queue, now)
        return why

    def _commit(self, worker: str, request_id: int, call: CommitShards, now: float) -> str:
        calls = self._calls(worker)
        queue, why = self._queue(call.dataset), ""
        if request_id not in calls.answered:
            finished, why = queue.commit(worker, call.marks, now)
            calls.are_done(mark.lease for mark in finished)
            self._is_over(worker, calls, request_id, accepted=not why)
        elif request_id in calls.refused:
            why = "it was refused before"
        self._reply(worker, request_id, ShardsCommitted(queue.state(), why), why)
        self._serve_waiting(queue, now)
        return why or f"{worker} commits {len(call.marks)} shards of {queue.name}"

    def _settle(self, worker: str, calls: WorkerCalls, lease: int, now: float) -> None:
        """The worker has had an answer to this lease call. Had that one timed out and the call been repeated, then it
        waits or holds another shard by now, of which the worker will not take notice."""
        calls.answered.add(lease)
        waits_for = calls.waiting.pop(lease, None)
        if waits_for is not None:
            del self.queues[waits_for].waiting[worker, lease]
        held = calls.leases.pop(lease, None)
        if held is not None:
            queue = self.queues[held[0]]
            self._requeue(queue, held[1], f"{worker} went on with another shard", is_failure=False)
            self._serve_waiting(queue, now)

    def _register(self, worker: str, request_id: int, call: RegisterDataset) -> str:
        known = self.queues.get(call.dataset)
        if known is None:
            check_dataset(call.dataset, call.spec)
            if len(self.queues) >= DATASETS_MAX:
                raise ConfigError(
                    f"a job has at most {DATASETS_MAX} datasets: {call.dataset!r} is one too many"
                )
            known = ShardQueue(call.dataset, SpecRecord(call.spec, worker), self._changes)
            self.queues[call.dataset] = known
            known.keep_spec()
        elif known.spec != call.spec:
            raise ConfigError(
                f"dataset {call.dataset!r} was registered by {known.registered_by} as {known.spec}, but {worker} says "
                f"{call.spec}: every worker must describe it alike, or give it a name of its own"
            )
        answer = DatasetRegistered(known.splitter.total)
        return self._reply(worker, request_id, answer, f"{worker} registers {call.dataset}")

    def _extend(self, worker: str, request_id: int, call: AddRecords | EndStream, now: float) -> str:
        queue = self._queue(call.dataset)
        splitter = queue.splitter
        if not isinstance(splitter, StreamSplitter):
            raise ConfigError(
                f"dataset {queue.name!r} is no stream: only a stream's records arrive while it runs"
            )
        if isinstance(call, AddRecords):
            news = splitter.add(call.partition, call.start, call.stop)
            if news is not None:
                queue.keep_partition(news)
            answer: ShardAnswer = StreamExtended(splitter.partitions[call.partition].end)
        else:
            if not splitter.ended:
                splitter.ended = True
                queue.keep_progress()
            answer = StreamEnded()
        self._reply(worker, request_id, answer, "")
        self._serve_waiting(queue, now)
        return f"{worker} extends or ends {queue.name}"

    def _import(self, worker: str, request_id: int, call: ImportShards, now: float) -> str:
        calls = self._calls(worker)
        queue = self._queue(call.state.dataset)
        if request_id not in calls.answered:
            if self.failed:
                return self._refuse(worker, request_id)
            leases = [queue.open[number] for number in queue.doing]
            if not (call.only_new and (queue.handed_out or queue.rewinds)):
                queue.load_state(call.state)
                for entry in leases:
                    del self._workers[entry.worker].leases[entry.request]
            self._is_over(worker, calls, request_id)
        self._reply(worker, request_id, StateLoaded(), "")
        self._serve_waiting(queue, now)
        return f"{worker} puts {queue.name} back to shard {queue.handed_out}"

    def _requeue(self, queue: ShardQueue, number: int, why: str, *, is_failure: bool) -> None:
        entry = queue.give_back(number, why if is_failure else "")
        self._effects.append(Requeued(queue.name, number, entry.failures, why, is_failure))
        if is_failure and queue.has_failed(entry) and not self.failed:
            self._fail(queue, number)

    def _fail(self, queue: ShardQueue, number: int) -> None:
        entry = queue.open[number]
        shard = entry.shard
        where = f"partition {shard.partition!r}, " if shard.partition else ""
        self.failed = (
            f"shard {number} of dataset {queue.name!r} ({where}records [{shard.start}, {shard.stop}) of epoch "
            f"{shard.epoch}) failed {entry.failures} times, last with: {entry.error}"
        )
        self._effects.append(FailJob(queue.name, number, self.failed))

    def _serve_waiting(self, queue: ShardQueue, now: float) -> None:
        """Answer those who wait, if they need not any more."""
        if self.failed:
            for each in self.queues.values():
                self._answer_all(each, ShardRefused(self.failed, job_failed=True))
        while queue.waiting and not queue.is_dry:
            (worker, request_id), _ = queue.waiting.popitem(last=False)
            calls = self._workers[worker]
            del calls.waiting[request_id]
            self._grant(queue, calls, worker, request_id, now)
        if queue.waiting and queue.is_over:
            self._answer_all(queue, NoMoreShards())

    def _answer_all(self, queue: ShardQueue, answer: ShardAnswer) -> None:
        while queue.waiting:
            (worker, request_id), _ = queue.waiting.popitem(last=False)
            del self._workers[worker].waiting[request_id]
            self._reply(worker, request_id, answer, "")

    def _is_over(self, worker: str, calls: WorkerCalls, request_id: int, *, accepted: bool = True) -> None:
        calls.is_over(request_id, accepted=accepted)
        self._changes[worker_key(worker)] = msgspec.msgpack.encode(calls.record())

    def _reply(self, worker: str, request_id: int, answer: ShardAnswer, why: str) -> str:
        self._effects.append(Reply(worker, request_id, answer))
        return why

    def _refuse(self, worker: str, request_id: int) -> str:
        return self._reply(worker, request_id, ShardRefused(self.failed, job_failed=True), self.failed)

    def _decide(self, why: str) -> Decision:
        decision = Decision(tuple(self._changes.items()), tuple(self._effects), why)
        self._changes.clear()
        self._effects.clear()
        return decision

    def _calls(self, worker: str) -> WorkerCalls:
        calls = self._workers.get(worker)
        if calls is None:
            calls = self._workers[worker] = WorkerCalls()
        return calls

    def _queue(self, dataset: str) -> ShardQueue:
        queue = self.queues.get(dataset)
        if queue is None:
            known = ", ".join(sorted(self.queues)[:20]) or "none"
            raise ConfigError(
                f"there is no dataset {dataset[:80]!r}: register it first (registered: {known})"
            )
        return queue
