"""Workers as child processes of this one, each in a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from stoker.errors import EnvironmentProblem

PR_SET_PDEATHSIG = 1
READ_BYTES = 256 * 1024


class LocalProcess:
    """A child process; its end is pushed by a pidfd, never polled for."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        on_output: Callable[[str, bytes], None],
        on_exit: Callable[[int | None, int | None], None],
    ) -> None:
        self._child = child
        self._on_output = on_output
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._pipes: dict[str, IO[bytes]] = {}
        for name, pipe in (("stdout", child.stdout), ("stderr", child.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes[name] = pipe
            self._loop.add_reader(pipe.fileno(), self._read, name)
        self._pidfd = os.pidfd_open(child.pid)
        self._loop.add_reader(self._pidfd, self._ended)

    @property
    def pid(self) -> int:
        return self._child.pid

    def signal(self, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal_number)

    def _read(self, name: str) -> None:
        pipe = self._pipes.get(name)
        if pipe is None:
            return
        try:
            data = os.read(pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._on_output(name, data)
        else:
            self._close(name)

    def _drain(self, name: str) -> None:
        """Take what is in the pipe now; a grandchild may hold its other end open for long, and go on writing."""
        pipe = self._pipes[name]
        left_bytes = fcntl.fcntl(pipe.fileno(), fcntl.F_GETPIPE_SZ)
        with contextlib.suppress(BlockingIOError):
            while left_bytes > 0 and (data := os.read(pipe.fileno(), left_bytes)):
                left_bytes -= len(data)
                self._on_output(name, data)
        self._close(name)

    def _close(self, name: str) -> None:
        pipe = self._pipes.pop(name)
        self._loop.remove_reader(pipe.fileno())
        pipe.close()

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.signal(signal.SIGKILL)  # what the worker had started goes with it
        status = self._child.wait()
        for name in list(self._pipes):
            self._drain(name)
        if status < 0:
            self._on_exit(None, -status)
        else:
            self._on_exit(status, None)


class LocalPlatform:
    """Starts workers on this machine. They die with the agent (PR_SET_PDEATHSIG)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_output: Callable[[str, bytes], None],
        on_exit: Callable[[int | None, int | None], None],
    ) -> LocalProcess:
        """See the port."""
        prctl = self._libc.prctl
        kill = int(signal.SIGKILL)

        def die_with_parent() -> None:
            prctl(PR_SET_PDEATHSIG, kill, 0, 0, 0)

        try:
            child = subprocess.Popen(
                list(argv),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one call, looked up before the fork
            )
        except OSError as error:
            raise EnvironmentProblem(f"cannot start {argv[0]}: {error}") from None
        return LocalProcess(child, on_output, on_exit)
