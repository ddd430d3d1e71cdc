"""A mount's daemon, as its holder sees it."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from stoker.cache.mount.places import BucketPlace
from stoker.cache.mount.state import MountSettings

READY = b"ready\n"
EXIT_HOLDER_GONE = 13
EXIT_STATE_GONE = 15
"""Other numbers than those of errors."""
_END_S = 5.0


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder says to its daemon. `fd`: the device, which it inherits. `number`: MAJOR:MINOR of the mount.
    `behind`: the fleet that the cache at `place` has it from, which keeps it for a while as well. `is_first`: none has
    answered this mount before. `follows_reload`: the one before was told to end."""

    fd: int
    folder: str
    number: str
    holder_pid: int
    is_first: bool
    follows_reload: bool
    state_path: str
    staging_path: str
    place: BucketPlace
    behind: BucketPlace | None
    settings: MountSettings


class Child:
    """Started with it. `gone` can be read once it has ended, `output` when it has said something."""

    def __init__(self, config: DaemonConfig) -> None:
        self._process = subprocess.Popen(
            # -P: a user's own queue.py or http.py is not Python's
            [sys.executable, "-P", "-m", "stoker.cache.mount.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[config.fd],
            start_new_session=True,
        )
        try:
            self.gone = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        assert self._process.stdin is not None
        try:
            with self._process.stdin as said:
                said.write(msgspec.json.encode(config) + b"\n")
        except BrokenPipeError:
            pass  # it has ended already, which is seen elsewhere

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def output(self) -> int:
        """The descriptor of what it says."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def is_ready(self) -> bool:
        """Whether what it has said is that."""
        return os.read(self.output, 64).startswith(READY)

    def is_dying(self) -> bool:
        """Whether it runs no more, but has not ended: where it tells the kernel something it may stand there until what
        others wait for is answered, SIGKILL or not."""
        with open(f"/proc/{self.pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] == b"Z"

    def is_over(self) -> bool:
        """Whether it has ended, of one that was left to die: nothing is left of it then."""
        if self._process.poll() is None:
            return False
        self._close()
        return True

    def end(self) -> None:
        """Have it end."""
        self._process.terminate()

    def wait(self) -> int:
        """With what it has ended."""
        code = self._process.wait()
        self._close()
        return code

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> bool:
        """Have it end, and wait for that; whether it has."""
        for end in (self.end, self.kill):
            end()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                continue
            self._close()
            return True
        return False

    def _close(self) -> None:
        if self.gone >= 0:
            os.close(self.gone)
            self.gone = -1
        assert self._process.stdout is not None
        self._process.stdout.close()
