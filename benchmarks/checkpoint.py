"""What does a snapshot in memory cost the training, beside a bare copy, torch.save to tmpfs and dcp.async_save?

The state is a model with AdamW in tensors of 4 MB, all on the CPU. Blocked: how long the training thread stands still.
For a snapshot that is what it does at the commit, and, where the next step is shorter than the copy, what the optimizer
waits for at most; for dcp.async_save, until it returns. All sides run in turn over the same tensors. Then a loop of
real steps with a snapshot every few of them: how long the training stands still for each, and how much longer the steps
around it take. And how long it takes to have the state again from this node's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from _common import interleaved, median_ratio, parser, report
from torch.distributed.checkpoint.state_dict_saver import async_save

from stoker.platform.shared_folders import shared_base
from stoker.train.checkpoints.checkpointer import Checkpointer, kept
from stoker.train.checkpoints.image import Image, image_of
from stoker.train.checkpoints.memory import MemorySlots
from stoker.train.checkpoints.nearest import nearest_in_memory
from stoker.train.sealed import Sealed
from stoker.train.state import State

SIDE = 1024
TENSOR_BYTES = SIDE * SIDE * 4
RUN = "benchmark"
STEPS_BETWEEN = 5
BATCH = 32


class Layers(torch.nn.Module):
    """So many square layers, and a buffer that each step changes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(count))
        self.norm = torch.nn.BatchNorm1d(SIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return torch.as_tensor(self.norm(x).square().mean())


def make_state(size_mb: int, checkpointer: Checkpointer | None = None) -> State:
    """A third of the bytes are parameters, the rest is AdamW's."""
    model = Layers(max(1, size_mb * 1_000_000 // (3 * TENSOR_BYTES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = State(model=model, optimizer=optimizer, step=0, checkpointer=checkpointer)
    state.seal()
    train(state, 1)
    return state


def train(state: State, steps: int) -> list[float]:
    """Seconds of each of so many steps."""
    x = torch.randn(BATCH, SIDE)
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        state.optimizer.zero_grad()
        state.model(x).backward()
        state.optimizer.step()
        state.commit()
        taken.append(time.perf_counter() - began)
    return taken


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=shared_base()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Sides:
    """Each returns how long the training thread stands still."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.slots = MemorySlots(folder, RUN, 0)
        self.commits = 0
        self.image: Image = image_of(0, state.export())
        self.bytes = sum(piece.tensor.nbytes for piece in self.image.pieces)
        self.slots.prepare(self.image)
        self.slots.finish()
        self.target = torch.empty(self.bytes, dtype=torch.uint8).fill_(1)
        self.at_commit: list[float] = []
        self.until_whole: list[float] = []
        self.async_until_whole: list[float] = []

    def snapshot(self) -> float:
        """At its worst: the optimizer comes at once, and waits for all of the copy."""
        began = time.perf_counter()
        self.commits += 1
        image = image_of(self.commits, self.state.export())
        stable = {piece.tensor.untyped_storage().data_ptr() for piece in image.pieces}
        self.slots.take(image, stable)
        self.at_commit.append(time.perf_counter() - began)
        self.slots.settle()
        blocked_s = time.perf_counter() - began
        self.slots.finish()
        self.until_whole.append(time.perf_counter() - began)
        return blocked_s

    def bare_copy(self) -> float:
        """The same tensors, one after the other, into memory that is there."""

        def copy() -> None:
            at = self.target.data_ptr()
            for piece in self.image.pieces:
                tensor = piece.tensor.contiguous()
                ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
                at += tensor.nbytes

        return timed(copy)

    def torch_save(self) -> float:
        path = self.folder / "saved.pt"
        blocked_s = timed(lambda: torch.save(self.state.export(), path))
        path.unlink()
        return blocked_s

    def async_save(self) -> float:
        folder = self.folder / "dcp"
        held = self.state.export()
        plain: dict[str, Any] = {"modules": held["modules"], "optimizers": held["optimizers"]}
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = async_save(plain, checkpoint_id=folder)
            blocked_s = time.perf_counter() - began
            assert isinstance(future, Future)
            future.result()
        self.async_until_whole.append(time.perf_counter() - began)
        shutil.rmtree(folder)
        return blocked_s


def figures_of(size_mb: int, rounds: int) -> dict[str, Any]:
    """Of one size of state."""
    with scratch() as folder:
        state = make_state(size_mb)
        sides = Sides(state, folder)
        found = interleaved(
            {
                "snapshot": sides.snapshot,
                "copy": sides.bare_copy,
                "save": sides.torch_save,
                "async": sides.async_save,
            },
            rounds,
        )
        name = f"{size_mb} MB"

        def ms(values: list[float]) -> float:
            return statistics.median(values) * 1000

        def resume() -> None:
            with nearest_in_memory(folder, RUN) as image:
                assert image is not None
                state.load(kept(image).state())
                del image

        resumes = [timed(resume) for _ in range(max(2, rounds // 2))]
        assert sides.slots.taken == rounds, sides.slots.problem
        return {
            f"{name}: at the commit (ms)": ms(sides.at_commit),
            f"{name}: blocked at most (ms)": ms(found["snapshot"]),
            f"{name}: until whole (ms)": ms(sides.until_whole),
            f"{name}: copied (GB/s)": sides.bytes / statistics.median(found["snapshot"]) / 1e9,
            f"{name}: bare copy (ms)": ms(found["copy"]),
            f"{name}: torch.save to tmpfs (ms)": ms(found["save"]),
            f"{name}: dcp.async_save, blocked (ms)": ms(found["async"]),
            f"{name}: dcp.async_save, until whole (ms)": ms(sides.async_until_whole),
            f"{name}: blocked at most / bare copy": median_ratio(found["snapshot"], found["copy"]),
            f"{name}: blocked at most / torch.save": median_ratio(found["snapshot"], found["save"]),
            f"{name}: blocked at most / dcp.async_save": median_ratio(found["snapshot"], found["async"]),
            f"{name}: at the commit / dcp.async_save": median_ratio(sides.at_commit, found["async"]),
            f"{name}: resume from memory (ms)": ms(resumes),
        }


class Waits:
    """Measures what the training thread spends in a checkpointer: exact on a busy machine, too."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._snapshot, self._settle = checkpointer.snapshot, checkpointer.settle
        self._spent: list[float] = []
        checkpointer.snapshot = self.snapshot  # type: ignore[method-assign]
        checkpointer.settle = self.settle  # type: ignore[method-assign]

    def snapshot(self, commits: int, state: Sealed, *, is_due: bool) -> None:
        if is_due:
            self._spent.append(0.0)
        self._add(timed(lambda: self._snapshot(commits, state, is_due=is_due)))

    def settle(self) -> None:
        self._add(timed(self._settle))

    @property
    def each_s(self) -> float:
        """Median of what one snapshot has cost, at its commit and until the next."""
        return statistics.median(self._spent)

    def _add(self, seconds: float) -> None:
        if self._spent:
            self._spent[-1] += seconds


def overhead(size_mb: int, snapshots: int) -> dict[str, Any]:
    """Of real steps, with a snapshot every few of them: it costs the step that ends with it and the next one."""
    checkpointer = Checkpointer(every_s=None, every_commits=STEPS_BETWEEN)
    state = make_state(size_mb, checkpointer)
    train(state, 2 * STEPS_BETWEEN - 1)
    assert checkpointer.slots is not None
    slots = checkpointer.slots
    before = slots.taken
    waits = Waits(checkpointer)
    step_s = train(state, snapshots * STEPS_BETWEEN)
    slots.finish()
    turns = [step_s[at : at + STEPS_BETWEEN] for at in range(0, len(step_s), STEPS_BETWEEN)]
    # A turn is the step after a snapshot, two that have nothing to do with one, and the next that takes one.
    plain_s = statistics.median([one for turn in turns for one in turn[2:-1]])
    extra_s = [turn[0] + before_it[-1] - 2 * plain_s for before_it, turn in itertools.pairwise(turns)]
    each_s = statistics.median(extra_s)
    checkpointer.close()
    name = f"{size_mb} MB, a snapshot every {STEPS_BETWEEN} steps"
    return {
        f"{name}: plain step (ms)": plain_s * 1000,
        f"{name}: snapshots of {snapshots}": slots.taken - before,
        f"{name}: training stands still for each (ms)": waits.each_s * 1000,
        f"{name}: steps around it take longer by (ms)": each_s * 1000,
        f"{name}: step with / without": 1 + each_s / (STEPS_BETWEEN * plain_s),
        f"{size_mb} MB, one snapshot a minute: training stands still (%)": waits.each_s / 60 * 100,
    }


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--sizes", default="", help="in MB (100,500,2000; 100,500 with --quick)")
    flags.add_argument("--rounds", type=int, default=0)
    options = flags.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    sizes = [
        int(text) for text in (options.sizes or ("100,500" if options.quick else "100,500,2000")).split(",")
    ]
    rounds = options.rounds or (3 if options.quick else 7)
    shown: dict[str, Any] = {}
    for size_mb in sizes:
        shown.update(figures_of(size_mb, rounds))
    for size_mb in sizes[:2]:
        shown.update(overhead(size_mb, 2 * rounds))
    report("checkpoint", shown, options.json)


if __name__ == "__main__":
    main()
