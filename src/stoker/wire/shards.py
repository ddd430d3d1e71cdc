"""Messages of dynamic shards: worker ↔ master.

A worker calls, the master answers, at once or later: a lease that finds no shard is answered when one becomes free.
A call is repeated with its number until it is answered, and does its work once.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stoker.errors import WireError

Outcome = Literal["done", "failed", "returned"]
"""What became of a leased shard; `returned` hands it back unfinished and is no failure."""


class ShardMessage(
    msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True
):
    """Base of these messages: immutable, tagged with its name."""


class RecordSplit(ShardMessage, frozen=True, tag="records"):
    """Records `0 … records-1`, cut into shards of `shard_size` (the last of an epoch may be smaller)."""

    records: int
    shard_size: int
    epochs: int = 1
    shuffle: bool = False
    """Shards come in a seeded order, another one in each epoch."""
    shuffle_records: bool = False
    """Within a shard records are read in a seeded order."""
    seed: int = 0


class TableSplit(ShardMessage, frozen=True, tag="table"):
    """Keys `[low, high)` of an integer column, cut into ranges of `shard_size` keys."""

    column: str
    low: int
    high: int
    shard_size: int
    epochs: int = 1
    shuffle: bool = False
    seed: int = 0


class StreamSplit(ShardMessage, frozen=True, tag="stream"):
    """Records that arrive while the job runs, numbered by their offset in a partition.

    A shard is what is there when a worker asks, `shard_size` records at most.
    """

    shard_size: int


Split = RecordSplit | TableSplit | StreamSplit


class DatasetSpec(ShardMessage, frozen=True, tag="dataset_spec"):
    """How a dataset is cut and leased."""

    split: Split
    lease_timeout_s: float
    """Seconds that a worker may take for one shard; then it goes back, which counts as a failure."""
    max_failures: int = 3
    """Failures of one shard that end the job."""


class Shard(ShardMessage, frozen=True, tag="shard"):
    """A run of consecutive records, `[start, stop)`."""

    number: int
    """Its place in the order of handing out, over all epochs."""
    epoch: int
    start: int
    stop: int
    partition: str = ""
    """Of a stream."""
    rewinds: int = 0
    """How often the dataset's progress had been put back when this was leased."""
    read: int = 0
    """So many of its records, in the order of reading, have been committed."""


class StreamPartition(ShardMessage, frozen=True, tag="stream_partition"):
    """One partition of a stream: records `[start, end)` are known, those below `cut` have been handed out."""

    name: str
    start: int
    end: int
    cut: int


class ShardState(ShardMessage, frozen=True, tag="shard_state"):
    """A dataset's progress, for a checkpoint: its size grows with the shards in flight, not with the dataset."""

    dataset: str
    split: Split
    handed_out: int
    """Shards with a smaller number are done, but for those that are open."""
    open: tuple[Shard, ...] = ()
    partitions: tuple[StreamPartition, ...] = ()
    ended: bool = False
    """No more records will come (streams)."""


class RegisterDataset(ShardMessage, frozen=True, tag="register_dataset"):
    """The first one defines the dataset; later ones must say the same."""

    dataset: str
    spec: DatasetSpec


class LeaseShard(ShardMessage, frozen=True, tag="lease_shard"):
    """Ask for a shard."""

    dataset: str
    handed: tuple[int, ...] = ()
    """Shards that the worker holds and of which all records are with its training loop. They hold up nobody's end, and
    their leases last on, as long as the worker's newest call names them."""
    handed_at: int = 0
    """Rises with each such list of a worker's: one that is older than another says nothing."""


class ReportShard(ShardMessage, frozen=True, tag="report_shard"):
    """Say what became of a leased shard."""

    dataset: str
    number: int
    lease: int
    """As the answer to the lease call had it: it also proves that this answer has come."""
    outcome: Outcome = "done"
    reason: str = ""
    rewinds: int = 0
    """As the shard had it."""


class Mark(ShardMessage, frozen=True, tag="mark"):
    """How far a leased shard has been read."""

    number: int
    lease: int
    read: int
    """Records from the beginning of its order; all of them: it is done."""
    rewinds: int = 0


class CommitShards(ShardMessage, frozen=True, tag="commit_shards"):
    """These records count: all of them, or, where a lease is over, none."""

    dataset: str
    marks: tuple[Mark, ...] = ()


class AddRecords(ShardMessage, frozen=True, tag="add_records"):
    """Records of a stream's partition up to `stop` exist. Saying so twice changes nothing."""

    dataset: str
    stop: int
    partition: str = ""
    start: int = -1
    """Where they begin; -1: where the known ones end, 0 in a new partition."""


class EndStream(ShardMessage, frozen=True, tag="end_stream"):
    """No more records will come."""

    dataset: str


class GetShardStatus(ShardMessage, frozen=True, tag="get_shard_status"):
    """Ask how far a dataset is."""

    dataset: str


class ExportShards(ShardMessage, frozen=True, tag="export_shards"):
    """Ask for a dataset's progress, to keep it in a checkpoint."""

    dataset: str


class ImportShards(ShardMessage, frozen=True, tag="import_shards"):
    """Put a dataset back to the progress of a checkpoint. Leases end; reports about them are refused."""

    state: ShardState
    only_new: bool = False
    """Do nothing if shards have been handed out before."""


class DatasetRegistered(ShardMessage, frozen=True, tag="dataset_registered"):
    """The dataset is known."""

    shards: int
    """How many there will be in all epochs; -1 for a stream."""


class ShardLeased(ShardMessage, frozen=True, tag="shard_leased"):
    """This shard is the worker's until it reports on it, or its lease times out."""

    shard: Shard
    lease: int
    """The number of the lease call."""


class NoMoreShards(ShardMessage, frozen=True, tag="no_more_shards"):
    """All shards of all epochs are done."""


class ShardReported(ShardMessage, frozen=True, tag="shard_reported"):
    """Whether the report counts: of several workers that did the same shard only the first one's does."""

    accepted: bool
    why: str = ""


class ShardsCommitted(ShardMessage, frozen=True, tag="shards_committed"):
    """What counts now, over all workers."""

    state: ShardState
    refused: str = ""
    """Why nothing was committed; empty: it was."""


class StreamExtended(ShardMessage, frozen=True, tag="stream_extended"):
    """The stream's records are known up to here."""

    stop: int


class StreamEnded(ShardMessage, frozen=True, tag="stream_ended"):
    """The stream's end is known."""


class ShardStatus(ShardMessage, frozen=True, tag="shard_status"):
    """How far a dataset is, counted in shards of all epochs."""

    dataset: str
    total: int
    """-1 for a stream."""
    done: int
    doing: int
    todo: int
    waiting: int
    """Lease calls that wait for a shard."""
    failures: int
    """Failed attempts at shards that are not done yet."""
    epoch: int
    """The epoch that is being handed out."""
    is_finished: bool


class StateLoaded(ShardMessage, frozen=True, tag="state_loaded"):
    """The dataset's progress is that of the checkpoint."""


class ShardRefused(ShardMessage, frozen=True, tag="shard_refused"):
    """The call cannot be done."""

    why: str
    job_failed: bool = False
    """A shard failed too often, and the job with it; else the call itself is wrong."""


ShardCall = (
    RegisterDataset
    | LeaseShard
    | ReportShard
    | CommitShards
    | AddRecords
    | EndStream
    | GetShardStatus
    | ExportShards
    | ImportShards
)
ShardAnswer = (
    DatasetRegistered
    | ShardLeased
    | NoMoreShards
    | ShardReported
    | ShardsCommitted
    | StreamExtended
    | StreamEnded
    | ShardStatus
    | ShardState
    | StateLoaded
    | ShardRefused
)

_CALLS: msgspec.msgpack.Decoder[ShardCall] = msgspec.msgpack.Decoder(ShardCall)
_ANSWERS: msgspec.msgpack.Decoder[ShardAnswer] = msgspec.msgpack.Decoder(ShardAnswer)


def encode(message: ShardMessage) -> bytes:
    """A message as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode_call(body: bytes) -> ShardCall:
    """Read a call. Raises WireError."""
    try:
        return _CALLS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not a call of the shard service: {error}") from None


def decode_answer(body: bytes) -> ShardAnswer:
    """Read an answer. Raises WireError."""
    try:
        return _ANSWERS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not an answer of the shard service: {error}") from None
