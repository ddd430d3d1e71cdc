"""The shell around `Tuner`: measures steps, brings the ranks together, applies what rank 0 decides."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from stoker.train.accelerator import (
    empty_cache,
    is_out_of_memory,
    memory_in_use_bytes,
    peak_memory_bytes,
    reset_peak_memory,
)
from stoker.train.failures import with_causes
from stoker.train.tuner import (
    Bounds,
    Decision,
    Known,
    Measurement,
    Setting,
    Tuner,
    combine,
    steps_to_measure,
    tightest,
)

log = logging.getLogger("stoker.train")
WARMUP_STEPS = 5
FIRST_STEPS = 10
NS = 1_000_000_000
OUT_OF_MEMORY = "out of memory"
TEXT_BYTES = 160
"""Of what ranks tell each other of a failure."""


@runtime_checkable
class TunedLoader(Protocol):
    """What tuning needs of a loader."""

    @property
    def num_workers(self) -> int: ...

    def retune(self, *, num_workers: int) -> None:
        """From the next batch on, load with so many processes. Nothing is read twice or lost."""
        ...


class Exchange(Protocol):
    """How ranks agree. Both are collectives: every rank calls them at the same commit."""

    @property
    def rank(self) -> int: ...

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, by rank."""
        ...

    def broadcast(self, values: Sequence[int]) -> list[int]:
        """Rank 0's values."""
        ...


class Alone:
    """The exchange of a world of one."""

    rank = 0

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)]

    def broadcast(self, values: Sequence[int]) -> list[int]:
        return list(values)


class GroupExchange:
    """Over torch.distributed's default group. Raises what its collectives raise."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(values, dtype=torch.int64, device=self._device)
        every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        return [[int(v) for v in one.tolist()] for one in every]

    def broadcast(self, values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.broadcast(tensor, src=0)
        return [int(v) for v in tensor.tolist()]


@dataclass
class _Watch:
    """The measuring of one setting, after the steps in which loader processes start and queues fill up."""

    wanted: int
    """Steps to measure."""
    skip: int
    share: int = 1
    waited_s: float = 0.0
    """In the step under way."""
    committed_at: float | None = None
    steps_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)


class Tuning:
    """One worker's part of `--auto-tune`.

    `enter` once in each new world, `waited` around each wait for a batch, `commit` after each commit that does not end
    the world. Ranks count the same commits, so they come to the same collectives; between measurements there are none.
    `say` gets every decision, on rank 0 only.
    """

    def __init__(
        self,
        tuner: Tuner,
        loader: TunedLoader,
        device: torch.device,
        *,
        say: Callable[[Decision], None] = lambda decision: log.info("auto-tune: %s", decision.why),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tuner = tuner
        self._loader = loader
        self._device = device
        self._say = say
        self._clock = clock
        self._bounds = tuner.bounds
        self._exchange: Exchange = Alone()
        self._done = False
        self._failure = ""
        """What the loader has said or `OUT_OF_MEMORY`, if that was the fault of what was tuned."""
        self.setting = tuner.best
        """What this rank runs now; `micro_batch` is what a State cuts its batches by."""
        self._watch = self._watch_for(FIRST_STEPS)

    def begin_with(self, micro_batch: int) -> None:
        """The script cuts its batches into pieces of so many records, unless told otherwise."""
        self._tuner.begin_with(micro_batch)
        if self.setting.micro_batch == 0:
            self.setting = self.setting._replace(micro_batch=micro_batch)

    def enter(self, exchange: Exchange, bounds: Bounds | None = None) -> None:
        """A new world has been joined: agree on the setting. A collective. `bounds`: this rank's, if they changed."""
        self._exchange = exchange
        self._bounds = bounds or self._bounds
        ranks = exchange.gather([*self._bounds, *_from_text(self._failure)])
        self._failure = ""
        self._tuner.bounds = tightest([Bounds(*numbers[:2]) for numbers in ranks])
        failures = sorted({_to_text(numbers[2:]) for numbers in ranks} - {""})
        taken_back = [self._take_back(failure) for failure in failures]
        begun = self._tuner.world_changed(_known_by_rank_zero(exchange, self._tuner.known))
        for decision in (*taken_back, begun):
            if decision is not None and exchange.rank == 0:
                self._say(decision)
        self._done = False
        self._apply(begun.setting)
        self._watch = self._watch_for(FIRST_STEPS)

    def waited(self, seconds: float) -> None:
        """The loop has waited so long for a batch."""
        self._watch.waited_s += seconds

    def commit(self, share: int) -> None:
        """A step is committed. `share`: records of this rank in it. Every so many steps this is a collective."""
        if self._done:
            return
        watch, now = self._watch, self._clock()
        last, waited_s = watch.committed_at, watch.waited_s
        watch.committed_at, watch.waited_s = now, 0.0
        watch.share = max(watch.share, share)
        if last is None or watch.skip > 0:
            watch.skip -= 1
            if watch.skip <= 0:
                reset_peak_memory(self._device)
            return
        watch.steps_s.append(now - last)
        watch.waits_s.append(waited_s)
        if len(watch.steps_s) >= watch.wanted:
            self._decide()

    def failed(self, error: BaseException) -> bool:
        """Whether an exception of the step is the fault of what was tuned: then the step is to be undone, and the world
        to be left and entered anew, where the ranks agree on another setting."""
        if self._tuner.has_added_workers and is_of_loader(error, self._loader):
            self._failure = _last_line(error)
            return True
        if not self._tuner.may_be_at_fault or not any(is_out_of_memory(one) for one in with_causes(error)):
            return False
        self._failure = OUT_OF_MEMORY
        for one in with_causes(error):
            traceback.clear_frames(one.__traceback__)  # they hold the step's tensors
        empty_cache(self._device)
        return True

    def _take_back(self, failure: str) -> Decision | None:
        if failure == OUT_OF_MEMORY:
            return self._tuner.out_of_memory()
        return self._tuner.loader_failed(failure)

    def _decide(self) -> None:
        """Bring the ranks' measurements together; rank 0 decides for all."""
        gathered = self._exchange.gather(_to_numbers(self._measurement()))
        measured = combine([_from_numbers(numbers) for numbers in gathered])
        if self._exchange.rank == 0:
            mine = self._tuner.step(measured)
            self._say(mine)
        else:
            mine = Decision(self.setting, "")
        steps = steps_to_measure(measured.step_s)
        numbers = self._exchange.broadcast([*self._tuner.best, *mine.setting, int(mine.done), steps])
        best, running, (done, steps) = Setting(*numbers[:2]), Setting(*numbers[2:4]), numbers[4:]
        self._tuner.follow(best, running)
        self._done = bool(done)
        self._apply(running)
        self._watch = self._watch_for(steps)

    def _measurement(self) -> Measurement:
        watch = self._watch
        step_s = median(watch.steps_s)
        spread_s = 1.4826 * median(abs(s - step_s) for s in watch.steps_s)
        return Measurement(
            step_s=step_s,
            error_s=2 * 1.2533 * spread_s / len(watch.steps_s) ** 0.5,
            wait_s=median(watch.waits_s),
            share=watch.share,
            peak_bytes=peak_memory_bytes(self._device),
            resident_bytes=memory_in_use_bytes(self._device),
        )

    def _apply(self, setting: Setting) -> None:
        if setting.num_workers != self._loader.num_workers:
            self._loader.retune(num_workers=setting.num_workers)
        self.setting = setting

    def _watch_for(self, steps: int) -> _Watch:
        return _Watch(wanted=steps, skip=WARMUP_STEPS + 2 * self.setting.num_workers)


def _known_by_rank_zero(exchange: Exchange, known: Known) -> Known:
    numbers = exchange.broadcast([*known.best, *known.given, *known[2:]])
    return Known(Setting(*numbers[:2]), Setting(*numbers[2:4]), *numbers[4:])


def is_of_loader(error: BaseException, loader: TunedLoader) -> bool:
    """Whether an exception, or one that led to it, came out of a loader, or tells that a loader's process is dead:
    PyTorch raises that wherever the loop is by then. An interrupt while the loop waits for data is none."""
    if not isinstance(error, Exception):
        return False
    for one in with_causes(error):
        if isinstance(one, RuntimeError) and str(one).startswith("DataLoader worker (pid"):
            return True
        frames = traceback.walk_tb(one.__traceback__) if isinstance(one, Exception) else ()
        if any(frame.f_locals.get("self") is loader for frame, _ in frames):
            return True
    return False


def _last_line(error: BaseException) -> str:
    """What went wrong: in a loader's process, which PyTorch tells with its traceback, or here."""
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def _from_text(text: str) -> list[int]:
    return list(text.encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))


def _to_text(numbers: Sequence[int]) -> str:
    return bytes(numbers).rstrip(b"\0").decode(errors="ignore")


def _to_numbers(measured: Measurement) -> list[int]:
    """Whole numbers, which every backend and device can carry: nanoseconds for seconds."""
    return [
        round(measured.step_s * NS),
        round(measured.error_s * NS),
        round(measured.wait_s * NS),
        *measured[3:],
    ]


def _from_numbers(numbers: Sequence[int]) -> Measurement:
    step, error, wait, *rest = numbers
    return Measurement(step / NS, error / NS, wait / NS, *rest)
