"""The stacks of a worker, as they are at this moment.

First choice is py-spy, which reads them out of the process's memory. It is run with `--nonblocking`: without it the
process is held by ptrace meanwhile, may stay stopped if py-spy dies, and shows nothing if it was stopped before. Native
frames (`--native`) need that hold, so there are none. What is read while the process runs may be torn: then it is read
again.

Where py-spy is missing or may not look, a worker that has prepared for it (`stoker.train.stack_signal`) is sent a
signal on which its interpreter writes the stacks to a file.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.agent.programs import run_program
from stoker.agent.resources import main_thread_wakeups, process_state
from stoker.platform.proc import read_text
from stoker.wire.health import (
    STACK_SIGNAL_OFFSET,
    Frame,
    StackReply,
    StackRequest,
    Stacks,
    ThreadStack,
    bounded_text,
    bounded_threads,
)

TRIES = 3
SAMPLE_TIMEOUT_S = 4.0
GOLDEN_RATIO = 0.618
"""Samples are not evenly spaced: a loop that takes just an interval would seem to stand still."""
AT_ONCE = 4
"""Processes looked at at the same time."""
QUIET_S = 0.1
"""A file of stacks that has not grown for so long is complete: nothing in it says so."""
CHECK_S = 0.02
MAX_FILE_BYTES = 4 * 1024 * 1024
_HEADING = re.compile(
    r"^(?:Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):$"
)
_CALL = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Target:
    """A worker process to look at."""

    pid: int
    stack_file: Path | None = None
    """Where it writes its stacks when it is asked by signal; None: it cannot."""


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int | None = None


class _SpyThread(msgspec.Struct):
    pid: int
    frames: list[_SpyFrame]
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False


_SPY_DUMP: msgspec.json.Decoder[list[_SpyThread]] = msgspec.json.Decoder(list[_SpyThread])


def find_py_spy() -> str | None:
    """The program beside this interpreter, or on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


class StackDumper:
    """Takes stacks of processes of this machine. `py_spy`: the program; None: there is none."""

    def __init__(self, py_spy: str | None) -> None:
        self._py_spy = py_spy
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def answer(self, request: StackRequest, workers: Mapping[str, Target]) -> list[StackReply]:
        """The samples of each worker that was asked for; of one that is not here there is one that says so."""

        async def one(worker: str) -> StackReply:
            target = workers.get(worker)
            if target is None:
                return StackReply(request.look, worker, (Stacks(pid=0, unavailable="no such worker here"),))
            samples = await self.sample(target, samples=request.samples, interval_s=request.interval_s)
            return StackReply(request.look, worker, samples)

        return list(await asyncio.gather(*(one(worker) for worker in request.workers)))

    async def sample(self, target: Target, *, samples: int, interval_s: float) -> tuple[Stacks, ...]:
        """Several dumps in a row, oldest first; all but the last keep the main thread only."""
        taken: list[Stacks] = []
        caused = 0  # by a signal, the looking itself wakes the main thread
        for number in range(samples):
            if number:
                await asyncio.sleep(interval_s * (0.75 + 0.5 * (number * GOLDEN_RATIO % 1.0)))
            async with self._slots:
                stacks = await self.dump(target, timeout_s=SAMPLE_TIMEOUT_S)
            if stacks.wakeups >= 0:
                taken.append(msgspec.structs.replace(stacks, wakeups=max(0, stacks.wakeups - caused)))
                caused += max(0, main_thread_wakeups(target.pid) - stacks.wakeups)
            else:
                taken.append(stacks)
        early = [
            msgspec.structs.replace(s, threads=tuple(t for t in s.threads if t.is_main)) for s in taken[:-1]
        ]
        return (*early, *taken[-1:])

    async def dump(self, target: Target, *, timeout_s: float) -> Stacks:
        """One dump. It raises nothing: what went wrong is in `unavailable`."""
        pid = target.pid
        state, wakeups = process_state(pid), main_thread_wakeups(pid)
        if state in ("", "Z"):
            return Stacks(pid=pid, state=state, unavailable="the process has ended")
        threads, why = await self._spy(pid, timeout_s)
        source = "py-spy"
        if why and target.stack_file is not None:
            threads, other = await _ask_by_signal(pid, target.stack_file, state, timeout_s)
            source, why = "faulthandler", f"{why}; {other}" if other else ""
        if why:
            return Stacks(pid=pid, state=state, wakeups=wakeups, unavailable=why)
        return Stacks(
            pid=pid,
            source="py-spy" if source == "py-spy" else "faulthandler",
            threads=bounded_threads(threads),
            state=state,
            wakeups=wakeups,
        )

    async def _spy(self, pid: int, timeout_s: float) -> tuple[list[ThreadStack], str]:
        """The threads, or why there are none."""
        if self._py_spy is None:
            return [], "py-spy is not installed (pip install py-spy)"
        why = ""
        command = (self._py_spy, "dump", "--pid", str(pid), "--json", "--nonblocking", "--full-filenames")
        try:
            for _ in range(TRIES):
                said = await run_program(*command, timeout_s=timeout_s)
                threads = parse_py_spy(pid, said.stdout) if said.code == 0 else []
                if any(thread.is_main and thread.frames for thread in threads):
                    return threads, ""
                why = f"py-spy: {_spy_problem(said.stderr)}" if said.code else "py-spy saw no main thread"
        except TimeoutError:
            why = f"py-spy took longer than {timeout_s:g} s"
        except OSError as error:
            why = f"py-spy does not start: {error}"
        return [], why


def parse_py_spy(pid: int, output: bytes) -> list[ThreadStack]:
    """`py-spy dump --json`; nothing if it is not that."""
    try:
        dump = _SPY_DUMP.decode(output)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []
    return [
        ThreadStack(
            name=thread.thread_name
            or ("MainThread" if thread.os_thread_id == pid else str(thread.os_thread_id)),
            frames=tuple(Frame(f.name, f.filename, f.line or 0) for f in thread.frames),
            is_main=thread.os_thread_id == pid,
            active=thread.active,
            holds_gil=thread.owns_gil,
        )
        for thread in dump
        if thread.pid == pid
    ]


def parse_faulthandler(text: str) -> list[ThreadStack]:
    """What `faulthandler` writes for all threads: the main thread, which was first, comes last."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            threads.append((heading[2] or heading[1], []))
        elif threads and (call := _CALL.match(line)):
            number = int(call[2]) if call[2].isdigit() else 0
            threads[-1][1].append(Frame(call[3], call[1], number))
    last = len(threads) - 1
    return [
        ThreadStack("MainThread" if i == last else name, tuple(frames), is_main=i == last)
        for i, (name, frames) in enumerate(threads)
    ]


async def _ask_by_signal(pid: int, file: Path, state: str, timeout_s: float) -> tuple[list[ThreadStack], str]:
    """The threads as the process itself writes them, or why it does not."""
    number = signal.SIGRTMIN + STACK_SIGNAL_OFFSET
    if not _catches(pid, number) or not file.exists():
        return [], "the worker has not prepared for showing its stacks by signal"
    if state in ("T", "t"):
        return [], "a stopped process does not show its stacks by signal"
    try:
        os.truncate(file, 0)  # it is opened for appending
        os.kill(pid, number)
        async with asyncio.timeout(timeout_s):
            text = await _read_when_quiet(file)
    except TimeoutError:
        return [], f"the worker has not shown its stacks within {timeout_s:g} s of the signal"
    except OSError as error:
        return [], f"its file of stacks cannot be read: {error}"
    threads = parse_faulthandler(text)
    return threads, "" if threads else "the worker wrote no stacks"


async def _read_when_quiet(file: Path) -> str:
    size_bytes, quiet_s = 0, 0.0
    while size_bytes == 0 or quiet_s < QUIET_S:
        await asyncio.sleep(CHECK_S)
        grown_to = file.stat().st_size
        quiet_s = quiet_s + CHECK_S if grown_to == size_bytes else 0.0
        size_bytes = grown_to
    with file.open("rb") as opened:
        return opened.read(MAX_FILE_BYTES).decode(errors="replace")


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; without one, the signal would end it."""
    for line in read_text(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _spy_problem(errors: str) -> str:
    """The first lines of its complaint: what follows is its own stack."""
    told = errors.partition("Stack backtrace")[0]
    lines = [line.strip() for line in told.splitlines() if line.strip() and line.strip() != "Caused by:"]
    text = "; ".join(line.removeprefix("Error: ") for line in lines)
    return bounded_text(text) or "it failed without a word"
