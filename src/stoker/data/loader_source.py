"""Where a loader's batches come from: this process, or processes of their own."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import BaseContext
from numbers import Integral
from typing import Any, Protocol

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from stoker.data.loader_batch import Collate, Collator
from stoker.data.loader_crew import Crew
from stoker.data.loader_plan import Plan, expect_groups
from stoker.data.loader_process import Done, Records, fetch
from stoker.errors import ConfigError

Pin = Callable[[Any], Any]


class Source(Protocol):
    """Makes the batches of one pass after the other."""

    def begin(self, plan: Plan) -> None:
        """From here on steps are of this plan's pass."""
        ...

    def take(self, step: int) -> Done:
        """The steps are asked for in their order. Raises what reading and decoding do, LoaderWorkerLost."""
        ...

    def read_until(self, step: int) -> int:
        """How many steps were read, of which those up to this one were taken."""
        ...

    def asked_until(self, step: int) -> int:
        """How many steps were read, or are."""
        ...

    def close(self) -> None:
        """End what was started. It may be used again."""
        ...


class Here:
    """Reads each step when it is asked for."""

    def __init__(self, dataset: Records, collate: Collate | None, pin: Pin | None) -> None:
        self._dataset = dataset
        self._collate = collate or Collator(None)
        self._pin = pin
        self._plan: Plan | None = None

    def begin(self, plan: Plan) -> None:
        self._plan = plan
        expect_groups(plan.of, self._dataset)

    def take(self, step: int) -> Done:
        assert self._plan is not None
        batch, times = fetch(self._dataset, self._plan.records(step), self._collate)
        if self._pin is not None:
            times = times._replace(came_s=times.collated_s)
            batch = self._pin(batch)
        return Done(self._plan.of.number, step, times, batch)

    def read_until(self, step: int) -> int:
        return step + 1

    def asked_until(self, step: int) -> int:
        return step + 1

    def close(self) -> None:
        self._plan = None


class Elsewhere:
    """Has steps read ahead by processes, which are started when they are first needed, and again after a failure."""

    def __init__(self, start: Callable[[], Crew], pin: Pin | None) -> None:
        self._start = start
        self._pin = pin
        self._crew: Crew | None = None
        self._plan: Plan | None = None
        self._next = 0
        self._pinned: dict[int, Future[Any]] = {}

    def begin(self, plan: Plan) -> None:
        self._plan = plan
        self._next = 0
        self._pinned.clear()
        if plan.steps > 0:
            if self._crew is None or not self._crew.is_open:
                self._crew = self._start()
            self._crew.begin(plan.of)
            self._feed(self._crew, plan)

    def take(self, step: int) -> Done:
        crew, plan = self._crew, self._plan
        assert crew is not None
        assert plan is not None
        done = crew.take(step)
        came_s = time.perf_counter()
        self._feed(crew, plan)
        if done.failure is not None:
            raise done.failure.raised()
        if self._pin is None:
            return done
        ahead = self._pinned.pop(step, None)
        batch = ahead.result() if ahead is not None else self._pin(done.batch)
        for other in crew.look():
            if other.failure is None and other.step not in self._pinned:
                self._pinned[other.step] = self._pinning.submit(self._pin, other.batch)
        return done._replace(batch=batch, times=done.times._replace(came_s=came_s))

    def asked_until(self, step: int) -> int:
        return max(self._next, step + 1)

    def read_until(self, step: int) -> int:
        done = set() if self._crew is None else {done.step for done in self._crew.look()}
        step += 1
        while step in done:
            step += 1
        return step

    def close(self) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()
        self._pinned.clear()

    def _feed(self, crew: Crew, plan: Plan) -> None:
        while self._next < plan.steps and crew.has_room:
            crew.give(self._next)
            self._next += 1

    @functools.cached_property
    def _pinning(self) -> ThreadPoolExecutor:
        """What has come before its turn is copied to pinned memory while the training step goes on."""
        return ThreadPoolExecutor(1, "stoker-loader-pin")


def pinning(wanted: bool) -> Pin | None:
    """Copies a batch to pinned memory; None where that is not wanted, or there is nothing to copy it to.

    By torch's own allocator, which keeps the memory of a copy to the device that is still under way.
    """
    if not wanted or not torch.accelerator.is_available():
        return None
    return pin_memory


def whole_number(name: str, value: Any, least: int | None = None) -> None:
    """Raises ConfigError for what is none, or below the least."""
    if not isinstance(value, Integral) or (least is not None and int(value) < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ConfigError(f"{name} must be a whole number{at_least}, got {value!r}")


def context_of(method: str | BaseContext | None) -> BaseContext | None:
    """How processes are started; None: as is usual when they are. Raises ConfigError for what is no start method."""
    if method is None or isinstance(method, BaseContext):
        return method
    try:
        return multiprocessing.get_context(method)
    except (ValueError, TypeError):
        known = ", ".join(multiprocessing.get_all_start_methods())
        raise ConfigError(f"multiprocessing_context={method!r} must be one of {known}") from None


def new_source(
    dataset: Records,
    collate: Collate | None,
    *,
    num_workers: int,
    prefetch_factor: int,
    context: BaseContext | None,
    pin: Pin | None,
) -> Source:
    """Reads here without workers."""
    if num_workers == 0:
        return Here(dataset, collate, pin)
    return Elsewhere(functools.partial(Crew, dataset, collate, num_workers, prefetch_factor, context), pin)
