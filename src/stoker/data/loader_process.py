"""A loader process: reads, decodes and collates the steps that it is told to, one after the other."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data._utils import worker as torch_worker

from stoker.data.loader_arena import ArenaFile, ArenaWriter
from stoker.data.loader_batch import BatchWriter, Collate, Collator
from stoker.data.loader_plan import Pass, Plan, expect_groups, groups_for
from stoker.data.loader_spent import spent
from stoker.data.seeding import seed_host
from stoker.data.waiting import Times
from stoker.errors import BadRecord, StokerError


class Records(Protocol):
    """A dataset by record number: `stoker.Dataset`, or any map-style dataset of PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, record: int) -> Any: ...


class Job(NamedTuple):
    """What a loader process is started with."""

    dataset: Records
    collate: Collate | None
    """None: as torch does it."""
    number: int
    workers: int
    parent: int
    """Process id of the training process: with a fork server it is not the parent."""


class Done(NamedTuple):
    """What a loader process says of a step."""

    number: int
    """Of the pass."""
    step: int
    times: Times
    batch: Any = None
    failure: Failure | None = None


class Failure(NamedTuple):
    """An exception in a loader process: itself where it can be pickled, and as text."""

    error: BaseException | None
    text: str

    def raised(self) -> BaseException:
        """What the training process raises: its own type, with where it came from as a note."""
        if self.error is None:
            return RuntimeError(self.text)
        if not isinstance(self.error, StokerError):
            self.error.add_note(self.text)
        return self.error


def fetch(dataset: Records, records: list[int], collate: Callable[[list[Any]], Any]) -> tuple[Any, Times]:
    """A batch, and how long that took. Raises what reading, decoding and collating do."""
    meter = spent()
    meter.take()
    began = time.perf_counter()
    several = getattr(dataset, "__getitems__", None)
    samples = several(records) if several is not None else [dataset[record] for record in records]
    read = time.perf_counter()
    if not samples:
        raise BadRecord(f"none of the {len(records)} records of a step can be used: {str(records)[:200]}")
    batch = collate(samples)
    done = time.perf_counter()
    return batch, Times(began, read, done, meter.take())


def work(job: Job, connection: Connection, file: ArenaFile) -> None:
    """Until the training process closes the connection or is gone."""
    code = 1
    try:
        _prepare(job)
        with suppress(EOFError, ConnectionError):
            _serve(job, connection, file)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # Not by way of the interpreter's end: there, what the training process had open is taken down once more.
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _prepare(job: Job) -> None:
    """Ctrl-C is for the training process, which ends this one; its own handlers and wake-ups are not for here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
    gc.freeze()
    torch.set_num_threads(1)
    info = torch_worker.WorkerInfo(id=job.number, num_workers=job.workers, seed=0, dataset=job.dataset)  # type: ignore[arg-type]
    torch_worker._worker_info = info


def _serve(job: Job, connection: Connection, file: ArenaFile) -> None:
    writer = BatchWriter(ArenaWriter(file), lambda slot: file.mark(slot, used=True))
    collate = job.collate or Collator(writer)
    plan: Plan | None = None
    ready_s = time.perf_counter()
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    try:
        parent = os.pidfd_open(job.parent)
    except ProcessLookupError:
        return
    poll.register(parent, select.POLLIN)
    while True:
        if any(fd == parent for fd, _ in poll.poll()):
            return
        told = connection.recv()
        if isinstance(told, Pass):
            plan = Plan(told, groups_for(told, job.dataset))
            if job.number == 0:  # one of them has enough to say
                expect_groups(told, job.dataset)
            continue
        assert plan is not None
        if plan.of.number == file.wanted_pass:
            done = _done(job, plan, told, writer, collate)
            _send(connection, writer, done._replace(times=done.times._replace(ready_s=ready_s)))
        else:
            _send(connection, writer, Done(plan.of.number, told, Times()))


def _done(job: Job, plan: Plan, step: int, writer: BatchWriter, collate: Collate) -> Done:
    writer.begin()
    seed_host(plan.random_seed(step))
    try:
        batch, times = fetch(job.dataset, plan.records(step), collate)
    except Exception as error:  # noqa: BLE001 - the user's code; it is raised where the loop is
        return Done(plan.of.number, step, Times(), failure=_failure(job, error))
    return Done(plan.of.number, step, times, batch)


def _send(connection: Connection, writer: BatchWriter, done: Done) -> None:
    try:
        message = writer.message(done)
    except Exception as error:  # noqa: BLE001 - as above: pickling runs the user's code
        text = (
            f"a batch ({type(done.batch).__name__}) cannot be sent from a loader process to the training process: "
            f"{type(error).__name__}: {error}"
        )
        if "shared memory" in str(error):
            text += (
                ". Tensors that are no plain ones, such as sparse ones, cross by /dev/shm: have collate_fn make plain "
                "ones, or give the container a larger --shm-size"
            )
        message = writer.message(done._replace(batch=None, failure=Failure(None, text)))
    connection.send_bytes(message)


def _failure(job: Job, error: Exception) -> Failure:
    text = "".join(traceback.format_exception(error))
    told = f"in loader process {job.number} (pid {os.getpid()}):\n{text.rstrip()}"
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # noqa: BLE001 - an exception that cannot be brought back, however it fails
        return Failure(None, told)
    return Failure(error, told)
