"""Control groups of Linux, of both versions: where this process is, and what a group says of memory and processors."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from stoker.platform.proc import read_text

NO_LIMIT_BYTES = 1 << 62
"""Version 1 has a number near 2^63 where there is no limit."""


@dataclass(frozen=True)
class MemoryGroup:
    """A folder of the kernel's in which processes share a memory limit. The questions never raise OSError."""

    path: Path
    version: Literal[1, 2]
    mount: Path

    def child(self, name: str) -> MemoryGroup:
        return MemoryGroup(self.path / name, self.version, self.mount)

    def oom_kills(self) -> int | None:
        """Processes of this group that the kernel has killed for want of memory, be it the group's or the machine's;
        None: unknown. Version 2 counts those of groups below it, too.

        Kernels since 4.13 count them; a pidfd, which Stoker needs anyway, is younger.
        """
        return self._number_in("memory.oom_control" if self.version == 1 else "memory.events", "oom_kill")

    def peak_bytes(self) -> int:
        """The most memory that was used at once; 0: unknown."""
        return self._number("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")

    def limit_bytes(self) -> int:
        """The least of its own limit and those above it; 0: none."""
        return self.least_limit()[0]

    def least_limit(self) -> tuple[int, MemoryGroup]:
        """That limit, and the group that has it; 0: there is none."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        groups = (MemoryGroup(path, self.version, self.mount) for path in _up_to(self.mount, self.path))
        limits = [(group._number(name), group) for group in groups]
        least = [one for one in limits if 0 < one[0] < NO_LIMIT_BYTES]
        return min(least, key=lambda one: one[0], default=(0, self))

    def used_bytes(self) -> int:
        """What is used and cannot be dropped: without the file cache that nobody has touched lately, as Kubernetes
        counts it."""
        used = self._number("memory.usage_in_bytes" if self.version == 1 else "memory.current")
        return max(0, used - (self._number_in("memory.stat", "inactive_file") or 0))

    def pids(self) -> list[int]:
        """Processes in this very group."""
        try:
            return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]
        except (OSError, ValueError):
            return []

    def set_limit(self, size_bytes: int) -> None:
        """Limit memory and swap together: swapping would only make the end slow. Raises OSError."""
        if self.version == 2:
            self.write("memory.max", str(size_bytes))
            with contextlib.suppress(OSError):  # no swap in this kernel
                self.write("memory.swap.max", "0")
            return
        self.write("memory.limit_in_bytes", str(size_bytes))
        with contextlib.suppress(OSError):  # swap is not accounted for in this kernel
            self.write("memory.memsw.limit_in_bytes", str(size_bytes))
        with contextlib.suppress(OSError):  # a group inherits that its processes wait instead of being killed
            self.write("memory.oom_control", "0")

    def write(self, name: str, text: str) -> None:
        """Write one of the group's files. Raises OSError."""
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """End every process in it."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove it, which the kernel allows when nothing lives in it; whether it is gone."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _number(self, name: str) -> int:
        try:
            return int((self.path / name).read_text())
        except (OSError, ValueError):
            return 0

    def _number_in(self, name: str, key: str) -> int | None:
        try:
            return number_after((self.path / name).read_text(), key)
        except OSError:
            return None


def number_after(text: str, key: str) -> int | None:
    """The number in the line `key number`, as many files of the kernel have it; None: there is no such line."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return None


def own_group(proc: Path = Path("/proc")) -> MemoryGroup | None:
    """The group whose memory limit this process is under; None: there is none, or it cannot be seen from here."""
    for version, mount, path in _places("memory", proc):
        if version == 1 or _has_memory(path):
            return MemoryGroup(path, version, mount)
    return None


def processor_quota(proc: Path = Path("/proc")) -> float | None:
    """Processors that this process's control group and those above it leave it; None: as many as there are."""
    quotas: list[float] = []
    for _, mount, path in _places("cpu", proc):
        for folder in _up_to(mount, path):
            text = read_text(folder / "cpu.max") or (
                f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"
            )
            quota, _, period = text.partition(" ")
            if quota.isdigit() and period.isdigit() and int(period) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _places(controller: str, proc: Path) -> list[tuple[Literal[1, 2], Path, Path]]:
    """Where a controller may govern this process: version, mount point and its own folder there."""
    try:
        memberships = (proc / "self/cgroup").read_text(errors="surrogateescape")
        mounts = (proc / "self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return []
    places: list[tuple[Literal[1, 2], Path, Path]] = []
    versions: tuple[Literal[1, 2], ...] = (1, 2)
    for version in versions:
        member = _membership(memberships, version, controller)
        if member is None:
            continue
        for root, mount in _mounts(mounts, version, controller):
            path = _below(mount, root, member)
            if path is not None:
                places.append((version, mount, path))
    return places


def _membership(text: str, version: Literal[1, 2], controller: str) -> PurePosixPath | None:
    """This process's group, from `/proc/self/cgroup`: lines `number:controllers:path`."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        fits = number == "0" and not controllers if version == 2 else controller in controllers.split(",")
        if fits:
            return PurePosixPath(path)
    return None


def _mounts(text: str, version: Literal[1, 2], controller: str) -> list[tuple[PurePosixPath, Path]]:
    """Root within the hierarchy, and mount point, from `/proc/self/mountinfo` (see proc(5))."""
    found = []
    for line in text.splitlines():
        place, _, kind = line.partition(" - ")
        fields, kinds = place.split(), kind.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        is_v1 = kinds[0] == "cgroup" and controller in kinds[2].split(",")
        if is_v1 if version == 1 else kinds[0] == "cgroup2":
            found.append((PurePosixPath(_plain(fields[3])), Path(_plain(fields[4]))))
    return found


def _up_to(mount: Path, path: Path) -> list[Path]:
    """A group's folder and those above it."""
    return [path, *(above for above in path.parents if above == mount or mount in above.parents)]


def _plain(text: str) -> str:
    """Undo mountinfo's octal escapes."""
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escape, character)
    return text


def _below(mount: Path, root: PurePosixPath, member: PurePosixPath) -> Path | None:
    """Where a group is under a mount that shows the hierarchy from `root` on."""
    if ".." in member.parts or not member.is_relative_to(root):
        return None
    path = mount / member.relative_to(root)
    return path if path.is_dir() else None


def _has_memory(path: Path) -> bool:
    return "memory" in read_text(path / "cgroup.controllers").split()
