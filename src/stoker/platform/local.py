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
from stoker.platform.group_guard import GroupGuard
from stoker.platform.programs import why_not_started

PR_SET_PDEATHSIG = 1
READ_BYTES = 256 * 1024
_KILL = int(signal.SIGKILL)
_prctl = ctypes.CDLL(None).prctl


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

    def pause_reading(self) -> None:
        """See the port."""
        for pipe in self._pipes.values():
            self._loop.remove_reader(pipe.fileno())

    def resume_reading(self) -> None:
        """See the port."""
        for name, pipe in self._pipes.items():
            self._loop.add_reader(pipe.fileno(), self._read, name)

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
    """Starts workers on this machine. They die with the agent (PR_SET_PDEATHSIG), and with a guard so does all that
    they have started."""

    def __init__(self, guard: GroupGuard | None = None) -> None:
        self._guard = guard

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_output: Callable[[str, bytes], None],
        on_exit: Callable[[int | None, int | None], None],
        before_exec: Callable[[], None] = lambda: None,
    ) -> LocalProcess:
        """See the port."""
        agent = os.getpid()

        def prepare() -> None:
            die_with(agent)
            before_exec()

        try:
            child = subprocess.Popen(
                list(argv),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=prepare,  # noqa: PLW1509 - a few calls, looked up before the fork
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise EnvironmentProblem(why_not_started(argv[0], environment, error)) from None
        try:
            return LocalProcess(child, on_output, self._guarded(child.pid, on_exit))
        except OSError as error:  # no descriptor is left
            child.kill()
            child.wait()
            for pipe in (child.stdout, child.stderr):
                assert pipe is not None
                pipe.close()
            raise EnvironmentProblem(why_not_started(argv[0], environment, error)) from None

    def _guarded(
        self, pid: int, on_exit: Callable[[int | None, int | None], None]
    ) -> Callable[[int | None, int | None], None]:
        guard = self._guard
        if guard is None:
            return on_exit
        guard.add(pid)

        def ended(code: int | None, signal_number: int | None) -> None:
            guard.remove(pid)
            on_exit(code, signal_number)

        return ended


def die_with(parent: int) -> None:
    """Have the calling process die when its parent does, or at once if that has happened. For a child before its
    program, where nothing may be imported or looked up any more."""
    _prctl(PR_SET_PDEATHSIG, _KILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), _KILL)
