"""A memory limit for each worker: a control group of its own, made before it starts and removed after its end.

Why not a resource limit of the process (RLIMIT_AS, `ulimit -v`), which needs no rights: it counts addresses, not
memory. CUDA reserves addresses for all memory of host and devices at its start, an allocator and each thread reserve
more than they use, and a dataset that is mapped counts in full, so any limit that would catch a leak forbids the work.
It counts each process alone, so loader processes come on top. And it shows as a failed allocation somewhere in the
middle of a library, not as a kill that the kernel accounts for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from pathlib import Path

from stoker.base.units import format_bytes
from stoker.errors import ConfigError
from stoker.platform.memory_cgroup import MemoryGroup, own_group
from stoker.platform.proc import read_text, stat_fields

log = logging.getLogger("stoker.platform")
LEAST_BYTES = 32 * 1024 * 1024
"""A limit under which not even an interpreter starts."""
MEND = (
    "the agent needs a control group to itself, which `systemd-run --user --scope -p Delegate=yes stoker run ...` "
    "gives; in a container /sys/fs/cgroup must be writable"
)
_NAME = re.compile(r"^stoker-(\d+)-(\d+)-(\d+)-")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


class WorkerMemory:
    """The group of one worker."""

    def __init__(self, group: MemoryGroup, limit_bytes: int) -> None:
        self.group = group
        self.limit_bytes = limit_bytes
        self._entrance = os.open(group.path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        self._oom_kills = 0
        self._peak_bytes = 0

    def before_exec(self) -> None:
        """Put the calling process into the group: for the child, between fork and exec.

        Never raises, as that would be told as a failure of the program.
        """
        with contextlib.suppress(OSError):
            os.write(self._entrance, b"0")

    def oom_killed(self) -> bool:
        """Whether the kernel has killed any of its processes for want of memory. Goes on to be known after `close`."""
        self._oom_kills = self.group.oom_kills() or self._oom_kills
        return self._oom_kills > 0

    def peak_bytes(self) -> int:
        """The most memory that it used at once; 0: unknown. Goes on to be known after `close`."""
        self._peak_bytes = self.group.peak_bytes() or self._peak_bytes
        return self._peak_bytes

    def close(self) -> bool:
        """End what is left of the worker and remove the group; whether it is gone. May be called again."""
        if self._entrance >= 0:
            self.oom_killed()
            self.peak_bytes()
            os.close(self._entrance)
            self._entrance = -1
        self.group.kill()
        return self.group.remove()


class MemoryLimits:
    """Makes groups for this agent's workers, and removes them.

    Where that is not possible `problem` says why, it is logged once, and workers run without a limit.
    """

    def __init__(self, base: MemoryGroup | None = None) -> None:
        """`base`: the group under which those of the workers are made; by default this process's own."""
        self.problem = ""
        self._base = base if base is not None else own_group()
        self._tag = f"stoker-{_pid_namespace()}-{os.getpid()}-{_started_at(os.getpid())}-"
        self._made = 0
        self._open: list[WorkerMemory] = []
        self._own_leaf: MemoryGroup | None = None
        self._said = False
        self._ready = False

    @property
    def base(self) -> MemoryGroup | None:
        """Where the groups of the workers are made."""
        return self._base

    def prepare(self, worker: str, limit_bytes: int) -> WorkerMemory | None:
        """A group for a worker that is about to start; None: no limit can be set here.

        Raises ConfigError for a limit under which no worker can start.
        """
        if limit_bytes < LEAST_BYTES:
            raise ConfigError(
                f"--worker-memory {format_bytes(limit_bytes)}: give at least {format_bytes(LEAST_BYTES)}"
            )
        self.sweep()
        if not self.problem and not self._ready:
            self._get_ready()
        if self._base is not None and not self.problem:
            self._made += 1
            group = self._base.child(f"{self._tag}{self._made}-{_UNSAFE.sub('_', worker)[:60]}")
            try:
                return self._make(group, limit_bytes)
            except OSError as error:
                group.remove()
                self.problem = f"{group.path}: {error.strerror}"
        if not self._said:
            self._said = True
            log.warning(
                "--worker-memory has no effect, workers run without a limit: %s; %s", self.problem, MEND
            )
        return None

    def sweep(self) -> None:
        """Remove groups of workers that have ended, and empty ones of agents that died.

        Of the latter only those whose process is known to be gone are touched, and nothing in them is ended.
        """
        self._open = [memory for memory in self._open if memory._entrance >= 0 or not memory.close()]
        if self._base is None:
            return
        for path in _folders(self._base.path):
            if _is_orphan(path.name):
                self._base.child(path.name).remove()

    def close(self, wait_s: float = 2.0) -> None:
        """End what is left of this agent's workers and remove all its groups; the kernel may take up to `wait_s`."""
        deadline = time.monotonic() + wait_s
        self._open = [memory for memory in self._open if not memory.close()]
        while self._open and time.monotonic() < deadline:
            time.sleep(0.005)
            self._open = [memory for memory in self._open if not memory.close()]
        if self._own_leaf is not None and self._base is not None and not self._open:
            _give_back(self._base, self._own_leaf)
            self._own_leaf = None
        self._ready = False

    def _make(self, group: MemoryGroup, limit_bytes: int) -> WorkerMemory:
        group.path.mkdir()
        group.set_limit(limit_bytes)
        memory = WorkerMemory(group, limit_bytes)
        self._open.append(memory)
        return memory

    def _get_ready(self) -> None:
        """Version 2 limits the groups below one only if none but they hold processes: this agent moves into one, too.

        That is what a delegated group is for (systemd's "Control Group APIs and Delegation"); where processes of others
        are in it, nothing is changed.
        """
        base = self._base
        if base is None:
            self.problem = "this process is in no memory control group that can be seen from here"
            return
        self._ready = True
        if base.version == 1 or _hands_on_memory(base):
            return
        with contextlib.suppress(OSError):
            base.write("cgroup.subtree_control", "+memory")
            return
        leaf = base.child(f"{self._tag}0-agent")
        try:
            leaf.path.mkdir()
            for pid in _family(base.pids()):
                leaf.write("cgroup.procs", str(pid))
            base.write("cgroup.subtree_control", "+memory")
            self._own_leaf = leaf
        except OSError as error:
            self.problem = f"{base.path} cannot be divided: {error.strerror}"
            _give_back(base, leaf)


def node_memory_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that this process and what it starts may use: the machine's, or its group's limit if less; 0: unknown."""
    group = own_group(proc)
    known = [_machine_bytes(proc), group.limit_bytes() if group is not None else 0]
    return min((size for size in known if size), default=0)


def _machine_bytes(proc: Path) -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB$", read_text(proc / "meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match is not None else 0


def _hands_on_memory(group: MemoryGroup) -> bool:
    return "memory" in read_text(group.path / "cgroup.subtree_control").split()


def _give_back(base: MemoryGroup, leaf: MemoryGroup) -> None:
    """Undo the move into `leaf`, as far as the kernel allows."""
    with contextlib.suppress(OSError):
        base.write("cgroup.subtree_control", "-memory")
    for pid in leaf.pids():
        with contextlib.suppress(OSError):
            base.write("cgroup.procs", str(pid))
    leaf.remove()


def _family(pids: list[int]) -> list[int]:
    """Those of the processes that are this one or descend from it."""
    parents = {pid: _stat(pid, 1) for pid in pids}
    return [pid for pid in pids if _descends(pid, parents)]


def _descends(pid: int, parents: dict[int, int]) -> bool:
    seen: set[int] = set()
    while pid and pid not in seen:
        if pid == os.getpid():
            return True
        seen.add(pid)
        pid = parents.get(pid, 0) or _stat(pid, 1)
    return False


def _folders(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.name.startswith("stoker-")]
    except OSError:
        return []


def _is_orphan(name: str) -> bool:
    """Whether a group was made by a process of this PID namespace that is no more."""
    match = _NAME.match(name)
    if match is None:
        return False
    namespace, pid, started = (int(number) for number in match.groups())
    return namespace == _pid_namespace() and _started_at(pid) != started


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started_at(pid: int) -> int:
    """When a process started, in the kernel's ticks, which with its id names it for good; 0: there is none."""
    return _stat(pid, 19)


def _stat(pid: int, place: int) -> int:
    """A number of `/proc/PID/stat`, counted from the state; 0 when the process is gone."""
    fields = stat_fields(pid)
    return int(fields[place]) if fields else 0
