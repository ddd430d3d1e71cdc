"""Loops over the records of leased shards: in the training process itself, or through loader processes.

A shard is done when the training loop has used its records. That it has is known when it asks for more: for another
record, or, through a DataLoader, for another batch.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol, cast

import msgspec
import torch.utils.data
from torch.utils.data._utils import fetch
from torch.utils.data._utils.collate import default_collate, default_convert

from stoker.data.session import session
from stoker.errors import ConfigError
from stoker.job.shard_split import RecordOrder
from stoker.train.sharded_desk import Desk
from stoker.train.sharded_reader import Records, ShardReader
from stoker.train.sharded_relay import Relay, RelayAddress
from stoker.train.shards_session import ShardSession

Collate = Callable[[Any], Any]
_GIVEN: msgspec.msgpack.Decoder[list[tuple[int, int]]] = msgspec.msgpack.Decoder(list[tuple[int, int]])


class ShardLoop(Iterator[Any]):
    """One loop in the training process: `for sample in dataset`, or a DataLoader without processes."""

    def __init__(self, desk: Desk, reader: ShardReader, turn: int) -> None:
        self._desk = desk
        self._reader = reader
        self._turn = turn
        self._samples = _samples(desk, reader, self._turn)
        self._consumer = 0
        self._has_ended = False

    def __next__(self) -> Any:
        asker = sys._getframe(1)
        if self._desk.turn != self._turn and not self._has_ended:
            session().check()
            raise ConfigError(
                "this loop over a ShardedDataset is over: another one has begun, or its progress was put back; begin "
                "a new one"
            )
        self._consumer = id(_loop_of(asker))
        if _begins_batch(asker):
            self._desk.settle(self._turn)
        session().check()
        try:
            return next(self._samples)
        except StopIteration:
            self._has_ended = True
            self._reader.close()
            raise

    def __del__(self) -> None:
        """The loop is left. At its end a last, smaller batch may have been used since: nobody asks after it."""
        if sys.is_finalizing():
            return
        self._reader.close()
        if self._desk.turn != self._turn:
            return
        self._desk.leave(self._turn, sys._getframe().f_back, self._consumer, has_ended=self._has_ended)


def _samples(desk: Desk, reader: ShardReader, turn: int) -> Iterator[Any]:
    held = desk.next(turn)
    while held is not None:
        is_empty = True
        try:
            for read, sample in reader.samples(held.shard.records, held.given):
                is_empty = False
                held.given = read
                yield sample
        except Exception as error:  # of the script's dataset: it may raise anything
            desk.fail(held.shard.number, _told(error), turn)
            raise
        held = desk.next(turn, held.shard.number, is_empty=is_empty)


def _told(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _begins_batch(asker: FrameType) -> bool:
    """Whether what was handed out before is used: not while torch's DataLoader gathers a batch."""
    return asker.f_globals.get("__name__") != fetch.__name__ or not asker.f_locals.get("data")


def _loop_of(asker: FrameType) -> FrameType:
    """The frame that runs the training loop, below those of DataLoaders."""
    frame = asker
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("torch.utils.data"):
        frame = frame.f_back
    return frame


class Feed(torch.utils.data.IterableDataset[tuple[Any, tuple[int, int]]]):
    """What a loader process iterates over: samples, each with its shard's number and how many of the shard's records
    are read with it."""

    def __init__(
        self, dataset: Records, change: Collate | None, lot_size: int, address: RelayAddress
    ) -> None:
        self._parts = (dataset, change, lot_size)
        self._address = address
        self.turn = -1
        """Of the loop that it is for; -1: of the newest, whichever that is."""

    def __iter__(self) -> Iterator[tuple[Any, tuple[int, int]]]:
        # A process that lives on is asked to iterate anew, and by then it is for another loop.
        turn, self.turn = self.turn, -1
        return self._records(turn)

    def _records(self, turn: int) -> Iterator[tuple[Any, tuple[int, int]]]:
        client = self._address.connect(turn)
        reader = ShardReader(*self._parts)
        finished, is_empty = None, False
        try:
            while (given := client.next(finished, is_empty=is_empty)) is not None:
                order = RecordOrder(given.shard, given.split)
                finished, is_empty = given.shard.number, True
                try:
                    for read, sample in reader.samples(order, given.place):
                        is_empty = False
                        yield sample, (finished, read)
                except Exception as error:  # of the script's dataset: it may raise anything
                    client.fail(finished, _told(error))
                    raise
        finally:
            reader.close()
            client.close()


class Tagging:
    """Collates, and puts beside each batch what is read with it."""

    def __init__(self, collate: Collate, *, is_batched: bool) -> None:
        self._collate = collate
        self._is_batched = is_batched

    def __call__(self, samples: Any) -> tuple[Any, bytes]:
        pairs = samples if self._is_batched else [samples]
        given = msgspec.msgpack.encode(list({number: read for _, (number, read) in pairs}.items()))
        of = [sample for sample, _ in pairs]
        return self._collate(of if self._is_batched else of[0]), given


class Owner(Protocol):
    """The dataset that batches are of."""

    desk: Desk

    @property
    def relay(self) -> Relay: ...

    def feed(self) -> Feed: ...


class ShardBatches(torch.utils.data.DataLoader[Any]):
    """A DataLoader that knows which records its loop has used, however far its processes have read ahead."""

    def __init__(
        self, owner: Owner, prepare: Callable[[], None], *, collate_fn: Collate | None = None, **options: Any
    ) -> None:
        is_batched = options.get("batch_size", 1) is not None
        collate = collate_fn or (default_collate if is_batched else default_convert)
        if options.get("drop_last"):
            raise ConfigError("drop_last=True would count records as read that are left out: leave it away")
        # In order, a process that waits for a shard would keep back the batches of those that have records.
        self._feed = owner.feed()
        super().__init__(
            self._feed, collate_fn=Tagging(collate, is_batched=is_batched), in_order=False, **options
        )
        self._owner = owner
        self._prepare = prepare

    def __iter__(self) -> Any:
        self._prepare()
        return self._loop()

    def _loop(self) -> Iterator[Any]:
        desk, relay = self._owner.desk, self._owner.relay
        calls = desk.source.session  # opened before loader processes ask, several at a time
        turn = desk.begin()
        relay.break_off(turn - 1)
        self._feed.turn = turn
        consumer = 0
        try:
            batches = cast(Iterator[tuple[Any, bytes]], super().__iter__())
            while (got := self._next(calls, batches)) is not None:
                self._check(desk, turn)
                batch, given = got
                del got
                desk.give(_GIVEN.decode(given))
                consumer = id(sys._getframe().f_back)
                yield batch
                del batch
                desk.settle(turn)
                self._check(desk, turn)
            self._check(desk, turn)
        except GeneratorExit:
            relay.break_off(turn)
            desk.leave(turn, sys._getframe().f_back, consumer)
            raise
        except BaseException:  # the loop is over, however it ends
            relay.break_off(turn)
            desk.leave(turn)
            raise

    @staticmethod
    def _next(calls: ShardSession, batches: Iterator[tuple[Any, bytes]]) -> tuple[Any, bytes] | None:
        with calls.waiting():
            return next(batches, None)

    @staticmethod
    def _check(desk: Desk, turn: int) -> None:
        session().check()
        desk.check()
        if desk.turn != turn:
            raise ConfigError(
                "this loop over a ShardedDataset is over: another one has begun; begin a new one"
            )
