"""Which processes run on a test host: found by network namespace, or by the mark in their environment."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

MARK = "TEST_HOST"
"""Environment variable of every process that is started on a test host: its host's name."""

COMMAND = "stoker.cli.main"


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def namespace_of(pid: int) -> int:
    """Inode of a process's network namespace; 0 when it is gone or a zombie."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def mark_of(pid: int) -> str:
    """The host that a process was started on; empty: on none, or it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    begin = f"{MARK}=".encode()
    return next((v[len(begin) :].decode() for v in raw.split(b"\0") if v.startswith(begin)), "")


def processes_of(inodes: set[int], is_ours: Callable[[str], bool]) -> list[psutil.Process]:
    """Living processes in these namespaces, or elsewhere with one of our marks; oldest first."""
    found = []
    for pid in pids():
        if namespace_of(pid) in inodes or is_ours(mark_of(pid)):
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(pid))
    return sorted(alive(found), key=lambda p: (p.create_time(), p.pid))


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run (a zombie does not)."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    return [p for p in processes if runs(p)]


def command_of(process: psutil.Process) -> list[str]:
    """Its argv; empty when it is gone."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_command(process: psutil.Process, name: str) -> bool:
    """Whether it is `stoker NAME …`."""
    argv = command_of(process)
    return any(pair == (COMMAND, name) for pair in itertools.pairwise(argv))


def is_script(process: psutil.Process) -> bool:
    """Whether it runs a training script: not the command that starts it, nor a cache."""
    argv = command_of(process)
    runs_script = any(part.endswith(".py") and "/stoker/" not in part for part in argv)
    return runs_script and COMMAND not in argv


def workers_among(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Workers, without the loader processes that they have started."""
    scripts = {p.pid: p for p in processes if is_script(p)}

    def parent_of(process: psutil.Process) -> int:
        with contextlib.suppress(psutil.Error):
            return process.ppid()
        return 0

    return [p for p in scripts.values() if parent_of(p) not in scripts]


def send(number: signal.Signals, processes: Iterable[psutil.Process]) -> list[int]:
    """Signal each; returns the pids of those that were there."""
    reached = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
            reached.append(process.pid)
    return reached


def kill_all(find: Callable[[], list[psutil.Process]], timeout_s: float = 5.0) -> None:
    """SIGKILL whatever `find` finds until it finds nothing: what is killed may have been starting more."""
    for _ in polls(timeout_s):
        found = find()
        if not found:
            return
        send(signal.SIGKILL, found)


def polls(timeout_s: float, interval_s: float = 0.02) -> Iterator[None]:
    """Tries until the time is over; at least one."""
    deadline = time.monotonic() + timeout_s
    yield
    while time.monotonic() < deadline:
        time.sleep(interval_s)
        yield


def describe(processes: Iterable[psutil.Process]) -> str:
    """One line each, for a failing test."""
    lines = []
    for process in processes:
        try:
            words = " ".join(process.cmdline())[:150]
            lines.append(
                f"{process.pid} (parent {process.ppid()}, {process.status()}, {mark_of(process.pid)}): {words}"
            )
        except psutil.Error:
            continue
    return "\n".join(lines)
