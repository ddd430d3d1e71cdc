"""`stoker.Loader`: global batches, divided over the world of each step."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from stoker.data.order import GlobalOrder, Share, share_of
from stoker.data.session import HandedOut, session
from stoker.errors import ConfigError, DatasetChanged, StokerError

PLANNED_AT_ONCE = 16
"""Steps whose records are worked out together: one by one they cost 0.1 ms each, so 0.01 ms."""
Collate = Callable[[list[Any]], Any]


class Records(Protocol):
    """A dataset by record number: `stoker.Dataset`, or any map-style dataset of PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, record: int) -> Any: ...


class Loader:
    """Yields this rank's share of each global batch, collated as torch does.

    `global_batch_size`: records per step over the whole world; it stays the same at every world size. The last,
    smaller batch of an epoch is yielded too. Shares may differ by a record; a rank without one gets a record of
    the batch to keep in step, with weight zero. `num_workers`: processes that read and decode ahead; 0 reads in
    this process. `name`: tells loaders apart when scripts make them in varying order.

    One `for` loop is one epoch, from wherever the last commit left it. The position (epoch and cursor) belongs
    to each `state.commit()`. A loader that is restored to the end of an epoch yields nothing once, then moves on.

    Raises ConfigError for sizes below 1, and what reading and `decode` raise.
    """

    def __init__(
        self,
        dataset: Records,
        *,
        global_batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        multiprocessing_context: str | None = None,
        name: str | None = None,
    ) -> None:
        if global_batch_size < 1:
            raise ConfigError(f"global_batch_size must be at least 1, got {global_batch_size}")
        if num_workers < 0:
            raise ConfigError(f"num_workers must not be negative, got {num_workers}")
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.cursor = 0
        """Records of the epoch that have been handed out, over the whole world."""
        self._pass = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        """Number of the current pass, which loader processes see too: what they still have to do for an older one
        they skip, so that a change of the world does not wait for batches that nobody wants."""
        self._plan = _Plan()
        self._session = session()
        self._options: dict[str, Any] = {
            "prefetch_factor": prefetch_factor,
            "multiprocessing_context": multiprocessing_context,
        }
        self._fetcher = _Fetcher(dataset, collate_fn or default_collate, self._pass)
        self._pin_memory = pin_memory
        self._source = self._new_source(num_workers)
        self.name = self._session.register(self, name)

    def __len__(self) -> int:
        """Steps in a whole epoch."""
        return math.ceil(len(self.dataset) / self.global_batch_size)

    @property
    def num_workers(self) -> int:
        """Processes that read and decode ahead."""
        return self._source.num_workers

    def retune(self, *, num_workers: int) -> None:
        """From the next batch on, load with so many processes. Nothing is read twice or lost."""
        self._source = self._new_source(num_workers)

    def _new_source(self, num_workers: int) -> DataLoader[Any]:
        return DataLoader(
            self._fetcher,  # type: ignore[arg-type]
            batch_sampler=self._plan,  # type: ignore[arg-type]
            collate_fn=_same,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self._pin_memory,
            **(self._options if num_workers > 0 else {}),
        )

    def __iter__(self) -> Iterator[Any]:
        """One epoch, from the position; goes on at it with other processes where `retune` came in between."""
        epoch, source = self.epoch, None
        while source is not self._source:
            source = self._source
            yield from self._batches(source, epoch)
        self.epoch, self.cursor = epoch + 1, 0

    def _batches(self, source: DataLoader[Any], epoch: int) -> Iterator[Any]:
        live, records = self._session, len(self.dataset)
        number = self._end_pass()
        self._plan.begin(
            number,
            GlobalOrder(records, seed=self.seed, epoch=epoch, shuffle=self.shuffle),
            cursor=self.cursor,
            global_batch_size=self.global_batch_size,
            rank=live.rank,
            world_size=live.world_size,
        )
        steps = math.ceil((records - self.cursor) / self.global_batch_size)
        batches: Iterator[Any] = iter(source) if steps > 0 else iter(())
        for _ in range(steps):
            live.check()
            if int(self._pass) != number:
                raise ConfigError(
                    f"loader {self.name!r} is iterated twice at once: finish one loop before the next"
                )
            waiting = time.perf_counter()
            batch: Any = next(batches)
            live.waited_s += time.perf_counter() - waiting
            if isinstance(batch, StokerError):
                raise batch
            share, numbers = self._plan.taken.popleft()
            self.cursor += share.batch_records
            live.share = share
            if live.on_batch is not None:
                counted = tuple(numbers) if share.records else ()
                live.on_batch(HandedOut(self.name, epoch, counted, self.cursor, records))
            yield batch
            if source is not self._source:
                return

    def state_dict(self) -> dict[str, Any]:
        """Epoch, cursor and a fingerprint of the data."""
        return {"epoch": self.epoch, "cursor": self.cursor, "data": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position. Raises DatasetChanged if it is of other data."""
        if state["data"] != self._fingerprint:
            raise DatasetChanged(
                f"loader {self.name!r}: the records are not those that the run started with "
                f"(fingerprint {self._fingerprint}, expected {state['data']}): restore the dataset, or start a new run"
            )
        self.epoch, self.cursor = int(state["epoch"]), int(state["cursor"])
        self._end_pass()

    def _end_pass(self) -> int:
        """Whatever is still being read is not wanted any more; returns the number of the next pass."""
        self._pass += 1
        return int(self._pass)

    @functools.cached_property
    def _fingerprint(self) -> str:
        own = getattr(self.dataset, "fingerprint", None)
        return f"{len(self.dataset)}/{self.seed}/{int(self.shuffle)}/{own or ''}"


class _Plan:
    """The batch sampler of one pass: record numbers per step, worked out as they are asked for."""

    def __init__(self) -> None:
        self.taken: deque[tuple[Share, list[int]]] = deque()
        self._steps: Iterator[tuple[Share, list[int]]] = iter(())
        self._number = 0

    def begin(
        self,
        number: int,
        order: GlobalOrder,
        *,
        cursor: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        """Plan pass `number` from `cursor` to the end of the epoch, for one rank of one world."""
        self._number = number
        self.taken = deque()
        starts = range(cursor, order.records, global_batch_size)
        self._steps = _planned(order, starts, global_batch_size, rank, world_size)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for share, numbers in self._steps:
            self.taken.append((share, numbers))
            yield self._number, numbers


class _Fetcher:
    """Reads and collates one batch, where the DataLoader wants it done. Our own errors travel as values, so that
    they arrive as they were raised."""

    def __init__(self, dataset: Records, collate: Collate, current: torch.Tensor) -> None:
        self._dataset = dataset
        self._collate = collate
        self._current = current

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, batch: tuple[int, list[int]]) -> Any:
        number, records = batch
        if int(self._current) != number:
            return None
        try:
            several = getattr(self._dataset, "__getitems__", None)
            samples = several(records) if several is not None else [self._dataset[r] for r in records]
            return self._collate(samples)
        except StokerError as error:
            return error


def _same(batch: Any) -> Any:
    return batch


def _planned(
    order: GlobalOrder, starts: range, global_batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[Share, list[int]]]:
    """Each step's share and its record numbers; for an empty share, one record of the batch to keep in step."""
    for first in range(0, len(starts), PLANNED_AT_ONCE):
        shares, spans = [], []
        for start in starts[first : first + PLANNED_AT_ONCE]:
            share = share_of(rank, world_size, start, global_batch_size, order.records)
            shares.append(share)
            spans.append((share.start, share.stop) if share.records else (start, start + 1))
        positions = np.concatenate([np.arange(low, high, dtype=np.uint64) for low, high in spans])
        numbers = order.of(positions).tolist()
        at = 0
        for share, (low, high) in zip(shares, spans, strict=True):
            yield share, numbers[at : at + high - low]
            at += high - low
