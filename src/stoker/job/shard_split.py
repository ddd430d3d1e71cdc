"""How a dataset is cut into shards: a shard's bounds are a function of its number, so no list is ever held. PURE."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from stoker.base.ids import check_name
from stoker.base.rng import GOLDEN_GAMMA, mix64
from stoker.errors import ConfigError
from stoker.wire.shards import (
    DatasetSpec,
    RecordSplit,
    Shard,
    Split,
    StreamPartition,
    StreamSplit,
    TableSplit,
)

ROUNDS = 8
"""With 4, orders of fewer than 16 are visibly uneven over the seeds; with 8 they are not."""
NUMBER_MAX = 1 << 62
PARTITIONS_MAX = 10_000
NAME_CHARS_MAX = 255


class Permutation:
    """A seeded bijection of `0 … size-1` in O(1) memory, asked for one position at a time.

    A generalized Feistel network over Z_rows x Z_columns with cycle walking (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002); rows x columns exceeds the size by less than a column, so it hardly ever walks.
    """

    __slots__ = ("_columns", "_keys", "_rows", "size")

    def __init__(self, size: int, *, seed: int, stream: int) -> None:
        self.size = size
        self._columns = max(1, math.isqrt(size))
        self._rows = max(1, -(-size // self._columns))
        base = mix64(mix64(seed) ^ (stream * GOLDEN_GAMMA))
        self._keys = tuple((mix64(base + 2 * r + 1), mix64(base + 2 * r + 2)) for r in range(ROUNDS // 2))

    def at(self, position: int) -> int:
        """What stands at a position of the permuted order. Raises ValueError outside it."""
        if not 0 <= position < self.size:
            raise ValueError(f"position {position} is outside an order of {self.size}")
        value = position
        while True:
            left, right = divmod(value, self._columns)
            for one, other in self._keys:
                left = (left + mix64(right ^ one)) % self._rows
                right = (right + mix64(left ^ other)) % self._columns
            value = left * self._columns + right
            if value < self.size:
                return value


class RecordOrder(Sequence[int]):
    """The records of one shard in the order of reading: a sequence that holds nothing."""

    def __init__(self, shard: Shard, split: Split) -> None:
        self._range = range(shard.start, shard.stop)
        self._permutation: Permutation | None = None
        if isinstance(split, RecordSplit) and split.shuffle_records:
            stream = mix64(shard.start + 1) ^ shard.epoch
            self._permutation = Permutation(len(self._range), seed=split.seed, stream=stream)

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        places = range(len(self._range))[index]
        return [self._at(place) for place in places] if isinstance(places, range) else self._at(places)

    def __iter__(self) -> Iterator[int]:
        return iter(self._range) if self._permutation is None else map(self._at, range(len(self._range)))

    def _at(self, place: int) -> int:
        return self._range[place if self._permutation is None else self._permutation.at(place)]


class RangeSplitter:
    """Records or table keys: known beforehand, `epochs` times over."""

    def __init__(self, split: RecordSplit | TableSplit) -> None:
        low, high = (0, split.records) if isinstance(split, RecordSplit) else (split.low, split.high)
        self._low, self._high = low, high
        self._split = split
        self.per_epoch = -(-(high - low) // split.shard_size)
        self.total = self.per_epoch * split.epochs
        self._epoch = -1
        self._order = Permutation(0, seed=0, stream=0)

    def is_dry(self, number: int) -> bool:
        """Whether there is no shard with this number now."""
        return number >= self.total

    def is_over(self, number: int) -> bool:
        """Whether there will never be one."""
        return number >= self.total

    def left(self, number: int) -> int:
        """How many shards there are from this number on."""
        return self.total - number

    def epoch_of(self, number: int) -> int:
        return min(number, self.total - 1) // self.per_epoch

    def cut(self, number: int, rewinds: int) -> Shard:
        """The shard with this number."""
        epoch, place = divmod(number, self.per_epoch)
        if self._split.shuffle:
            if epoch != self._epoch:
                self._order = Permutation(self.per_epoch, seed=self._split.seed, stream=epoch)
                self._epoch = epoch
            place = self._order.at(place)
        start = self._low + place * self._split.shard_size
        return Shard(
            number=number,
            epoch=epoch,
            start=start,
            stop=min(start + self._split.shard_size, self._high),
            rewinds=rewinds,
        )


class StreamSplitter:
    """Records that arrive: partitions take turns."""

    total = -1

    def __init__(self, split: StreamSplit) -> None:
        self._shard_size = split.shard_size
        self.partitions: dict[str, StreamPartition] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()
        self.ended = False

    def is_dry(self, number: int) -> bool:
        """Whether all records that have arrived are handed out."""
        return not self._ready

    def is_over(self, number: int) -> bool:
        """Whether none will ever come."""
        return self.ended and not self._ready

    def left(self, number: int) -> int:
        """How many shards the records would make that have arrived and are not handed out."""
        known = (self.partitions[name] for name in self._ready)
        return sum(-(-(partition.end - partition.cut) // self._shard_size) for partition in known)

    def epoch_of(self, number: int) -> int:
        return 0

    def cut(self, number: int, rewinds: int) -> Shard:
        """Take the next records of the partition whose turn it is."""
        name, _ = self._ready.popitem(last=False)
        old = self.partitions[name]
        stop = min(old.cut + self._shard_size, old.end)
        self.put(StreamPartition(name=name, start=old.start, end=old.end, cut=stop))
        return Shard(number=number, epoch=0, start=old.cut, stop=stop, partition=name, rewinds=rewinds)

    def add(self, name: str, start: int, stop: int) -> StreamPartition | None:
        """Records up to `stop` exist; the partition if that is news. Raises ConfigError for a gap or after the end."""
        old = self.partitions.get(name)
        if old is not None:
            if start > old.end:
                raise ConfigError(
                    f"records from {start} on leave a gap in partition {name!r}, which is known up to {old.end}: "
                    "add them in order"
                )
            if stop <= old.end:
                return None
        elif not 0 <= max(start, 0) <= stop < NUMBER_MAX or len(name) > NAME_CHARS_MAX:
            raise ConfigError(
                f"records [{max(start, 0)}, {stop}) of partition {name[:NAME_CHARS_MAX]!r} cannot be"
            )
        elif len(self.partitions) >= PARTITIONS_MAX:
            raise ConfigError(f"a stream has at most {PARTITIONS_MAX} partitions: {name!r} is one too many")
        if self.ended:
            raise ConfigError(f"records up to {stop} of partition {name!r} come after the end of the stream")
        if stop >= NUMBER_MAX:
            raise ConfigError(f"records up to {stop} of partition {name!r} cannot be")
        begin = max(start, 0) if old is None else old.start
        cut = begin if old is None else old.cut
        return self.put(StreamPartition(name=name, start=begin, end=stop, cut=cut))

    def put(self, partition: StreamPartition) -> StreamPartition:
        """Take over a partition as it is."""
        self.partitions[partition.name] = partition
        if partition.cut < partition.end:
            self._ready.setdefault(partition.name)
        else:
            self._ready.pop(partition.name, None)
        return partition

    def rewind(self, saved: Iterable[StreamPartition]) -> None:
        """Hand out again from where a checkpoint stood; what has arrived since is not forgotten."""
        begins = {name: old.start for name, old in self.partitions.items()}
        known = {partition.name: partition for partition in saved}
        for name in begins.keys() | known.keys():
            live, kept = self.partitions.get(name), known.get(name)
            start = kept.start if kept is not None else begins[name]
            self.put(
                StreamPartition(
                    name=name,
                    start=start,
                    end=max(live.end if live is not None else start, kept.end if kept is not None else start),
                    cut=kept.cut if kept is not None else start,
                )
            )


Splitter = RangeSplitter | StreamSplitter


def is_partition(partition: StreamPartition) -> bool:
    """Whether offsets and name can be."""
    ordered = 0 <= partition.start <= partition.cut <= partition.end < NUMBER_MAX
    return ordered and len(partition.name) <= NAME_CHARS_MAX


def splitter_for(split: Split) -> Splitter:
    """The splitter that a dataset's description asks for."""
    return StreamSplitter(split) if isinstance(split, StreamSplit) else RangeSplitter(split)


def check_dataset(name: str, spec: DatasetSpec) -> None:
    """Raises ConfigError, naming the value, for a name or a description that cannot be."""
    try:
        check_name("dataset", name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    split = spec.split
    wrong = [("shard_size", split.shard_size, "at least 1")] if not 0 < split.shard_size < NUMBER_MAX else []
    if not isinstance(split, StreamSplit) and split.epochs < 1:
        wrong.append(("epochs", split.epochs, "at least 1"))
    if isinstance(split, RecordSplit) and not 0 < split.records < NUMBER_MAX:
        wrong.append(("records", split.records, "at least 1"))
    if spec.max_failures < 1:
        wrong.append(("max_failures", spec.max_failures, "at least 1"))
    for name, value, bound in wrong:
        raise ConfigError(f"{name}={value} cannot be: it is {bound}")
    if not 0 < spec.lease_timeout_s < 1e9:
        raise ConfigError(f"lease_timeout_s={spec.lease_timeout_s} cannot be: give seconds, more than 0")
    if isinstance(split, TableSplit):
        if not -NUMBER_MAX < split.low < split.high < NUMBER_MAX:
            raise ConfigError(f"a table's keys [{split.low}, {split.high}) cannot be: low must be below high")
        if not 0 < len(split.column) <= NAME_CHARS_MAX:
            raise ConfigError(
                f"column {split.column[:NAME_CHARS_MAX]!r} is no name: 1-{NAME_CHARS_MAX} characters"
            )
    if not isinstance(split, StreamSplit) and RangeSplitter(split).total >= NUMBER_MAX:
        raise ConfigError(f"{split.epochs} epochs make too many shards: raise shard_size")
