"""What an agent holds of a worker that runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.agent.output import WorkerOutput
from stoker.agent.resources import process_state
from stoker.agent.stacks import Target
from stoker.platform.memory import WorkerMemory
from stoker.platform.port import Process

ERROR_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class WorkerFiles:
    """Small files that a worker writes for its agent. They are on this machine, so that reading them waits for no
    network, and go with the worker."""

    error: Path
    """Where torch's `@record` writes an uncaught exception."""
    stacks: Path
    """Where it writes its stacks when it is asked by signal."""

    @classmethod
    def of(cls, folder: Path, node: str, worker: str) -> WorkerFiles:
        """Those of a worker of this node."""
        return cls(folder / f"{node}-{worker}-error.json", folder / f"{node}-{worker}-stacks.txt")

    def read_error(self) -> str:
        """What torch's `@record` wrote, if the script uses it."""
        try:
            descriptor = os.open(self.error, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                raw = msgspec.json.decode(os.read(descriptor, ERROR_FILE_BYTES))
            finally:
                os.close(descriptor)
            message = raw["message"]
            if isinstance(message, str):
                return message
            extra = message.get("extraInfo", {})
            return str(extra.get("py_callstack") or message.get("message", ""))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            return ""

    def remove(self) -> None:
        """The worker has ended."""
        for path in (self.error, self.stacks):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


@dataclass
class RunningWorker:
    """A worker's process, and what is kept about it."""

    process: Process
    output: WorkerOutput
    files: WorkerFiles
    memory: WorkerMemory | None = None
    failure: str = ""
    """The uncaught exception that it has told of."""
    kill_timer: asyncio.TimerHandle | None = None
    give_up_timer: asyncio.TimerHandle | None = None
    speaker_pid: int = 0
    """The process that has said hello, where a launcher or a script stands between it and this agent; else 0."""

    @property
    def pid(self) -> int:
        """The process that trains: that which was started, or the one below it that speaks for the worker."""
        is_there = self.speaker_pid and process_state(self.speaker_pid) not in ("", "Z")
        return self.speaker_pid if is_there else self.process.pid

    @property
    def target(self) -> Target:
        """The process whose stacks are looked at."""
        return Target(self.pid, self.files.stacks)

    def close(self) -> None:
        """It has ended, or is given up."""
        for timer in (self.kill_timer, self.give_up_timer):
            if timer is not None:
                timer.cancel()
        self.output.close()
        self.files.remove()
