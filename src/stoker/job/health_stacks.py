"""What the stacks of a worker say: does it wait for its peers, does it move, where does it stand?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

from stoker.wire.health import Frame, Stacks, ThreadStack

WAITING_FILES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/stoker/train/")
WORKING_FILES = (
    "/torch/distributed/checkpoint/",
    "/stoker/train/checkpoint",
    "/stoker/train/state",
    "/stoker/train/packing",
)
"""Files under the former whose innermost frames do a rank's own work: writing, copying."""
UNCLEAR_FILES = ("/torch/autograd/graph.py", "/torch/cuda/")
"""A backward pass or a wait for the device: own work, or a collective in it that waits for a peer."""
PACKAGES = ("/site-packages/", "/dist-packages/", "/stoker/train/")
REPORT_CHARACTERS = 32_000


class Standing(IntEnum):
    """How likely it is that a rank keeps the others waiting, by where its main thread stands."""

    WAITS = 0
    """In a collective, or where Stoker waits for others."""
    UNCLEAR = 1
    """In a backward pass or a wait for the device; or there are no stacks."""
    WORKS = 2
    """Anywhere else: in the script's own code, or in what that has called."""


def standing(samples: Sequence[Stacks]) -> Standing:
    """Where the main thread stands: in the samples' least harmless one."""
    known = [_standing_of(main) for sample in samples if (main := sample.main) is not None]
    return max(known, default=Standing.UNCLEAR)


def _standing_of(thread: ThreadStack) -> Standing:
    frame = place(thread)
    if frame is None:
        return Standing.UNCLEAR
    if any(part in frame.file for part in UNCLEAR_FILES):
        if frame.function == "_engine_run_backward" and thread.active is False:
            return Standing.WAITS  # an idle backward pass waits for its gradients' all-reduce
        return Standing.UNCLEAR
    is_waiting = any(part in frame.file for part in WAITING_FILES)
    is_working = any(part in frame.file for part in WORKING_FILES)
    return Standing.WAITS if is_waiting and not is_working else Standing.WORKS


def place(thread: ThreadStack) -> Frame | None:
    """The innermost frame outside the standard library, whose locks and queues are waited in by everybody."""
    return next((frame for frame in thread.frames if not _is_standard(frame)), None)


def moved(samples: Sequence[Stacks]) -> bool:
    """Whether the main thread's calls differ between the samples, by the functions' names.

    Line numbers are not compared: a loop that waits in vain goes on through its lines as well.
    """
    calls = {
        tuple((f.function, f.file) for f in main.frames) for s in samples if (main := s.main) is not None
    }
    return len(calls) > 1


def is_awake(samples: Sequence[Stacks]) -> bool:
    """Whether the main thread was on a processor all the while, or now and then: it computes, or waits in a loop.

    A thread in a deadlock is never woken.
    """
    mains = [main for sample in samples if (main := sample.main) is not None]
    wakeups = {sample.wakeups for sample in samples if sample.wakeups >= 0}
    return len(wakeups) > 1 or (bool(mains) and all(main.active for main in mains))


def is_stopped(samples: Sequence[Stacks]) -> bool:
    """Whether the process was stopped (SIGSTOP, SIGTSTP) in every sample."""
    return bool(samples) and all(sample.state == "T" for sample in samples)


def has_stacks(samples: Sequence[Stacks]) -> bool:
    """Whether any sample shows the main thread."""
    return any(sample.main is not None for sample in samples)


def function(samples: Sequence[Stacks]) -> tuple[str, str]:
    """The innermost function outside the standard library in the last sample that shows one, and its file."""
    places = [frame for s in samples if (main := s.main) is not None and (frame := place(main)) is not None]
    return (places[-1].function, places[-1].file) if places else ("", "")


def describe(samples: Sequence[Stacks]) -> str:
    """Where the main thread stands, in one line: `evaluate (train.py:40)`."""
    last = next((main for sample in reversed(samples) if (main := sample.main) is not None), None)
    if last is None:
        reasons = [sample.unavailable for sample in samples if sample.unavailable]
        return f"no stacks ({reasons[-1] if reasons else 'its node gave none'})"
    inner = place(last)
    if inner is None:
        return "no Python code"
    own = next((f for f in last.frames if not _is_standard(f) and not _is_package(f)), inner)
    by = "" if own is inner else f", called by {_name(own)}"
    return _name(inner) + by


def format_stacks(stacks: Stacks) -> str:
    """Every thread's calls, the innermost last, as Python prints tracebacks."""
    if stacks.unavailable:
        return f"process {stacks.pid}: no stacks: {stacks.unavailable}"
    lines = [f"process {stacks.pid} (state {stacks.state or '?'}), stacks by {stacks.source}"]
    for thread in stacks.threads:
        marks = [
            mark for mark, is_set in (("main", thread.is_main), ("holds the GIL", thread.holds_gil)) if is_set
        ]
        if thread.active is not None:
            marks.append("running" if thread.active else "idle")
        lines.append(f"thread {thread.name} ({', '.join(marks)})" if marks else f"thread {thread.name}")
        lines += [
            f'  File "{frame.file}", line {frame.line}, in {frame.function}'
            for frame in reversed(thread.frames)
        ]
    return "\n".join(lines)


def format_world(dumps: Mapping[str, Sequence[Stacks]], ranks: Mapping[str, int]) -> str:
    """The main thread of every rank; ranks that stand alike share one entry."""
    groups: dict[tuple[Frame, ...], list[str]] = {}
    for worker in sorted(ranks, key=lambda name: ranks[name]):
        mains = [main for sample in dumps.get(worker, ()) if (main := sample.main) is not None]
        groups.setdefault(mains[-1].frames if mains else (), []).append(worker)
    parts = []
    for frames, workers in groups.items():
        calls = _calls(frames) or [f"  {describe(dumps.get(workers[0], ()))}"]
        parts.append("\n".join([f"{name_ranks(ranks[w] for w in workers)}:", *calls]))
    return _cut("\n".join(parts))


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(str(rank) for rank in run) for run in runs)
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"


def _calls(frames: Sequence[Frame]) -> list[str]:
    return [f'  File "{frame.file}", line {frame.line}, in {frame.function}' for frame in reversed(frames)]


def _cut(text: str) -> str:
    return text if len(text) <= REPORT_CHARACTERS else f"{text[:REPORT_CHARACTERS]}\n  ... cut ..."


def _name(frame: Frame) -> str:
    return f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})"


def _is_package(frame: Frame) -> bool:
    return any(part in frame.file for part in PACKAGES)


def _is_standard(frame: Frame) -> bool:
    if frame.file.startswith("<frozen"):
        return True
    return "/lib/python3" in frame.file and not _is_package(frame)
