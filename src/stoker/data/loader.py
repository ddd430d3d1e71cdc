"""`stoker.Loader`: global batches, divided over the world of each step."""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import torch.distributed as dist

from stoker.base.rng import mix64
from stoker.cache.client.fleet import FleetClient
from stoker.data.announcer import Announcer
from stoker.data.dataset import Dataset
from stoker.data.group_order import WINDOW, digest_of, groups_of
from stoker.data.loader_account import at_exit, figures_of
from stoker.data.loader_batch import Collate, aligned, size_of
from stoker.data.loader_plan import Pass, Plan, groups_for
from stoker.data.loader_process import Done, Records
from stoker.data.loader_report import Report
from stoker.data.loader_sampler import NoBatchSampler
from stoker.data.loader_source import Source, context_of, new_source, pinning, whole_number
from stoker.data.loader_stats import LoaderStats
from stoker.data.order import parts_of
from stoker.data.seeding import seed_everything
from stoker.data.session import HandedOut, MicroBatch, Session, session
from stoker.errors import ConfigError, DatasetChanged

Shuffle = bool | Literal["groups"]


class Loader:
    """Yields this rank's share of each global batch, collated as torch does.

    `global_batch_size`: records per step over the whole world; it stays the same at every world size. The last,
    smaller batch of an epoch is yielded too. Shares may differ by a record; a rank without one gets a record of
    the batch to keep in step, with weight zero.

    `shuffle`: True for all records, "groups" where records lie together, as the rows of Parquet do: group after group
    is read, in another order each epoch, and the records of `shuffle_window` of them (16) are mixed at any time.
    `num_workers`: processes that read and decode ahead, `prefetch_factor` steps each; 0 reads in this process.
    `pin_memory`: batches come in pinned memory, where there is an accelerator. `multiprocessing_context`: how processes
    are started (`fork`, `spawn`, `forkserver`). `name`: tells loaders apart when scripts make them in varying order.
    `keep_position`: the next loop goes on where the last was left; False has each begin at the epoch's beginning, as
    PyTorch's DataLoader does: for validation.
    `announce`: tell the cache which records come next, so that it fetches them ahead and keeps what is read again
    soonest; only for a `stoker.Dataset`. `report`: when the program ends, print on standard error where the time of the
    loops went (`STOKER_REPORT=0` keeps all loaders from it).
    `virtual_ranks`: exact mode. Each global batch is divided into so many micro-batches, and yielded one by one, by
    whatever world there is; losses and weights are the same to the bit at every world size (docs/how-to/exact.md).

    One `for` loop is one epoch, from wherever the last commit left it. The position (epoch and cursor) belongs
    to each `state.commit()`. A loader that is restored to the end of an epoch yields nothing once, then moves on; who
    counts epochs itself, as frameworks do, says with `set_epoch` which one is next.
    Without Stoker's runtime, the world is that of torch.distributed where that is set up, else this process alone.

    A batch from a loader process lies in memory that is used again once the last of its tensors is gone.

    Raises ConfigError for arguments that cannot be used and for a dataset without groups where they are asked for, what
    reading and `decode` raise, and LoaderWorkerLost when a process of it was killed; the next loop goes on from the
    position, with new processes.
    """

    def __init__(
        self,
        dataset: Records,
        *,
        global_batch_size: int,
        shuffle: Shuffle = False,
        shuffle_window: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        multiprocessing_context: str | BaseContext | None = None,
        name: str | None = None,
        keep_position: bool = True,
        announce: bool = True,
        report: bool = True,
        virtual_ranks: int | None = None,
    ) -> None:
        whole_number("global_batch_size", global_batch_size, 1)
        whole_number("num_workers", num_workers, 0)
        whole_number("prefetch_factor", prefetch_factor, 1)
        whole_number("seed", seed)
        if virtual_ranks is not None:
            whole_number("virtual_ranks", virtual_ranks, 1)
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"collate_fn must be a function of a list of samples, got {collate_fn!r}")
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ConfigError(f"a dataset needs __len__ and __getitem__: {type(dataset).__name__} has not")
        self.shuffle_window = _window(shuffle, shuffle_window)
        """Groups that are mixed; 0 where the order is not one of groups."""
        if self.shuffle_window and not hasattr(dataset, "groups"):
            groups_of(dataset)  # raises now what the first loop would
        self.virtual_ranks = virtual_ranks or 0
        """Micro-batches of each global batch; 0: it is divided over the world."""
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._part: MicroBatch | None = None
        """The newest that the present loop has handed out."""
        self.cursor = 0
        """Records of the epoch that have been handed out, over the whole world."""
        self.plan: Plan | None = None
        """Of the pass under way: all steps to come, with their records."""
        self._pass = 0
        self._keeps_position = keep_position
        self._is_restored = False
        """Since the last loop: then the script still has to end the epoch that the position is in."""
        self._session = session()
        if virtual_ranks:
            self._session.divide(virtual_ranks)
        self._new_source = functools.partial(
            new_source,
            dataset,
            collate_fn,
            prefetch_factor=prefetch_factor,
            context=context_of(multiprocessing_context),
            pin=pinning(pin_memory),
        )
        self.num_workers = num_workers
        """Processes that read and decode ahead."""
        self._use(num_workers)
        self.name = self._session.register(self, name)
        self._announcer: Announcer | None = None
        self._announces = announce
        self._reports = report
        self.stats = LoaderStats(self.name, num_workers)
        """How long loops waited for data, and what for."""

    def __len__(self) -> int:
        """Steps in a whole epoch; with virtual ranks, those of this rank in the present world."""
        steps = self.global_batches
        if not self.virtual_ranks:
            return steps
        return steps * len(parts_of(*world_of(self._session), self.virtual_ranks))

    @property
    def global_batches(self) -> int:
        """Steps of an optimizer in a whole epoch, at any world size: what learning-rate schedules are made of."""
        return math.ceil(len(self.dataset) / self.global_batch_size)

    @property
    def batch_size(self) -> int:
        """Records of a step on this rank, at most: what frameworks ask for under this name."""
        return math.ceil(self.global_batch_size / (self.virtual_ranks or world_of(self._session)[1]))

    @property
    def sampler(self) -> Self:
        """Whom frameworks tell of epochs."""
        return self

    @property
    def batch_sampler(self) -> NoBatchSampler:
        """What frameworks look for where there is a sampler."""
        return NoBatchSampler(self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """The next loop is this epoch: from its beginning, or from the position if that is in it."""
        if epoch != self.epoch:
            self.epoch, self.cursor, self._is_restored = epoch, 0, False
            self._end_pass()

    def retune(self, *, num_workers: int) -> None:
        """From the next batch on, load with so many processes. Nothing is read twice or lost."""
        micro_batch = self._session.micro_batch
        if self.virtual_ranks and micro_batch is not None and not micro_batch.is_last:
            raise ConfigError("retune a loader in exact mode after a commit, not within a global batch")
        self._end_pass()
        self._finalizer()
        self._use(num_workers)

    def report(self) -> Report:
        """Where the time of the loops went so far, and what would help: to be printed. It is not said again at the end
        of the program, unless loops go on."""
        self.stats.account.told()
        return self.stats.summary()

    def close(self) -> None:
        """End the loader's processes. A next loop starts new ones and goes on from the position."""
        self._source.close()
        if self._announcer is not None:
            self._announcer.close()
            self._announcer = None

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            f"loader {self.name!r} cannot be copied or sent to another process: send its dataset, and make one there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        """One epoch, from the position; goes on at it with other processes where `retune` came in between."""
        began = time.perf_counter()
        if self.cursor >= len(self.dataset) and not self._is_restored:
            # The loop before took all batches and did not ask whether there was another.
            self.epoch, self.cursor = self.epoch + 1, 0
        if not self._keeps_position:
            self.cursor = 0
        self._is_restored = False
        epoch, source = self.epoch, None
        while source is not self._source:
            source = self._source
            yield from self._batches(source, epoch, began)
            began = time.perf_counter()
        self.stats.account.close()
        self.epoch, self.cursor = epoch + 1, 0
        self.plan = None

    def _use(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._source: Source = self._new_source(num_workers=num_workers)
        self._finalizer = weakref.finalize(self, self._source.close)

    def _batches(self, source: Source, epoch: int, began: float) -> Iterator[Any]:
        number = self._end_pass()
        plan = self.plan = self._planned(number, epoch, len(self.dataset))
        self._note_pass(plan.of)
        source.begin(plan)
        try:
            yield from self._steps(source, plan, number, began)
        finally:
            self._leave_parts()

    def _steps(self, source: Source, plan: Plan, number: int, began: float) -> Iterator[Any]:
        live, records, epoch = self._session, plan.of.records, plan.of.epoch
        if self._announcer is None:
            self._announcer = self._new_announcer()
        if self._announcer is not None:
            self._announcer.follow(plan.of)
        started = time.perf_counter()
        for step in range(plan.steps):
            live.check()
            if self._pass != number:
                raise ConfigError(
                    f"loader {self.name!r} is iterated twice at once: finish one loop before the next"
                )
            waiting = time.perf_counter()
            done = source.take(step) if not self.virtual_ranks else self._take_micro_batch(source, plan, step)
            now = time.perf_counter()
            live.waited_s += now - waiting
            if self._announcer is not None:
                read, asked = source.read_until(step), source.asked_until(step)
                self._announcer.read(plan.batches(read), plan.batches(asked))
            share = plan.share(step)
            times = done.times
            if step == 0:
                waiting, times = began, times._replace(ready_s=max(started, times.ready_s))
            self.stats.note(waiting, now, times, share.records, size_of(done.batch))
            self.stats.ran(now - began, self.num_workers)
            began = now
            if plan.begins_batch(step):  # on all ranks alike, though some read more parts of it than others
                self.cursor += share.batch_records
            live.share = share
            if live.on_batch is not None:
                counted = tuple(plan.records(step)) if share.records else ()
                live.on_batch(HandedOut(self.name, epoch, counted, self.cursor, records))
            batch = done.batch
            del done
            yield batch
            del batch
            if source is not self._source:
                break
        self.stats.ran(time.perf_counter() - began, self.num_workers)

    def _leave_parts(self) -> None:
        """A loop is left, with this rank's last part of a global batch or in the midst of one."""
        live, (part, self._part) = self._session, (self._part, None)
        if part is not None and part is live.micro_batch:
            live.micro_batch = None
            if live.end_micro_batches is not None:
                live.end_micro_batches(part)

    def _take_micro_batch(self, source: Source, plan: Plan, step: int) -> Done:
        """One virtual rank's part, with random generators that depend on nothing else."""
        live, (number, count), seed = self._session, plan.part(step), plan.random_seed(step)
        live.micro_batch = self._part = micro_batch = MicroBatch(
            number=number,
            virtual_ranks=count,
            seed=mix64(seed),
            batch_seed=mix64(plan.start(step) ^ mix64(plan.of.seed + plan.of.epoch)),
            parts=plan.parts,
            is_first=plan.begins_batch(step),
            is_last=plan.ends_batch(step),
            share=plan.share(step),
        )
        if live.begin_micro_batch is not None:
            live.begin_micro_batch(micro_batch)
        seed_everything(seed)  # what is decoded in this process
        done = source.take(step)
        seed_everything(micro_batch.seed)
        return done._replace(batch=aligned(done.batch))

    def _note_pass(self, of: Pass) -> None:
        account, dataset = self.stats.account, self.dataset
        if account.ask is None and isinstance(dataset, Dataset) and dataset.is_cached:
            client, bucket = dataset.served[:2]
            if not isinstance(client, FleetClient):  # of several servers one tells its own figures only
                account.ask = functools.partial(figures_of, client, bucket)
        account.begin(of.epoch, of.rank, of.world_size)
        account.is_wanted = self._reports
        at_exit().add(account)

    def _new_announcer(self) -> Announcer | None:
        """Where the dataset is read through a cache."""
        dataset = self.dataset
        if not self._announces or not isinstance(dataset, Dataset) or not dataset.is_cached:
            return None
        client, bucket = dataset.served[:2]
        group = f"{self.name}/{self._fingerprint}"
        announcer = Announcer(dataset.records, client, bucket, self.name, group)
        self.stats.figures["prefetched"] = announcer.figures
        return announcer

    def _planned(self, number: int, epoch: int, records: int) -> Plan:
        rank, world_size = world_of(self._session)
        if self.virtual_ranks and world_size > self.virtual_ranks:
            raise ConfigError(
                f"loader {self.name!r} has virtual_ranks={self.virtual_ranks}, too few for a world of {world_size}: "
                "keep the world at most as large (fewer workers), or begin the run anew with more virtual ranks"
            )
        of = Pass(
            number=number,
            records=records,
            seed=self.seed,
            epoch=epoch,
            shuffle=bool(self.shuffle),
            cursor=self.cursor,
            global_batch_size=self.global_batch_size,
            rank=rank,
            world_size=world_size,
            window=self.shuffle_window,
            virtual_ranks=self.virtual_ranks,
        )
        return Plan(of, groups_for(of, self.dataset))

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
        self._is_restored = True
        self._end_pass()

    def _end_pass(self) -> int:
        """Whatever is still being read is not wanted any more; returns the number of the next pass."""
        self._pass += 1
        return self._pass

    @functools.cached_property
    def _fingerprint(self) -> str:
        own = getattr(self.dataset, "fingerprint", None)
        order = str(int(bool(self.shuffle)))
        if self.shuffle_window:
            order = f"groups-{self.shuffle_window}-{digest_of(self.dataset)}"
        return f"{len(self.dataset)}/{self.seed}/{order}/{own or ''}"


def _window(shuffle: Shuffle, window: int | None) -> int:
    """How many groups are mixed; 0 where the order is not one of groups. Raises ConfigError."""
    if shuffle not in (True, False, "groups"):
        raise ConfigError(f"shuffle={shuffle!r} must be False, True or 'groups'")
    if shuffle != "groups":
        if window is not None:
            raise ConfigError("shuffle_window says how many groups are mixed: it goes with shuffle='groups'")
        return 0
    if window is not None and window < 1:
        raise ConfigError(f"shuffle_window must be at least 1, got {window}")
    return WINDOW if window is None else window


def world_of(live: Session) -> tuple[int, int]:
    """Rank and size: as the runtime says; without it as torch.distributed does, if that is set up."""
    if live.on_batch is None and live.world_size == 1 and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return live.rank, live.world_size
