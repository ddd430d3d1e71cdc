"""`stoker.shards()`: a worker's loop over the shards that the master gives it."""

from __future__ import annotations

import logging
import operator
import sys
import traceback
from collections.abc import Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from stoker.errors import ConfigError, JobError, WireError
from stoker.job.shard_split import RecordOrder
from stoker.settings import worker_settings
from stoker.train.attempts import attempts
from stoker.train.failures import is_collective_failure
from stoker.train.shards_leave import departure, hand_back
from stoker.train.shards_session import ShardSession, shard_session
from stoker.wire.shards import (
    AddRecords,
    CommitShards,
    DatasetRegistered,
    DatasetSpec,
    EndStream,
    ExportShards,
    GetShardStatus,
    ImportShards,
    LeaseShard,
    Mark,
    NoMoreShards,
    Outcome,
    RegisterDataset,
    ReportShard,
    ShardAnswer,
    ShardCall,
    ShardLeased,
    ShardMessage,
    ShardRefused,
    ShardReported,
    ShardsCommitted,
    ShardState,
    ShardStatus,
    Split,
    StateLoaded,
    StreamEnded,
    StreamExtended,
    TableSplit,
)

log = logging.getLogger("stoker.train")
REASON_CHARS = 2000
A = TypeVar("A", bound=ShardMessage)


class LeasedShard:
    """A shard in a worker's hands. It is done when the loop asks for the next one, or at `done()`.

    As a context manager it is done at the end of the block, and has failed if an exception leaves it; where that says
    that a peer is gone, the shard is handed back.
    """

    def __init__(self, owner: DynamicShards, leased: ShardLeased) -> None:
        self._owner = owner
        self.shard = leased.shard
        """As the master gave it."""
        self._lease = leased.lease
        self.is_open = True
        """Nothing has been reported about it."""

    @property
    def dataset(self) -> str:
        """Whose shard it is."""
        return self._owner.name

    @property
    def number(self) -> int:
        """Its place in the order of handing out, over all epochs."""
        return self.shard.number

    @property
    def epoch(self) -> int:
        """From 0."""
        return self.shard.epoch

    @property
    def start(self) -> int:
        """First record, key or offset."""
        return self.shard.start

    @property
    def stop(self) -> int:
        """The one after the last."""
        return self.shard.stop

    @property
    def read(self) -> int:
        """So many of its records, in the order of reading, were committed before it was leased."""
        return self.shard.read

    @property
    def partition(self) -> str:
        """Of a stream; else empty."""
        return self.shard.partition

    @property
    def column(self) -> str:
        """Of a table; else empty."""
        split = self._owner.split
        return split.column if isinstance(split, TableSplit) else ""

    @property
    def records(self) -> Sequence[int]:
        """Record numbers (of a stream: offsets) in the order of reading. Raises ConfigError for a table's shard."""
        if self.column:
            raise ConfigError(
                f"a table's shard is a range of keys: read the rows whose {self.column} is at least shard.start and "
                "below shard.stop"
            )
        return RecordOrder(self.shard, self._owner.split)

    def __len__(self) -> int:
        """Records, or a table's keys."""
        return self.shard.stop - self.shard.start

    def done(self) -> bool:
        """Report it done. False if that does not count: another worker was first, or the progress was put back."""
        return self._report("done", "")

    def fail(self, reason: str) -> bool:
        """Report that it could not be worked on: it goes to another worker, and too many failures end the job."""
        return self._report("failed", reason or "no reason was given")

    def give_back(self) -> bool:
        """Hand it back unfinished; that is no failure."""
        return self._report("returned", "")

    def mark(self, records: int) -> Mark:
        """What says that so many of its records are read."""
        return Mark(self.shard.number, self._lease, records, self.shard.rewinds)

    def _report(self, outcome: Outcome, reason: str) -> bool:
        if not self.is_open:
            return False
        self.is_open = False
        shard = self.shard
        reason = reason[-REASON_CHARS:]
        report = ReportShard(self._owner.name, shard.number, self._lease, outcome, reason, shard.rewinds)
        answer = self._owner.ask(report, ShardReported)
        if not answer.accepted:
            log.info(
                "a report on shard %d of %s does not count: %s", shard.number, self._owner.name, answer.why
            )
        return answer.accepted

    def __enter__(self) -> LeasedShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.done()
        elif (
            not isinstance(error, Exception)
            or is_collective_failure(error)
            or self._owner.session.is_interrupted()
        ):
            self.give_back()
        else:
            self.fail("".join(traceback.format_exception(error)).rstrip())

    def __repr__(self) -> str:
        where = f" of partition {self.partition!r}" if self.partition else ""
        return f"LeasedShard({self.number}, [{self.start}, {self.stop}){where} of epoch {self.epoch})"


class DynamicShards:
    """The shards of one dataset, shared by all workers. Each `for` loop over it takes part until none are left."""

    def __init__(self, name: str, spec: DatasetSpec, session: ShardSession) -> None:
        self.name = name
        self.split: Split = spec.split
        self.session = session
        self._caller = session.find()
        self._shards = self.ask(RegisterDataset(name, spec), DatasetRegistered).shards

    def __iter__(self) -> Iterator[LeasedShard]:
        return self._loop()

    def __len__(self) -> int:
        """Shards of all epochs. Raises TypeError for a stream."""
        if self._shards < 0:
            raise TypeError(f"dataset {self.name!r} is a stream: nobody knows how many shards there will be")
        return self._shards

    def __bool__(self) -> bool:
        return True

    def _loop(self) -> Generator[LeasedShard, None, None]:
        while (shard := self.lease()) is not None:
            consumer = id(sys._getframe().f_back)
            try:
                yield shard
            except GeneratorExit:
                hand_back([shard], departure(sys._getframe().f_back, consumer, self.session))
                raise
            except BaseException as error:
                # Handed through by a generator that says `yield from`.
                shard.__exit__(type(error), error, error.__traceback__)
                raise
            shard.done()

    def status(self) -> ShardStatus:
        """How far the dataset is, over all workers."""
        return self.ask(GetShardStatus(self.name), ShardStatus)

    def add_records(self, stop: int, *, partition: str = "", start: int | None = None) -> int:
        """Records of a stream's partition up to offset `stop` (not included) exist; returns up to where they are known.

        Saying so twice changes nothing. `start` is where a new partition begins (0 if not given); in a known one it may
        not leave a gap.
        """
        if start is not None and start < 0:
            raise ConfigError(f"start={start} cannot be: offsets begin at 0")
        call = AddRecords(self.name, stop, partition, -1 if start is None else start)
        return self.ask(call, StreamExtended).stop

    def end_of_stream(self) -> None:
        """No more records will come: loops end when all are done."""
        self.ask(EndStream(self.name), StreamEnded)

    def state_dict(self) -> dict[str, Any]:
        """The dataset's progress over all workers, as plain values for a checkpoint."""
        state: dict[str, Any] = msgspec.to_builtins(self.ask(ExportShards(self.name), ShardState))
        return state

    def load_state_dict(self, state: dict[str, Any], *, only_new: bool = False) -> None:
        """Put the dataset back to a checkpoint's progress, for all workers: one of them calls this, or each with
        `only_new`, which does nothing once shards have been handed out.

        Shards that are being worked on are handed out again, and reports about them do not count. Raises ConfigError
        for a state that is not this dataset's.
        """
        try:
            saved = msgspec.convert(state, ShardState)
        except msgspec.ValidationError as error:
            raise ConfigError(f"that is no state of stoker.shards: {error}") from None
        if saved.dataset != self.name:
            raise ConfigError(f"that is the state of dataset {saved.dataset!r}, not of {self.name!r}")
        self.ask(ImportShards(saved, only_new), StateLoaded)

    def lease(
        self, handed: Iterable[int] = (), *, handed_at: int = 0, is_ahead: bool = False
    ) -> LeasedShard | None:
        """The next shard, once there is one; None when there will be none.

        `handed`: numbers of shards that are held and read to their end, though not done yet; `handed_at` rises with
        each such list. `is_ahead`: it is for reading ahead, and not the training loop that asks. Raises as `ask`.
        """
        if not is_ahead:
            self.go_on()
        answer = self._caller.call(LeaseShard(self.name, tuple(handed), handed_at), is_ahead=is_ahead)
        return None if isinstance(answer, NoMoreShards) else LeasedShard(self, _expect(answer, ShardLeased))

    @staticmethod
    def go_on() -> None:
        """The script asks for more: it has caught what was on its way."""
        attempt = attempts().under_way
        if attempt is not None:
            attempt.go_on()

    def commit(self, read: Iterable[tuple[LeasedShard, int]]) -> dict[str, Any]:
        """So many records of each shard count from now on, those that counted before among them; all of them or none.
        Returns what `state_dict` would. Raises JobError where a shard is held no longer.
        """
        marks = tuple(shard.mark(records) for shard, records in read)
        answer = self.ask(CommitShards(self.name, marks), ShardsCommitted)
        if answer.refused:
            raise JobError(
                f"what was read of {self.name!r} since the last commit does not count, another worker reads it: "
                f"{answer.refused}; if it took longer than lease_timeout_s, raise that or commit more often"
            )
        state: dict[str, Any] = msgspec.to_builtins(answer.state)
        return state

    def ask(self, call: ShardCall, expected: type[A]) -> A:
        """Call the master. Raises ConfigError for what it refuses, JobError if a shard has failed the job."""
        return _expect(self._caller.call(call), expected)


def _expect(answer: ShardAnswer, expected: type[A]) -> A:
    if isinstance(answer, ShardRefused):
        raise JobError(answer.why) if answer.job_failed else ConfigError(answer.why)
    if not isinstance(answer, expected):
        raise WireError(f"the master answers with {type(answer).__name__} where {expected.__name__} was due")
    return answer


def shards(
    name: str,
    *,
    records: int | None = None,
    table: tuple[str, int, int] | None = None,
    stream: bool = False,
    shard_size: int,
    epochs: int = 1,
    shuffle: bool = False,
    shuffle_records: bool = False,
    seed: int = 0,
    lease_timeout_s: float | None = None,
    max_failures: int = 3,
    session: ShardSession | None = None,
) -> DynamicShards:
    """Work on a dataset together with all other workers, each at its own speed: `for shard in stoker.shards(...)`.

    Give one of `records` (how many there are), `table` (an integer column and its keys `low` to `high`, the latter not
    included) and `stream=True` (they arrive by `add_records`). Every worker gives the same. A shard is `shard_size`
    consecutive records at most.

    `shuffle` puts the shards of each epoch into an order that depends on `seed`; `shuffle_records` does so with the
    records of a shard. A shard that is not done within `lease_timeout_s` seconds (the job's `--timeout` if not given),
    or whose worker dies, is given to another one. `max_failures` failures or timeouts of one shard end the job.

    Raises ConfigError for values that cannot be, or that differ from another worker's; MasterUnreachable.
    """
    if sum([records is not None, table is not None, stream]) != 1:
        raise ConfigError(
            f"stoker.shards({name!r}) takes exactly one of records=..., table=(column, low, high) and stream=True"
        )
    split: dict[str, Any] = {"type": "stream", "shard_size": _whole("shard_size", shard_size)}
    if stream:
        if epochs != 1 or shuffle:
            raise ConfigError("a stream is read once and in order: leave out epochs and shuffle")
    else:
        split |= {"epochs": _whole("epochs", epochs), "shuffle": shuffle, "seed": _whole("seed", seed)}
    if records is not None:
        split |= {
            "type": "records",
            "records": _whole("records", records),
            "shuffle_records": shuffle_records,
        }
    elif shuffle_records:
        raise ConfigError("shuffle_records is for records=...: rows and what streams come as they are")
    if table is not None:
        column, low, high = table
        split |= {"type": "table", "column": column, "low": _whole("low", low), "high": _whole("high", high)}
    timeout_s = worker_settings().timeout_s if lease_timeout_s is None else lease_timeout_s
    try:
        values = {
            "type": "dataset_spec",
            "split": split,
            "lease_timeout_s": timeout_s,
            "max_failures": max_failures,
        }
        spec = msgspec.convert(values, DatasetSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"stoker.shards({name!r}): {error}") from None
    return DynamicShards(name, spec, session if session is not None else shard_session())


def _whole(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r} is no whole number") from None
    if not -(1 << 62) < number < 1 << 62:
        raise ConfigError(f"{name}={number} is too large")
    return number
