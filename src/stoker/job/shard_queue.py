"""One dataset's shards: todo → doing → done. PURE.

Shards are handed out in the order of their numbers. Those with a number below `handed_out` are done, but for the *open*
ones: leased, or gone back to todo. So what is held and kept grows with the shards in flight, never with the dataset.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

import msgspec

from stoker.errors import ConfigError
from stoker.job.shard_records import DatasetRecords, OpenRecord, ProgressRecord, SpecRecord, dataset_key
from stoker.job.shard_split import PARTITIONS_MAX, RangeSplitter, StreamSplitter, is_partition, splitter_for
from stoker.wire.shards import Mark, ReportShard, Shard, ShardState, ShardStatus, StreamPartition, StreamSplit

OTHERS_SOUGHT = 16
"""How many shards that went back are looked at to find one that this worker has not failed at."""
REASON_CHARS_MAX = 4000
Changes = dict[str, bytes | None]


class ShardQueue:
    """The shards of one dataset. Every move adds the records it changes to `changes`."""

    def __init__(self, name: str, record: SpecRecord, changes: Changes) -> None:
        self.name = name
        self.spec = record.spec
        self.registered_by = record.worker
        self.splitter = splitter_for(record.spec.split)
        self.handed_out = 0
        self.rewinds = 0
        self.is_restored = False
        """A master before this one has handed shards out, perhaps more than it could keep."""
        self.open: dict[int, OpenRecord] = {}
        self.doing: dict[int, float] = {}
        """Leased shards and when their leases end, the earliest first: all of a dataset's are equally long."""
        self.handed: set[int] = set()
        """Of those, the ones whose records are all with their worker's training loop."""
        self.todo_again: OrderedDict[int, None] = OrderedDict()
        self.waiting: OrderedDict[tuple[str, int], None] = OrderedDict()
        """Lease calls that wait: worker and number of the call."""
        self._changes = changes
        self._kept_handed_out = 0

    # -- what there is ------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        return not self.open and self.splitter.is_over(self.handed_out)

    @property
    def is_over(self) -> bool:
        """Whether nobody needs another shard, as far as one can know: those that are not done are read already."""
        return len(self.handed) == len(self.open) and self.splitter.is_over(self.handed_out)

    @property
    def is_dry(self) -> bool:
        """Whether a lease would have to wait."""
        return not self.todo_again and self.splitter.is_dry(self.handed_out)

    @property
    def done(self) -> int:
        return self.handed_out - len(self.open)

    def status(self) -> ShardStatus:
        left = self.splitter.left(self.handed_out)
        return ShardStatus(
            dataset=self.name,
            total=self.splitter.total,
            done=self.done,
            doing=len(self.doing),
            todo=left + len(self.todo_again),
            waiting=len(self.waiting),
            failures=sum(entry.failures for entry in self.open.values()),
            epoch=self.splitter.epoch_of(self.handed_out),
            is_finished=self.is_finished,
        )

    # -- moves --------------------------------------------------------------------------------------------

    def lease(self, worker: str, request: int, now: float) -> Shard | None:
        """A shard for a worker, those that have gone back first; None if it has to wait."""
        number = self._again(worker)
        if number is None:
            if self.splitter.is_dry(self.handed_out):
                return None
            shard = self.splitter.cut(self.handed_out, self.rewinds)
            number = self.handed_out
            self.handed_out += 1
            entry = OpenRecord(shard, worker, request)
            if isinstance(self.splitter, StreamSplitter):
                self.keep_partition(self.splitter.partitions[shard.partition])
        else:
            del self.todo_again[number]
            old = self.open[number]
            shard = old.shard
            entry = OpenRecord(shard, worker, request, old.failures, old.error, old.failed_by)
        self._put(number, entry)
        self.doing[number] = now + self.spec.lease_timeout_s
        return shard

    def finish(self, number: int) -> None:
        """A shard is done, whoever holds it."""
        if number >= self._kept_handed_out:
            self.keep_progress()
        del self.open[number]
        self.doing.pop(number, None)
        self.handed.discard(number)
        self.todo_again.pop(number, None)
        self._changes[dataset_key(self.name, "open", number)] = None

    def give_back(self, number: int, failure: str = "") -> OpenRecord:
        """A leased shard is todo again; `failure` says why, if that counts as one."""
        del self.doing[number]
        self.handed.discard(number)
        old = self.open[number]
        if failure:
            error = failure[-REASON_CHARS_MAX:]
            entry = OpenRecord(old.shard, failures=old.failures + 1, error=error, failed_by=old.worker)
        else:
            entry = OpenRecord(old.shard, failures=old.failures, error=old.error, failed_by=old.failed_by)
        self._put(number, entry)
        self.todo_again[number] = None
        return entry

    def is_handed(self, worker: str, numbers: Iterable[int] | None, now: float) -> None:
        """A worker's training loop has all records of those shards, of no others, and does not hold them up. None:
        nothing new is known of it."""
        if numbers is None:
            return
        self.handed -= {number for number in self.handed if self.open[number].worker == worker}
        for number in numbers:
            if number in self.doing and self.open[number].worker == worker:
                self.handed.add(number)
                self._renew(number, now)

    def commit(self, worker: str, marks: tuple[Mark, ...], now: float) -> tuple[list[Mark], str]:
        """Records count from now on: the marks of shards that are done with it. Where a lease is over nothing changes,
        and why is said. Raises ConfigError for what cannot have been read."""
        for mark in marks:
            entry = self.open.get(mark.number)
            held = entry is not None and (entry.worker, entry.request) == (worker, mark.lease)
            if entry is None or not held or mark.rewinds != self.rewinds:
                return [], f"shard {mark.number} of {self.name} is not leased by {worker} any more"
            if not entry.shard.read <= mark.read <= entry.shard.stop - entry.shard.start:
                raise ConfigError(f"shard {mark.number} of {self.name} cannot be read up to {mark.read}")
        finished = [mark for mark in marks if _is_whole(self.open[mark.number].shard, mark)]
        for mark in marks:
            if mark in finished:
                self.finish(mark.number)
            else:
                entry = self.open[mark.number]
                shard = msgspec.structs.replace(entry.shard, read=mark.read)
                self._put(mark.number, msgspec.structs.replace(entry, shard=shard))
                self._renew(mark.number, now)
        return finished, ""

    def expired(self, now: float) -> list[int]:
        """Leases whose time is over. Those of shards that are read begin anew: their worker waits for others."""
        numbers = []
        for number, until in list(self.doing.items()):
            if until > now:
                break
            if number in self.handed:
                self._renew(number, now)
            else:
                numbers.append(number)
        return numbers

    def has_failed(self, entry: OpenRecord) -> bool:
        return entry.failures >= self.spec.max_failures

    def judge(self, worker: str, report: ReportShard) -> tuple[bool, str]:
        """Whether a report counts, and why. Raises ConfigError for a shard that nobody can hold."""
        shard = f"shard {report.number} of {self.name}"
        if report.rewinds != self.rewinds:
            return False, f"the progress of {self.name} was put back since {worker} leased {shard}"
        if report.number >= self.handed_out and self.is_restored:
            return (
                False,
                f"{shard} was handed out while the journal could not be written: it is handed out again",
            )
        if not 0 <= report.number < self.handed_out:
            raise ConfigError(f"{shard} was never handed out")
        entry = self.open.get(report.number)
        if entry is None:
            return False, f"{shard} was done before {worker} reported on it"
        if (entry.worker, entry.request) == (worker, report.lease):
            return True, f"{worker} has {report.outcome} {shard}"
        if report.outcome == "done":
            return True, f"{worker} has done {shard}, though its lease was over"
        return False, f"{shard} is not leased by {worker} any more"

    # -- checkpoints --------------------------------------------------------------------------------------

    def state(self) -> ShardState:
        """The progress, for a checkpoint: a shard that is not done yet is to be done again."""
        splitter = self.splitter
        return ShardState(
            dataset=self.name,
            split=self.spec.split,
            handed_out=self.handed_out,
            open=tuple(self.open[number].shard for number in sorted(self.open)),
            partitions=tuple(splitter.partitions.values()) if isinstance(splitter, StreamSplitter) else (),
            ended=isinstance(splitter, StreamSplitter) and splitter.ended,
        )

    def load_state(self, state: ShardState) -> None:
        """Put the progress back; leases end. Raises ConfigError for a state that is not this dataset's."""
        self._check_state(state)
        for number in self.open:
            self._changes[dataset_key(self.name, "open", number)] = None
        self.rewinds += 1
        self.handed_out = state.handed_out
        self.open, self.doing, self.todo_again = {}, {}, OrderedDict()
        self.handed.clear()
        if isinstance(self.splitter, StreamSplitter):
            self.splitter.rewind(state.partitions)
            self.splitter.ended = self.splitter.ended or state.ended
            for partition in self.splitter.partitions.values():
                self.keep_partition(partition)
        for shard in state.open:
            self._put(shard.number, OpenRecord(msgspec.structs.replace(shard, rewinds=self.rewinds)))
            self.todo_again[shard.number] = None
        self.keep_progress()

    def _check_state(self, state: ShardState) -> None:
        ours, theirs = self.spec.split, state.split
        if not isinstance(ours, StreamSplit) and not isinstance(theirs, StreamSplit):
            theirs = msgspec.structs.replace(theirs, epochs=ours.epochs)
        if ours != theirs:
            raise ConfigError(
                f"the saved state of dataset {self.name!r} was cut as {state.split}, but it is registered as "
                f"{self.spec.split}: only the number of epochs may differ"
            )
        total = self.splitter.total
        if state.handed_out > total >= 0:
            raise ConfigError(
                f"the saved state of dataset {self.name!r} stands at shard {state.handed_out}, but there are only "
                f"{total}: register it with as many epochs as before"
            )
        cuts = {p.name: p.cut for p in state.partitions}
        fits = state.handed_out >= 0 and len({shard.number for shard in state.open}) == len(state.open)
        fits = fits and all(0 <= s.number < state.handed_out and self._is_cut(s, cuts) for s in state.open)
        fits = fits and len(cuts) == len(state.partitions) <= PARTITIONS_MAX
        fits = fits and all(is_partition(p) for p in state.partitions)
        if not fits:
            raise ConfigError(
                f"the saved state of dataset {self.name!r} does not fit together: use another checkpoint"
            )

    def _is_cut(self, shard: Shard, cuts: dict[str, int]) -> bool:
        """Whether a shard has bounds that this dataset could have given it."""
        if isinstance(self.splitter, RangeSplitter):
            mine = self.splitter.cut(shard.number, 0)
            fits = (mine.start, mine.stop, mine.epoch) == (shard.start, shard.stop, shard.epoch)
        else:
            fits = 0 <= shard.start < shard.stop <= cuts.get(shard.partition, 0)
        return fits and 0 <= shard.read < shard.stop - shard.start

    # -- records ------------------------------------------------------------------------------------------

    def keep_spec(self) -> None:
        self._changes[dataset_key(self.name, "spec")] = msgspec.msgpack.encode(
            SpecRecord(self.spec, self.registered_by)
        )

    def keep_progress(self) -> None:
        self._kept_handed_out = self.handed_out
        ended = isinstance(self.splitter, StreamSplitter) and self.splitter.ended
        record = ProgressRecord(self.handed_out, self.rewinds, ended)
        self._changes[dataset_key(self.name, "progress")] = msgspec.msgpack.encode(record)

    def keep_partition(self, partition: StreamPartition) -> None:
        self._changes[dataset_key(self.name, "partition", partition.name)] = msgspec.msgpack.encode(partition)

    def restore(self, records: DatasetRecords, now: float) -> None:
        """Go on from what was kept; every lease is given its whole time again."""
        progress = records.progress
        self.is_restored = True
        self.handed_out = self._kept_handed_out = progress.handed_out
        self.rewinds = progress.rewinds
        if isinstance(self.splitter, StreamSplitter):
            self.splitter.ended = progress.ended
            for partition in records.partitions:
                self.splitter.put(partition)
        for entry in records.open:
            number = entry.shard.number
            self.open[number] = entry
            self.handed_out = max(self.handed_out, number + 1)
            if entry.worker:
                self.doing[number] = now + self.spec.lease_timeout_s
            else:
                self.todo_again[number] = None

    def _again(self, worker: str) -> int | None:
        """The oldest shard that has gone back, but rather one that another worker failed at, or a new one.

        A worker that fails at whatever it gets has to try its own again before they become many.
        """
        for number in islice(self.todo_again, OTHERS_SOUGHT):
            if self.open[number].failed_by != worker:
                return number
        if len(self.todo_again) < OTHERS_SOUGHT and not self.splitter.is_dry(self.handed_out):
            return None
        return next(iter(self.todo_again), None)

    def _renew(self, number: int, now: float) -> None:
        """A lease lasts its whole time from now on, and so ends last."""
        del self.doing[number]
        self.doing[number] = now + self.spec.lease_timeout_s

    def _put(self, number: int, entry: OpenRecord) -> None:
        self.open[number] = entry
        self._changes[dataset_key(self.name, "open", number)] = msgspec.msgpack.encode(entry)


def _is_whole(shard: Shard, mark: Mark) -> bool:
    return mark.read == shard.stop - shard.start
