"""`stoker.ShardedDataset`: the records of the shards that this worker gets from the master."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch.utils.data

from stoker.data.session import session
from stoker.errors import ConfigError, DatasetChanged
from stoker.settings import worker_settings
from stoker.train.runtime import runtime
from stoker.train.sharded_desk import Desk
from stoker.train.sharded_loop import Feed, ShardBatches, ShardLoop
from stoker.train.sharded_reader import Records, ShardReader
from stoker.train.sharded_relay import Relay
from stoker.train.shards import shards
from stoker.train.shards_session import ShardSession
from stoker.wire.shards import ShardState, ShardStatus

READ_SIZE = 64


class ShardedDataset(torch.utils.data.IterableDataset[Any]):
    """Records of a dataset, in shards that the master leases to whoever asks: fast workers read more.

        data = stoker.ShardedDataset(stoker.Dataset(url), shard_size=1000, epochs=3, shuffle=True)
        for batch in torch.utils.data.DataLoader(data, batch_size=32):
            train_on(batch)

    Every worker runs the same loop over all epochs; it ends when every record has been given to a loop, on whatever
    worker. A DataLoader with processes is made by `data.loader(batch_size=32, num_workers=4)`.

    `dataset`: a `stoker.Dataset` or another map-style dataset. `map` changes a sample. `read_size`: records that are
    read with one request, ahead of need. `name` tells several of them apart. `shard_size`, `epochs`, `shuffle`,
    `shuffle_records`, `seed`, `lease_timeout_s` and `max_failures` are as those of `stoker.shards`.

    Each record is read at least once: a shard is done when the loop has used all of its records and asks for more; that
    of a worker that dies is given to another one, from its beginning. With `exactly_once` records count at `commit()`,
    or, inside an `@stoker.elastic` function, at each `state.commit()`: what a worker has read but not committed when it
    dies is read again, and nothing else.

    Raises ConfigError for values that cannot be, or that differ from another worker's; what reading raises; JobError
    when a shard has failed the job.
    """

    def __init__(
        self,
        dataset: Records,
        *,
        shard_size: int,
        epochs: int = 1,
        shuffle: bool = False,
        shuffle_records: bool = False,
        seed: int = 0,
        exactly_once: bool = False,
        map: Callable[[Any], Any] | None = None,
        read_size: int = READ_SIZE,
        lease_timeout_s: float | None = None,
        max_failures: int = 3,
        name: str = "sharded",
        shard_session: ShardSession | None = None,
    ) -> None:
        if read_size < 1:
            raise ConfigError(f"read_size must be at least 1, got {read_size}")
        self.dataset = dataset
        self.name = name
        self.exactly_once = exactly_once
        self._reading = (dataset, map, read_size)
        opened = functools.partial(
            shards,
            name,
            shard_size=shard_size,
            epochs=epochs,
            shuffle=shuffle,
            shuffle_records=shuffle_records,
            seed=seed,
            lease_timeout_s=lease_timeout_s,
            max_failures=max_failures,
            session=shard_session,
        )
        self.desk = Desk(lambda: opened(records=len(dataset)), exactly_once=exactly_once)
        """What is held, and what of it is read."""
        self._position = Position(dataset, self.desk, exactly_once=exactly_once)
        session().register(self._position, f"shards-{name}")

    def __iter__(self) -> Iterator[Any]:
        """The records of this worker's shards, until none are left."""
        if torch.utils.data.get_worker_info() is not None:
            raise ConfigError(self._misuse)
        self._position.put_back()
        return ShardLoop(self.desk, ShardReader(*self._reading), self.desk.begin())

    def loader(
        self, *, batch_size: int | None = 1, num_workers: int = 0, **options: Any
    ) -> torch.utils.data.DataLoader[Any]:
        """A DataLoader over it, of which processes may be a part; `options` are torch's.

        Each process reads shards of its own, and batches come as they are ready. What is read ahead and not used when
        the loop or the worker ends does not count.
        """
        return ShardBatches(
            self, self._position.put_back, batch_size=batch_size, num_workers=num_workers, **options
        )

    def commit(self) -> None:
        """All records that the loop has been given by now count as read. Only with `exactly_once`.

        Raises JobError where a shard was leased for too long and another worker has it: then none of them count.
        """
        self.desk.commit()

    def status(self) -> ShardStatus:
        """How far the dataset is, over all workers."""
        return self.desk.source.status()

    def state_dict(self) -> dict[str, Any]:
        """The progress over all workers, as plain values for a checkpoint: what is done, or committed."""
        return self._position.progress()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the progress back to a checkpoint's, for all workers of however many: one of them calls this, before or
        between loops. Raises DatasetChanged if it is of other data, ConfigError if of another dataset."""
        self._position.put_back_to(state, only_new=False)

    @functools.cached_property
    def relay(self) -> Relay:
        """Where loader processes of this one ask."""
        return Relay(self.desk, self)

    def feed(self) -> Feed:
        """What loader processes iterate over."""
        return Feed(*self._reading, self.relay.address)

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(self._misuse)

    @property
    def _misuse(self) -> str:
        return (
            "a process of a DataLoader reads ahead, and cannot know which records the training loop has used: make the "
            f"DataLoader by data.loader(num_workers=…, batch_size=…) of the ShardedDataset {self.name!r}, which does, "
            "or without processes"
        )


class Position:
    """How far it is: what belongs to a State's commits and checkpoints."""

    def __init__(self, dataset: Records, desk: Desk, *, exactly_once: bool) -> None:
        self._dataset = dataset
        self._desk = desk
        self._exactly_once = exactly_once
        self._saved: dict[str, Any] | None = None
        """Of the checkpoint that this process starts from."""
        self._is_here = False
        """The progress is that of this worker's state."""

    def state_dict(self) -> dict[str, Any]:
        """A commit is being sealed, or was."""
        if not self._is_here and runtime().core.phase == "starting":
            return self._first()
        self.put_back()
        if not self._exactly_once:
            return self.progress()
        return {"data": self._fingerprint, "shards": self._desk.commit()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The step under way is undone; or this worker begins, with the state of a checkpoint or of another worker."""
        self._desk.roll_back()
        if runtime().core.phase == "starting":
            self._saved = state
        else:
            self._is_here = True

    def progress(self) -> dict[str, Any]:
        """Over all workers."""
        return {"data": self._fingerprint, "shards": self._desk.source.state_dict()}

    def put_back(self) -> None:
        """A loop begins: in an elastic function, at the progress of the state, unless that is of a live worker.

        All workers of a world do so, and perhaps one that has come later: unless this one is alone, only what nobody
        has begun is put back.
        """
        if self._is_here or runtime().core.phase == "starting":
            return
        self._is_here = True
        is_alone = worker_settings().agent_socket is None or session().world_size == 1
        self.put_back_to(self._first(), only_new=not is_alone)

    def _first(self) -> dict[str, Any]:
        """What this worker's state began with: that of a checkpoint, or nothing read."""
        if self._saved is not None:
            return self._saved
        source = self._desk.source
        nothing = ShardState(source.name, source.split, handed_out=0)
        return {"data": self._fingerprint, "shards": msgspec.to_builtins(nothing)}

    def put_back_to(self, state: dict[str, Any], *, only_new: bool) -> None:
        """Raises DatasetChanged, ConfigError."""
        if state["data"] != self._fingerprint:
            raise DatasetChanged(
                f"the records are not those that the state was saved with (fingerprint {self._fingerprint}, expected "
                f"{state['data']}): restore the dataset, or start anew"
            )
        self._desk.forget()
        self._desk.source.load_state_dict(state["shards"], only_new=only_new)

    @functools.cached_property
    def _fingerprint(self) -> str:
        return f"{len(self._dataset)}/{getattr(self._dataset, 'fingerprint', '')}"
