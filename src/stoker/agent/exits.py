"""What a node can tell about a worker's end: the kernel's count of kills for want of memory, and the last words."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from stoker.agent.exits_signs import Found, find_sign, last_words, shortened
from stoker.platform.memory_cgroup import MemoryGroup, number_after, own_group
from stoker.wire.exits import ExitFacts

VMSTAT = Path("/proc/vmstat")
CLAIM_S = 30.0
"""Seconds within which a kill that the kernel has counted must show as a worker's end, or it was another process's."""
FULL_BYTES = 1024 * 1024
"""Less than this is left on a full file system."""
DISK_ANSWER_S = 0.2
"""How long a folder may take to say whether it is full; nothing else is done meanwhile."""
MESSAGE_CHARACTERS = 16 * 1024
SPOKEN_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
"""Signals by which a process ends itself, so that its last words are about its end."""


class LimitedMemory(Protocol):
    """What is asked of a worker's own memory limit."""

    @property
    def limit_bytes(self) -> int: ...

    def oom_killed(self) -> bool: ...

    def peak_bytes(self) -> int: ...


class OomCounter:
    """Kills for want of memory around here that no worker's end has explained yet.

    The count of this agent's own control group is read (it counts kills for the group's limit and for the machine's),
    and the machine's where there is none, which counts those of strangers as well.
    """

    def __init__(self, group: MemoryGroup | None = None, vmstat: Path = VMSTAT) -> None:
        """`group`: by default this process's own."""
        self._group = group if group is not None else own_group()
        self._vmstat = vmstat
        self._seen = self._read()
        self._unclaimed: list[float] = []

    def tick(self, now: float) -> None:
        """Take note of the count, now and then, so that an old kill is not taken for a later worker's end."""
        count = self._read()
        self._unclaimed = [at for at in self._unclaimed if now - at < CLAIM_S]
        self._unclaimed += [now] * min(100, max(0, count - self._seen))
        self._seen = count

    def claim(self, now: float) -> bool:
        """Whether a worker that ended just now may be one of the killed; each kill explains one end."""
        self.tick(now)
        if not self._unclaimed:
            return False
        self._unclaimed.pop(0)
        return True

    def _read(self) -> int:
        count = self._group.oom_kills() if self._group is not None else None
        if count is not None:
            return count
        try:
            return number_after(self._vmstat.read_text(), "oom_kill") or 0
        except OSError:
            return 0


class ExitFactsReader:
    """Puts together what is known about each worker that ends."""

    def __init__(self, counter: OomCounter | None = None, watched: Sequence[Path] = ()) -> None:
        """`watched`: folders on this node that workers write to, looked at when a disk seems to be full."""
        self._counter = counter if counter is not None else OomCounter()
        self._watched = (*watched, Path("/dev/shm"))
        self._asking: dict[Path, threading.Thread] = {}
        """Who waits for a folder that does not answer."""

    def tick(self, now: float) -> None:
        """To be called now and then, as with each beat."""
        self._counter.tick(now)

    def read(
        self,
        code: int | None,
        signal_number: int | None,
        *,
        said: str = "",
        tail: str = "",
        memory: LimitedMemory | None = None,
        now: float,
        wall_s: float = 0.0,
    ) -> ExitFacts:
        """The facts about a worker that has just ended.

        `said`: its own account of its uncaught exception, if it gave one; `tail`: the end of its standard error;
        `memory`: its own memory limit. Ask before that is closed or after, but once for each worker.
        """
        if signal_number == signal.SIGABRT and said:
            # An exception, whose exit PyTorch then aborts because a process group is still there.
            code, signal_number = 1, None
        words = shortened(said or last_words(tail), MESSAGE_CHARACTERS)
        ended_itself = code != 0 and (signal_number is None or signal_number in SPOKEN_SIGNALS)
        found = find_sign(words) if ended_itself else Found()
        may_be_oom = signal_number == signal.SIGKILL or code == 128 + signal.SIGKILL
        limit_bytes = memory.limit_bytes if memory is not None else 0
        return ExitFacts(
            code=code,
            signal=signal_number,
            message=words if code != 0 else "",
            sign=found.sign,
            sign_line=found.line,
            oom_killed=(may_be_oom or found.sign == "child-killed") and self._oom_killed(memory, now),
            memory_limit_bytes=limit_bytes,
            memory_peak_bytes=memory.peak_bytes() if memory is not None else 0,
            full_disk=self._full_disk()
            if found.sign == "disk-full" or signal_number == signal.SIGBUS
            else "",
            wall_s=wall_s,
        )

    def _oom_killed(self, memory: LimitedMemory | None, now: float) -> bool:
        return memory.oom_killed() if memory is not None else self._counter.claim(now)

    def _full_disk(self) -> str:
        """A dead network file system never answers: then it is not asked again before it does."""
        for folder in self._watched:
            before = self._asking.get(folder)
            if before is not None and before.is_alive():
                continue
            full: list[bool] = []
            asking = threading.Thread(
                target=lambda folder=folder, full=full: full.append(_is_full(folder)),
                name="stoker-disk",
                daemon=True,
            )
            asking.start()
            asking.join(DISK_ANSWER_S)
            self._asking[folder] = asking
            if any(full):
                return str(folder)
        return ""


def _is_full(folder: Path) -> bool:
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    out_of_space = space.f_blocks > 0 and space.f_bavail * space.f_frsize < FULL_BYTES
    out_of_files = space.f_files > 0 and space.f_favail == 0
    return out_of_space or out_of_files
