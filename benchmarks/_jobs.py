"""Training jobs that benchmarks start, disturb and watch: Stoker's and torchrun's, on scripts/ddp_steps.py."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

SCRIPT = str(Path(__file__).parent / "scripts" / "ddp_steps.py")
WAIT_S = 120.0
STOKER = (
    sys.executable,
    "-m",
    "stoker.cli.main",
    "run",
    "--no-cache",
    "--max-restarts",
    "1000",
    "--forgive-after",
    "1s",
)
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--max-restarts",
    "1000",
    "--monitor-interval",
    "0.1",
)
"""Both with a budget of restarts that is never used up."""


class Step(NamedTuple):
    """A step as one process committed it."""

    at: float
    """Wall clock, seconds."""
    number: int
    world: int
    """Grows with each world; what it counts differs between runtimes."""
    pid: int


class Steps:
    """What the processes of a job have written down, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Step] = []
        self.newest = 0
        """The newest world."""
        self.newest_steps: dict[int, int] = {}
        """Steps of each process in it."""
        self._read: dict[Path, int] = {}

    def poll(self) -> None:
        """Read what is new."""
        for path in self.folder.glob("*.txt"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(text) + len(newline)
            for line in text.splitlines():
                number, at, world = line.split()
                self._add(Step(float(at), int(number), int(world), int(path.stem)))

    def _add(self, step: Step) -> None:
        self.all.append(step)
        if step.world > self.newest:
            self.newest, self.newest_steps = step.world, {}
        if step.world == self.newest:
            self.newest_steps[step.pid] = self.newest_steps.get(step.pid, 0) + 1

    def wait_for_world(self, after: int, timeout_s: float = WAIT_S) -> Step:
        """The first step that a world newer than `after` has committed."""

        def found() -> bool:
            return self.newest > after

        self._wait(found, timeout_s, f"step of a world after {after}")
        time.sleep(0.05)  # its other members' words for the same step
        self.poll()
        return min(step for step in self.all if step.world > after)

    def wait_for_size(self, size: int, steps: int = 5, timeout_s: float = WAIT_S) -> list[int]:
        """Wait until the newest world has `size` members with a few steps each: their process ids."""

        def found() -> bool:
            return len(self.newest_steps) == size and min(self.newest_steps.values()) >= steps

        self._wait(found, timeout_s, f"world of {size}")
        return sorted(self.newest_steps)

    def _wait(self, found: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.poll()
            if found():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {timeout_s:.0f} s")
            time.sleep(0.01)

    # -- questions ----------------------------------------------------------------------------------------

    def repeated(self, after: int, first: Step) -> int:
        """Steps that were committed up to world `after` and are done again from `first` on."""
        reached = max(step.number for step in self.all if step.world <= after)
        return max(0, reached + 1 - first.number)

    def longest_gap(self, around: int, margin: int = 4) -> float:
        """The longest time between two commits in a row near commit `around`, seconds."""
        times: dict[int, float] = {}
        for step in self.all:
            if abs(step.number - around) <= margin:
                times[step.number] = min(step.at, times.get(step.number, step.at))
        numbers = sorted(times)
        return max(times[b] - times[a] for a, b in itertools.pairwise(numbers))

    def first_of(self, world: int) -> Step:
        """The first step that was committed in this world."""
        return min(step for step in self.all if step.world == world)


class Job:
    """A job of one or several agents; leaving it ends them all."""

    def __init__(self, *, elastic: bool, step_s: float = 0.1, extra: Sequence[str] = ()) -> None:
        """`extra`: more arguments of the script."""
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-bench-"))
        self.steps = Steps(self.folder / "steps")
        self.elastic = elastic
        self.agents: list[subprocess.Popen[bytes]] = []
        self._script = [
            SCRIPT, "--mode", "elastic" if elastic else "plain", "--out", str(self.steps.folder),
            "--step-s", str(step_s), *extra,
        ]  # fmt: skip
        (self.folder / "runtime").mkdir(mode=0o700)

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """Start an agent, `stoker run` or torchrun, with these flags besides the usual ones."""
        command = [*(STOKER if self.elastic else TORCHRUN), *flags, *self._script]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it torchrun often hangs after a death
            "XDG_RUNTIME_DIR": str(self.folder / "runtime"),
        }
        with (self.folder / f"agent-{len(self.agents)}.log").open("wb") as log:
            agent = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.agents.append(agent)
        return agent

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TimeoutError):
            logs = [path.read_text("utf-8", "replace")[-2000:] for path in sorted(self.folder.glob("*.log"))]
            print("\n--- the next agent ---\n".join(logs), file=sys.stderr)
        living = [agent for agent in self.agents if agent.poll() is None]
        below = [child for agent in living for child in _children(agent.pid)]
        for agent in living:
            agent.send_signal(signal.SIGTERM)
        for agent in living:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(15)
        for agent in living:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        for child in below:
            with contextlib.suppress(psutil.Error):
                child.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def workers_of(agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The training processes of an agent."""
    found = []
    for child in _children(agent.pid):
        with contextlib.suppress(psutil.Error):
            if SCRIPT in child.cmdline():
                found.append(child)
    return found


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def distribution(name: str, values: Sequence[float]) -> Iterator[tuple[str, float | int]]:
    """p50, p95, max and how many, as figures of a report."""
    yield f"{name}: times", len(values)
    for label, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
        yield f"{name}: {label} (s)", percentile(values, share)
