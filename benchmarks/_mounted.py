"""Mounts for benchmarks, ours and others', and programs that read them: neither ever hangs who measures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stoker.cache.mount import device
from stoker.cache.mount.places import MountPlace, mounted, mounted_on

_START_S, _END_S = 120.0, 40.0
FUSE = "fuse"


class Mounted(NamedTuple):
    """A folder that shows something else. `number`: the kernel's of it, MAJOR:MINOR."""

    folder: Path
    number: str

    @property
    def daemon_pid(self) -> int:
        """Of the process that answers; of ours."""
        info = MountPlace(str(self.folder)).info()
        if info is None:
            raise RuntimeError(f"nobody holds {self.folder}")
        return info.daemon_pid

    def requests(self) -> int:
        """How many requests the kernel has made so far, of ours: the daemon reads each with one call."""
        fields = Path(f"/proc/{self.daemon_pid}/io").read_text().split()
        return int(fields[fields.index("syscr:") + 1])


def may_mount() -> str:
    """Why nothing can be mounted here; empty if it can."""
    if not os.path.exists("/dev/fuse"):
        return "there is no /dev/fuse"
    return "" if os.geteuid() == 0 else "only root may mount"


@contextlib.contextmanager
def stoker_mount(
    source: str,
    folder: Path,
    *flags: str,
    before_exec: Callable[[], None] | None = None,
) -> Iterator[Mounted]:
    """`stoker mount` of a source on a folder, which is made."""
    folder.mkdir()
    stoker = [sys.executable, "-m", "stoker.cli.main"]
    try:
        in_time(
            [*stoker, "mount", source, str(folder), "--daemon", *flags], _START_S, before_exec=before_exec
        )
        found = _found(folder)
        assert found is not None
        yield found
    finally:
        if _found(folder) is not None:
            with contextlib.suppress(RuntimeError):
                in_time([*stoker, "umount", str(folder)], _END_S)
        _end(folder)


@contextlib.contextmanager
def other_mount(command: Sequence[str], folder: Path, env: dict[str, str]) -> Iterator[Mounted]:
    """What another program mounts on a folder, which is made; it stays in the foreground."""
    folder.mkdir()
    null = subprocess.DEVNULL
    # rclone refuses to begin with it, and what it mounts here speaks no TLS
    kept = {name: value for name, value in os.environ.items() if name != "AWS_CA_BUNDLE"}
    with subprocess.Popen(command, stdout=null, stderr=null, env=kept | env) as child:
        try:
            yield _awaited(child, folder)
        finally:
            _end(folder)
            child.terminate()
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()


def in_time(
    command: Sequence[str],
    timeout_s: float,
    *,
    before_exec: Callable[[], None] | None = None,
    env: Mapping[str, str] | None = None,
    is_silent: bool = False,
) -> str:
    """What a program says, which may read mounts; nothing where `is_silent`. Raises RuntimeError if it fails, or takes
    longer: then the mounts that it was told of end as well, which alone ends who waits for one."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL if is_silent else pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
        preexec_fn=before_exec,  # noqa: PLW1509
    ) as child:
        try:
            said, problem = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            words = [word for word in command if word.startswith("/")]
            for one in list(mounted()):
                if one.file_system.startswith(FUSE) and any(word.startswith(one.folder) for word in words):
                    _abort(one.number)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            raise RuntimeError(f"took more than {timeout_s:g} s: {' '.join(command)}") from None
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {child.returncode} {problem.strip()[-2000:]}")
    return said or ""


def evict(*folders: Path) -> None:
    """Have no file there in the page cache."""
    for folder in folders:
        for path in [folder] if folder.is_file() else folder.rglob("*"):
            with contextlib.suppress(OSError):  # a socket, or gone by now
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                try:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


def await_whole(path: Path, timeout_s: float = 120.0) -> None:
    """Until the cache of a mount of ours holds all of a file. Raises RuntimeError."""
    ask = "import os, sys; f = sys.argv[1]; print(int(os.getxattr(f, 'user.stoker.held_bytes')) == os.stat(f).st_size)"
    until = time.monotonic() + timeout_s
    while in_time([sys.executable, "-c", ask, str(path)], timeout_s).strip() != "True":
        if time.monotonic() > until:
            raise RuntimeError(f"{path} is not whole in the cache after {timeout_s:g} s")
        time.sleep(0.1)


def _awaited(child: subprocess.Popen[bytes], folder: Path) -> Mounted:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and child.poll() is None:
        found = _found(folder)
        if found is not None:
            return found
        time.sleep(0.02)
    raise RuntimeError(f"nothing was mounted on {folder}")


def _found(folder: Path) -> Mounted | None:
    there = mounted_on(str(folder))
    return None if there is None else Mounted(folder, there.number)


def _end(folder: Path) -> None:
    """Whatever is mounted there still, and whoever waits for it."""
    while (found := _found(folder)) is not None:
        _abort(found.number)
        if subprocess.run(
            ["umount", "-l", str(folder)], check=False, capture_output=True, timeout=_END_S
        ).returncode:
            return


def _abort(number: str) -> None:
    with contextlib.suppress(OSError):
        device.abort(number)
