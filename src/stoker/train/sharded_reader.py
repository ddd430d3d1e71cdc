"""The samples of one shard, read in lots: while one is used the next ones are on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from stoker.data.dataset import Dataset
from stoker.errors import ConfigError

LOTS_AHEAD = 2
"""Lots that are read before they are needed, one after the other."""
Lot = list[tuple[int, Any]]


class Records(Protocol):
    """A dataset by record number: `stoker.Dataset`, or any map-style dataset of PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, record: int) -> Any: ...


class ShardReader:
    """Reads for one loop, in a thread of its own."""

    def __init__(self, dataset: Records, change: Callable[[Any], Any] | None, lot_size: int) -> None:
        self._dataset = dataset
        self._change = change
        self._lot_size = lot_size
        self._thread = ThreadPoolExecutor(1, "stoker-shard-reader")

    def close(self) -> None:
        """Nothing more is wanted."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def samples(self, order: Sequence[int], place: int) -> Iterator[tuple[int, Any]]:
        """The good records of a shard from a place on, each with how many records of the shard are read with it: that
        includes those behind it that are left out. Raises what reading does."""
        held: tuple[int, Any] | None = None
        for at, sample in self._good(order, place):
            if held is not None:
                yield at, held[1]
            held = at, sample
        if held is not None:
            yield len(order), held[1]

    def _good(self, order: Sequence[int], place: int) -> Iterator[tuple[int, Any]]:
        starts = iter(range(place, len(order), self._lot_size))
        coming: deque[tuple[int, Future[Lot]]] = deque()
        while True:
            for start in starts:
                coming.append((start, self._thread.submit(self._read, order[start : start + self._lot_size])))
                if len(coming) > LOTS_AHEAD:
                    break
            if not coming:
                return
            start, lot = coming.popleft()
            for at, sample in lot.result():
                yield start + at, sample

    def _read(self, records: Sequence[int]) -> Lot:
        lot = read_lot(self._dataset, records)
        return lot if self._change is None else [(place, self._change(sample)) for place, sample in lot]


def read_lot(dataset: Records, records: Sequence[int]) -> Lot:
    """Samples, each with the place of its record in `records`; where the dataset can, with one request."""
    if isinstance(dataset, Dataset):
        return dataset.placed(records)
    several = getattr(dataset, "__getitems__", None)
    samples = several(records) if several is not None else [dataset[record] for record in records]
    if len(samples) != len(records):
        raise ConfigError(
            f"{type(dataset).__name__}.__getitems__ gives {len(samples)} samples for {len(records)} records: which "
            "were left out cannot be told; give one for each"
        )
    return list(enumerate(samples))
