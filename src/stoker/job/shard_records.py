"""What a master must remember of the shards, as records of a key-value journal. PURE.

    shards/<dataset>/spec            how it is cut
    shards/<dataset>/progress        how far it is handed out; may lag behind the open shards, which say as much
    shards/<dataset>/open/<number>   a shard that is handed out and not done
    shards/<dataset>/partition/<p>   a stream's partition
    shards/@worker/<worker>          which of its calls are answered

A lease writes one of them (in a stream two), a report two or three, whatever the size of the dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from stoker.errors import ConfigError, WireError
from stoker.job.shard_requests import WorkerRecord
from stoker.job.shard_split import check_dataset
from stoker.wire.shards import DatasetSpec, Shard, StreamPartition

KEY_PREFIX = "shards/"
_WORKERS = "@worker"


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the records."""


class SpecRecord(Kept, frozen=True):
    """`spec`."""

    spec: DatasetSpec
    worker: str
    """Who registered it."""


class ProgressRecord(Kept, frozen=True):
    """`progress`."""

    handed_out: int
    rewinds: int = 0
    ended: bool = False


class OpenRecord(Kept, frozen=True):
    """`open/<number>`: with a worker it is leased, without one it is todo again."""

    shard: Shard
    worker: str = ""
    request: int = 0
    failures: int = 0
    error: str = ""
    """The last failure's reason."""
    failed_by: str = ""
    """Whose it was."""


def dataset_key(dataset: str, kind: str, name: str | int = "") -> str:
    """The key of a dataset's record."""
    return f"{KEY_PREFIX}{dataset}/{kind}" if name == "" else f"{KEY_PREFIX}{dataset}/{kind}/{name}"


def worker_key(worker: str) -> str:
    """The key of a worker's record."""
    return f"{KEY_PREFIX}{_WORKERS}/{worker}"


@dataclass
class DatasetRecords:
    """All records of one dataset."""

    spec: SpecRecord
    progress: ProgressRecord = field(default_factory=lambda: ProgressRecord(handed_out=0))
    open: list[OpenRecord] = field(default_factory=list)
    partitions: list[StreamPartition] = field(default_factory=list)


@dataclass(frozen=True)
class Remembered:
    """All records of the shard service."""

    datasets: dict[str, DatasetRecords] = field(default_factory=dict)
    workers: dict[str, WorkerRecord] = field(default_factory=dict)


def decode_records(records: Mapping[str, bytes]) -> Remembered:
    """Read back what was kept; keys of other services are passed over. Raises WireError for what cannot be read."""
    remembered = Remembered()
    keys = [key for key in records if key.startswith(KEY_PREFIX)]
    keys.sort(key=lambda key: (not key.endswith("/spec"), len(key), key))
    for key in keys:
        try:
            _take(remembered, key, records[key])
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, KeyError, ConfigError) as error:
            raise WireError(
                f"the journal's record {key!r} cannot be read: {error}; was it written by another version of "
                "Stoker? Start the job with a new journal"
            ) from None
    return remembered


def _take(remembered: Remembered, key: str, value: bytes) -> None:
    decode = msgspec.msgpack.decode
    dataset, kind, *_ = key[len(KEY_PREFIX) :].split("/", 2)
    if dataset == _WORKERS:
        remembered.workers[key[len(worker_key("")) :]] = decode(value, type=WorkerRecord)
    elif key == dataset_key(dataset, "spec"):
        record = decode(value, type=SpecRecord)
        check_dataset(dataset, record.spec)
        remembered.datasets[dataset] = DatasetRecords(record)
    elif kind == "progress":
        remembered.datasets[dataset].progress = decode(value, type=ProgressRecord)
    elif kind == "open":
        remembered.datasets[dataset].open.append(decode(value, type=OpenRecord))
    elif kind == "partition":
        remembered.datasets[dataset].partitions.append(decode(value, type=StreamPartition))
    else:
        raise ValueError(f"records of kind {kind!r} are unknown")
