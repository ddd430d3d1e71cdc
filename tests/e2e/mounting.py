"""A folder that shows a dataset, for tests: always unmounted in the end, also where nothing is answered any more.

Who reads a mount that hangs may not be to be killed. So nothing here or in a test looks at one: children do, each with
a time by which it has to be done, and where it is not the kernel is told to give the mount up.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.cache.mount import device
from stoker.cache.mount.places import FILE_SYSTEM, mounted_on
from stoker.errors import EnvironmentProblem
from tests.e2e import mount_readers as readers
from tests.e2e.run_helpers import Finished, own_environment, wait_for

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
"""Generous: the machine may be busy with other things."""
_SYS_ADMIN = 21
_DAEMON, _CACHE = "stoker.cache.mount.process", "stoker.cache.server.process"


def _can_mount() -> bool:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(effective, 16) >> _SYS_ADMIN & 1) and os.geteuid() == 0 and os.path.exists(device.DEVICE)


MOUNT_MARKS = [
    pytest.mark.real,
    pytest.mark.skipif(not _can_mount(), reason=f"needs root with CAP_SYS_ADMIN and {device.DEVICE}"),
]


def needs(program: str) -> pytest.MarkDecorator:
    """For tests that start a program which is not on every machine."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"no `{program}` program")


def abort(folder: Path) -> None:
    """Have the kernel fail all that waits for the mount on a folder, if there is one."""
    there = mounted_on(str(folder))
    if there is None or there.file_system != FILE_SYSTEM:
        return
    with contextlib.suppress(OSError):
        device.abort(there.number)


def run_beside(
    folder: Path, *command: str, timeout_s: float = WAIT_S, environment: dict[str, str] | None = None
) -> Finished:
    """Run a program that looks at the mount on a folder, to its end."""
    with Looking(folder, *command, environment=environment) as looking:
        return looking.finish(timeout_s)


class Looking:
    """A program that looks at a mount. It is gone in the end."""

    def __init__(self, folder: Path, *command: str, environment: dict[str, str] | None = None) -> None:
        self.command = command
        self._folder = folder
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )

    def finish(self, timeout_s: float = WAIT_S) -> Finished:
        """What it said, once it has ended."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            why = self._where()
            self._end()
            out, err = self.process.communicate(timeout=WAIT_S)
            raise AssertionError(
                f"{self.command} has not ended after {timeout_s:g} s ({why})\n{Finished(-1, out, err).text}"
            ) from None
        return Finished(self.process.returncode, out, err)

    def line(self, timeout_s: float = WAIT_S) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        said = ""

        def more() -> bool:
            nonlocal said
            assert self.process.stdout is not None
            has_ended = self.has_ended()  # looked at first: its last words come before its end
            said += self.process.stdout.readline()
            assert said or not has_ended, self.process.communicate()
            return said.endswith("\n")

        wait_for(more, timeout_s, f"line of {self.command}")
        os.set_blocking(self.process.stdout.fileno(), True)
        return said.rstrip("\n")

    def has_ended(self) -> bool:
        """Whether it has."""
        return self.process.poll() is not None

    def tell(self) -> str:
        """To go on; the line that it says then."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def _where(self) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stack").read_text(encoding="ascii").replace("\n", " ")
        return "nobody knows where it stands"

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            abort(self._folder)

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self._end()
        self.process.communicate(timeout=WAIT_S)


def python(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command that calls a function of a module of tests with what JSON can say."""
    name = f"{function.__module__}:{function.__qualname__}"
    return [sys.executable, "-m", "tests.e2e.mount_child", name, json.dumps(arguments, default=str)]


class Mount:
    """What `stoker mount` mounts, in the foreground of a process of its own. `base`: where it keeps things."""

    def __init__(self, base: Path, source: str, *options: str, cache: bool = True) -> None:
        base.mkdir(parents=True, exist_ok=True)
        self.base = base
        self.folder = base / "mount"
        self.folder.mkdir(exist_ok=True)
        self.log_path = base / "mount.log"
        self.environment = own_environment(base)
        self._log_from = len(self.log)
        own = ("--cache-dir", str(base / "kept"), "--capacity", "1GB") if cache else ()
        with open(self.log_path, "ab") as log:
            self.holder = psutil.Popen(
                [sys.executable, "-m", "stoker.cli.main", "mount", source, str(self.folder), *own, *options],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> Mount:
        """Until it is mounted."""

        def is_ready() -> bool:
            assert self.holder.poll() is None, self.log
            return f"mounted on {self.folder}" in self.log[self._log_from :]

        wait_for(is_ready, WAIT_S, "mount")
        return self

    @property
    def log(self) -> str:
        """What it has said, and mounts in the same place before."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def daemon(self) -> psutil.Process:
        """The process that answers now."""
        found: psutil.Process = wait_for(lambda: self._child(_DAEMON), WAIT_S, "daemon")
        return found

    def cache(self) -> psutil.Process:
        """The process of its own cache."""
        found: psutil.Process = wait_for(lambda: self._child(_CACHE), WAIT_S, "cache")
        return found

    def next_daemon(self, last: psutil.Process) -> psutil.Process:
        """The one that goes on in place of another."""
        found: psutil.Process = wait_for(
            lambda: (child := self._child(_DAEMON)) and child.pid != last.pid and child, WAIT_S, "daemon"
        )
        return found

    def kill_daemon(self) -> psutil.Process:
        """kill -9; the one that goes on."""
        last = self.daemon()
        last.kill()
        return self.next_daemon(last)

    def run(self, *command: str, timeout_s: float = WAIT_S) -> Finished:
        """Run a program that looks at it, to its end."""
        return run_beside(self.folder, *command, timeout_s=timeout_s)

    def sh(self, script: str, *arguments: str, timeout_s: float = WAIT_S) -> str:
        """What a script of the shell says that is to end well; `$0` is the mount."""
        done = self.run("bash", "-euc", script, str(self.folder), *arguments, timeout_s=timeout_s)
        assert done.code == 0, f"{script}\n{done.text}\n{self.log}"
        return done.out

    def looking(self, *command: str) -> Looking:
        """A program that looks at it beside the test."""
        return Looking(self.folder, *command)

    def look(self, function: Callable[..., Any], *arguments: Any) -> Looking:
        """Call a function of a module of tests in a child."""
        return Looking(self.folder, *python(function, *arguments))

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = WAIT_S) -> Any:
        """What a function says, which a child calls."""
        done = self.run(*python(function, *arguments), timeout_s=timeout_s)
        assert done.code == 0, f"{done.text}\n{self.log}"
        return json.loads(done.out)

    def command(self, *arguments: str, environment: dict[str, str] | None = None) -> Finished:
        """Another `stoker` of the same user, to its end."""
        command = [sys.executable, "-m", "stoker.cli.main", *arguments]
        return run_beside(self.folder, *command, environment={**self.environment, **(environment or {})})

    def end(self) -> int:
        """Ctrl-C; with what it ends. By force where that takes too long."""
        if self.holder.poll() is None:
            self.holder.send_signal(signal.SIGINT)
        try:
            code: int = self.holder.wait(WAIT_S)
        except psutil.TimeoutExpired:
            self.destroy()
            raise AssertionError(f"the mount does not end\n{self.log}") from None
        self.destroy()
        return code

    def destroy(self) -> None:
        """Nothing of it is left, whatever it takes."""
        abort(self.folder)
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [self.holder, *self.holder.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.holder.wait()
        psutil.wait_procs(family, timeout=WAIT_S)
        while (there := mounted_on(str(self.folder))) is not None and there.file_system == FILE_SYSTEM:
            with contextlib.suppress(EnvironmentProblem):
                device.unmount(str(self.folder), is_lazy=True)

    def _child(self, module: str) -> psutil.Process | None:
        for child in self.holder.children():
            with contextlib.suppress(psutil.Error):
                if module in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None


@contextlib.contextmanager
def mounted(base: Path, source: str | Path, *options: str, cache: bool = True) -> Iterator[Mount]:
    """A mount, with a cache of its own where `cache` does not say otherwise, unmounted in the end."""
    mount = Mount(base, str(source), *options, cache=cache)
    try:
        yield mount.wait()
    finally:
        print(mount.log)
        try:
            if mount.holder.poll() is None:
                mount.end()
        finally:
            mount.destroy()


def wait_until_held(mount: Mount, name: str, size_bytes: int) -> None:
    """What was read is stored soon after."""
    wait_until_all_held(mount, {name: size_bytes})


def wait_until_all_held(mount: Mount, sizes: dict[str, int]) -> None:
    """Each of many, in whatever order they are stored."""
    wait_for(
        lambda: mount.call(readers.all_held_bytes, mount.folder, list(sizes)) == list(sizes.values()),
        WAIT_S,
        "files that are held",
    )


def stop(process: psutil.Process, seconds: float = WAIT_S) -> None:
    """Have a process stand still, and wait until it does."""
    process.suspend()
    until = time.monotonic() + seconds
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.01)


def lines(output: str) -> Sequence[str]:
    """Sorted, for what comes in any order."""
    return sorted(output.splitlines())
