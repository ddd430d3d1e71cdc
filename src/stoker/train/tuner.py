"""`--auto-tune`: which loader workers and which micro-batch are fastest, found by trying. PURE.

The global batch never changes. What may change is how a rank comes by its share of it: processes that load ahead, and
the records of one forward and backward pass (the rest is accumulated). One change is tried at a time and kept only when
the step is faster by more than the noise; a change that fails is taken back and remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stoker.base.units import format_bytes

GAIN = 0.03
"""A change must make the step faster by this share at least, beside being outside the noise."""
WAIT_SHARE = 0.1
"""Waiting for data dominates above this share of the step."""
FIRST_WORKERS = 2
MEMORY_SHARE = 0.9
"""Share of a rank's memory that a prediction may fill."""
STEPS_MIN, STEPS_MAX = 10, 200
MEASURE_S = 2.0
"""How long a setting is measured, within those numbers of steps."""


class Setting(NamedTuple):
    """What is tuned."""

    num_workers: int
    """Processes per rank that read and decode ahead."""
    micro_batch: int = 0
    """Records of a rank's share that go through the model at once, so that it fits at every world size; 0: all."""

    def __str__(self) -> str:
        micro = f", micro-batch {self.micro_batch}" if self.micro_batch else ""
        return f"{self.num_workers} loader workers{micro}"


class Measurement(NamedTuple):
    """Some steps of one setting: of one rank, or of the slowest of all."""

    step_s: float
    """Median seconds from commit to commit."""
    error_s: float
    """Half the width of the median's interval."""
    wait_s: float
    """Median seconds of a step in which the loop waited for data."""
    share: int
    """Records of a rank's share of the global batch."""
    peak_bytes: int = 0
    """Most memory in use during the steps; 0: not known."""
    resident_bytes: int = 0
    """Memory in use between steps: parameters, gradients, optimizer."""

    @property
    def wait_share(self) -> float:
        return min(1.0, self.wait_s / self.step_s) if self.step_s > 0 else 0.0


class Bounds(NamedTuple):
    """What a setting may ask for."""

    max_workers: int
    """Cores of the node for each of its ranks."""
    memory_bytes: int = 0
    """Memory of a rank's device; 0: not known."""


class Known(NamedTuple):
    """What outlives a world. That of rank 0 counts for all, newcomers too."""

    best: Setting
    given: Setting
    """What the script itself asks for."""
    too_large: int = 0
    """Micro-batch that ran out of memory: this one and larger ones never again. 0: none has."""
    too_many: int = 0
    """Loader workers that failed: so many and more never again. 0: none have."""


class Decision(NamedTuple):
    """What to run now."""

    setting: Setting
    why: str
    done: bool = False
    """No proposal is left: nothing is measured any more in this world."""


def combine(ranks: Sequence[Measurement]) -> Measurement:
    """The world's measurement: a step lasts as long as its slowest rank, and waits for the one that waits most."""
    return Measurement(*(max(column) for column in zip(*ranks, strict=True)))


def tightest(ranks: Sequence[Bounds]) -> Bounds:
    """What every rank can do: a setting is run by all of them."""
    known = [bounds.memory_bytes for bounds in ranks if bounds.memory_bytes]
    return Bounds(min(bounds.max_workers for bounds in ranks), min(known, default=0))


def steps_to_measure(step_s: float) -> int:
    """How many steps make a measurement."""
    return min(STEPS_MAX, max(STEPS_MIN, round(MEASURE_S / step_s) if step_s > 0 else STEPS_MAX))


class Tuner:
    """Tries settings one by one. Feed it a measurement of the setting that it gave last; it answers with the next.

    One rank decides; on the others `follow` keeps in step what is needed to tell whose fault a failure is.
    """

    def __init__(self, setting: Setting, bounds: Bounds) -> None:
        self.known = Known(best=setting, given=setting)
        self.bounds = bounds
        self._trial: Setting | None = None
        self._baseline: Measurement | None = None
        self._slower: set[Setting] = set()
        """Tried in this world and not better."""
        self._peaks: dict[int, int] = {}
        """Peak bytes by records in a pass."""

    @property
    def best(self) -> Setting:
        """The fastest so far."""
        return self.known.best

    @property
    def may_be_at_fault(self) -> bool:
        """Whether running out of memory now may be the doing of this tuner."""
        return self._trial is not None or self.best.micro_batch > self.known.given.micro_batch

    @property
    def has_added_workers(self) -> bool:
        """Whether there are loader workers now that the script has not asked for: some data cannot be loaded so."""
        return (self._trial or self.best).num_workers > self.known.given.num_workers

    def begin_with(self, micro_batch: int) -> None:
        """The script's own micro-batch, which is known when it first cuts a batch; a world may run another by then."""
        best, given = (_cut_by(setting, micro_batch) for setting in self.known[:2])
        self.known = self.known._replace(best=best, given=given)
        if self._trial is not None:
            self._trial = _cut_by(self._trial, micro_batch)

    def follow(self, best: Setting, running: Setting) -> None:
        """Another rank has decided: this is the best so far, and that is run now."""
        self._keep(best)
        self._trial = running if running != best else None

    def step(self, measured: Measurement) -> Decision:
        """Judge the setting under trial, if there is one, and say what to run next."""
        passed = _records_in_a_pass(self._trial or self.best, measured.share)
        self._peaks[passed] = max(measured.peak_bytes, self._peaks.get(passed, 0))
        trial, before = self._trial, self._baseline
        self._trial, self._baseline = None, measured
        if trial is None or before is None:
            return self._propose(measured, "")
        if not _is_better(before, measured):
            self._slower.add(trial)
            self._baseline = None  # conditions may have changed meanwhile, so what is left is measured again
            of_the_time = f"{measured.step_s / before.step_s:.2f} of the time"
            return Decision(
                self.best, f"{_change(self.best, trial)} taken back: the step takes {of_the_time}"
            )
        why = f"{_change(self.best, trial)}: {_what_came_of_it(self.best, trial, before, measured)}"
        self._keep(trial)
        return self._propose(measured, why)

    def out_of_memory(self) -> Decision | None:
        """The step has run out of memory. None: with what the script itself asks for, so it is the script's fault."""
        if not self.may_be_at_fault:
            return None
        trial, self._trial, self._baseline = self._trial, None, None
        failed = trial or self.best
        if trial is not None and trial.micro_batch == self.best.micro_batch:
            self.known = self.known._replace(too_many=failed.num_workers)
        else:
            self.known = self.known._replace(too_large=failed.micro_batch)
        if trial is None:
            given = self.known.given.micro_batch
            self._keep(failed._replace(micro_batch=max(given, failed.micro_batch // 2)))
        return Decision(self.best, f"{_change(self.best, failed)} taken back: out of memory; not tried again")

    def loader_failed(self, why: str) -> Decision | None:
        """The loader has raised an error. None: it runs as the script itself asks for, so it is the script's fault."""
        if not self.has_added_workers:
            return None
        trial, self._trial, self._baseline = self._trial, None, None
        failed = (trial or self.best).num_workers
        self.known = self.known._replace(too_many=failed)
        if self.best.num_workers >= failed:
            self._keep(self.best._replace(num_workers=self.known.given.num_workers))
        before = self.best.num_workers
        return Decision(self.best, f"loader workers {before} → {failed} taken back: {why}; not tried again")

    def world_changed(self, known: Known) -> Decision:
        """A new world, which knows what its rank 0 does: shares and waiting differ, so measure anew."""
        self.known = known
        self._trial = self._baseline = None
        self._slower.clear()
        self._peaks.clear()
        return Decision(self.best, f"measuring {self.best}")

    def _propose(self, measured: Measurement, kept: str) -> Decision:
        before = f"{kept}; " if kept else ""
        best, waiting = self.best, measured.wait_share
        workers = min(self.bounds.max_workers, max(FIRST_WORKERS, best.num_workers * 2))
        more_workers = best._replace(num_workers=workers)
        wants_more = waiting > WAIT_SHARE and workers > best.num_workers and more_workers not in self._slower
        if wants_more and 0 < self.known.too_many <= workers:
            before += f"loader workers stay at {best.num_workers}: {self.known.too_many} have failed; "
        elif wants_more:
            self._trial = more_workers
            reason = f"{waiting:.0%} of the step is waiting for data"
            return Decision(more_workers, f"{before}trying {_change(best, more_workers)}: {reason}")
        larger = best._replace(micro_batch=best.micro_batch * 2)
        if not 0 < best.micro_batch < measured.share or larger in self._slower:
            return Decision(best, f"{before}nothing left to try with {best}", done=True)
        if 0 < self.known.too_large <= larger.micro_batch:
            why = f"{before}micro-batch stays at {best.micro_batch}: {self.known.too_large} ran out of memory"
            return Decision(best, why, done=True)
        needed, limit = self._predicted_bytes(larger, measured), MEMORY_SHARE * self.bounds.memory_bytes
        if limit and needed > limit:
            why = (
                f"{before}micro-batch stays at {best.micro_batch}: {larger.micro_batch} would need about "
                f"{format_bytes(needed)} of {format_bytes(self.bounds.memory_bytes)}"
            )
            return Decision(best, why, done=True)
        self._trial = larger
        passes = -(-measured.share // best.micro_batch)
        return Decision(larger, f"{before}trying {_change(best, larger)}: now {passes} passes make a step")

    def _keep(self, best: Setting) -> None:
        self.known = self.known._replace(best=best)

    def _predicted_bytes(self, setting: Setting, measured: Measurement) -> float:
        """Peak with more records in a pass: a straight line through what was measured.

        With one point the line begins at what is resident between steps. Gradients of the pass are then counted as
        growing, which they do not: the prediction errs on the safe side.
        """
        here = _records_in_a_pass(self.best, measured.share)
        wanted = _records_in_a_pass(setting, measured.share)
        peak = self._peaks[here]
        others = [
            (abs(records - here), records)
            for records in self._peaks
            if records != here and self._peaks[records]
        ]
        if others:
            records = min(others)[1]
            slope = (peak - self._peaks[records]) / (here - records)
        else:
            slope = (peak - measured.resident_bytes) / here
        return peak + max(0.0, slope) * (wanted - here)


def _cut_by(setting: Setting, micro_batch: int) -> Setting:
    return setting if setting.micro_batch else setting._replace(micro_batch=micro_batch)


def _records_in_a_pass(setting: Setting, share: int) -> int:
    return max(1, min(setting.micro_batch, share) if setting.micro_batch else share)


def _is_better(before: Measurement, after: Measurement) -> bool:
    clearly = after.step_s + after.error_s < before.step_s - before.error_s
    return clearly and after.step_s < (1 - GAIN) * before.step_s


def _change(before: Setting, after: Setting) -> str:
    if before.num_workers != after.num_workers:
        return f"loader workers {before.num_workers} → {after.num_workers}"
    return f"micro-batch {before.micro_batch} → {after.micro_batch}"


def _what_came_of_it(old: Setting, new: Setting, before: Measurement, after: Measurement) -> str:
    faster = f"the step takes {after.step_s / before.step_s:.2f} of the time"
    if old.num_workers == new.num_workers:
        return faster
    return (
        f"waiting for data fell from {before.wait_share:.0%} to {after.wait_share:.0%} of the step, and {faster}"
        if after.wait_share < before.wait_share
        else faster
    )
