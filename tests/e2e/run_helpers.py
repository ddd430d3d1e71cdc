"""Start `stoker run` for real, and look at what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tests.e2e.etcd import free_ports

SCRIPTS = Path(__file__).parents[1] / "scripts"
TOY = str(SCRIPTS / "toy.py")
PLAIN = str(SCRIPTS / "plain_torchrun.py")
UNTIL_TOLD = ("--last-epoch", "last-epoch")
"""The toy script goes on until `end_toy`."""
TOY_STEPS, EPOCHS_AHEAD = 20, 5
"""Steps of an epoch of the toy script; epochs between the newest one and the last, so that all workers hear in time."""


@dataclass
class Finished:
    """A command that came to its end."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return f"--- stdout\n{self.out}\n--- stderr\n{self.err}"


def own_environment(folder: Path) -> dict[str, str]:
    """This process's environment without what would steer Stoker, and with folders of the command's own."""
    (folder / "runtime").mkdir(exist_ok=True, mode=0o700)
    base = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "RANK", "WORLD"))}
    return {
        **base,
        "XDG_RUNTIME_DIR": str(folder / "runtime"),
        "STOKER_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "STOKER_REPORT": "0",
    }


class Stoker:
    """A running `stoker` command in a folder of its own."""

    begun: ClassVar[list[Stoker]] = []
    """All of them since it was last emptied, for who must end those that a test that failed has left."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix`: what stands before the command, to run it on a test host; it must not fork."""
        self.folder = folder
        self.arguments = arguments
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "stoker.cli.main", *arguments],
            cwd=folder,
            env={**own_environment(folder), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.begun.append(self)

    def finish(self, timeout_s: float = 90.0) -> Finished:
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(
                f"still running after {timeout_s} s\n{Finished(-1, out, err).text}"
            ) from None
        return Finished(self.process.returncode, out, err)

    def workers(self) -> list[psutil.Process]:
        """Processes that run a script for this command, oldest first."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                if any(part.endswith(".py") and "stoker/cache" not in part for part in child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue
        return sorted(found, key=lambda p: (p.create_time(), p.pid))

    def master(self) -> psutil.Process:
        """The process in which this command hosts the job's master."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "master" in child.cmdline():
                    return child
        raise AssertionError("this command hosts no master")

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)


def kill_all(command: Stoker) -> Finished:
    """End a command and all that it has started, at once; returns what it had said."""
    if command.process.poll() is None:
        family = [
            command.process.pid,
            *(p.pid for p in psutil.Process(command.process.pid).children(recursive=True)),
        ]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    out, err = command.process.communicate()
    return Finished(command.process.returncode, out, err)


def run(folder: Path, *arguments: str, timeout_s: float = 90.0, **environment: str) -> Finished:
    """Run a command to its end."""
    return Stoker(folder, *arguments, environment=environment).finish(timeout_s)


def free_port() -> int:
    """A TCP port that nobody uses at this moment, nor was given here before."""
    (port,) = free_ports(1)
    return port


def wait_for(what: Callable[[], Any], timeout_s: float = 90.0, why: str = "condition") -> Any:
    """Wait until `what()` is true; returns it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = what()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"no {why} within {timeout_s} s")


def said(folder: Path) -> list[dict[str, Any]]:
    """What the toy script's workers wrote at their end, by rank."""
    return sorted((json.loads(p.read_text()) for p in folder.glob("*.json")), key=lambda s: s["rank"])


def ledgers(folder: Path) -> list[list[dict[str, Any]]]:
    """Audit entries of the newest run, of each worker as it wrote them."""
    runs = sorted(folder.glob("stoker-logs/*"))
    return [_entries(path) for path in runs[-1].glob("audit/*.jsonl")] if runs else []


def _entries(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last one may be half a line
            entries.append(json.loads(line))
    return entries


def ledger(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Of one kind, in the order of time."""
    entries = [entry for one in ledgers(folder) for entry in one if entry["type"] == kind]
    return sorted(entries, key=lambda e: e["wall_s"])


def copies(folder: Path, generation: int) -> list[tuple[bool, bool]]:
    """Of each worker that entered a world: whether it copied the state of another one, and whether it lagged behind the
    commit that the world went on from. Of two survivors one may, by the step that broke off."""
    found = []
    for entries in ledgers(folder):
        commits = 0
        for entry in entries:
            if entry["type"] == "world" and entry["generation"] == generation:
                found.append((entry["copied"], commits < entry["commits"]))
            if entry["type"] == "commit":
                commits = entry["step"]
    return found


def end_toy(folder: Path) -> int:
    """Have the toy script, which was started with UNTIL_TOLD, end some epochs ahead; returns how many there will be."""
    epochs = max(e["step"] for e in ledger(folder, "commit")) // TOY_STEPS + EPOCHS_AHEAD
    part = folder / "last-epoch.part"
    part.write_text(str(epochs))
    part.rename(folder / "last-epoch")
    return int(epochs)


def alive(pids: Sequence[int]) -> list[int]:
    """Those that run; one that ends while it is looked at does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found
