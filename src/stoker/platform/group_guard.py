"""Keeps a `group_watcher` informed, so that nothing that workers have started outlives an agent that is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from stoker.platform import group_watcher
from stoker.platform.group_watcher import started_at

ENDED_WITHIN_S = 2.0
_START = (sys.executable, "-I", "-S", "-c", f"exec(open({str(Path(group_watcher.__file__))!r}).read())")
"""Isolated and without site packages: a few milliseconds and megabytes."""


class GroupGuard:
    """Process groups that end with this process, even by SIGKILL. The watcher runs from the first one until `close`."""

    def __init__(self) -> None:
        self._groups: dict[int, str] = {}
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The watcher's process id; 0: there is none."""
        return self._watcher.pid if self._watcher is not None else 0

    def add(self, leader: int) -> None:
        """Guard the group of a process that leads one. A watcher that cannot be started is done without."""
        self._groups[leader] = started_at(leader)
        self._tell(f"+ {leader} {self._groups[leader]}\n")

    def remove(self, leader: int) -> None:
        """The group has ended."""
        self._groups.pop(leader, None)
        if self._watcher is not None:
            self._tell(f"- {leader}\n")

    def close(self) -> None:
        """End the watcher, and with it the groups that are left."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        assert watcher.stdin is not None
        with contextlib.suppress(OSError):
            watcher.stdin.close()
        try:
            watcher.wait(ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.wait()

    def _tell(self, line: str) -> None:
        """Say it to the watcher; a new one, in place of one that somebody has ended, is told all of it."""
        if self._watcher is not None:
            try:
                self._write(line)
                return
            except OSError:
                self.close()
        with contextlib.suppress(OSError):
            self._watcher = subprocess.Popen(
                _START,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            for leader, started in self._groups.items():
                self._write(f"+ {leader} {started}\n")

    def _write(self, line: str) -> None:
        assert self._watcher is not None
        assert self._watcher.stdin is not None
        self._watcher.stdin.write(line.encode())
