"""What a node has and what its workers take, read from /proc and the control group.

A report costs well below a millisecond per worker. What may take long or hang (the free space of a log folder on a
dead network file system, an accelerator's driver) is asked aside, now and then, and the newest answer is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.agent.programs import ProgramStuck, run_program
from stoker.base.clock import Clock
from stoker.platform.memory_cgroup import own_group, processor_quota
from stoker.platform.proc import read_text, stat_fields
from stoker.wire.health import GpuUse, NodeUse, WorkerUse, bounded_text

log = logging.getLogger("stoker.agent")
ASIDE_EVERY_S = 15.0
"""Seconds between two questions about disk and accelerators."""
ASIDE_WAIT_S = 0.2
"""How long a report waits for them."""
GPU_TIMEOUT_S = 10.0
GPU_QUERY = "index,name,utilization.gpu,memory.used,memory.total"
ANCESTORS_MAX = 64


@dataclass(frozen=True)
class ProcessUse:
    """One process, as /proc shows it."""

    state: str
    cpu_s: float
    resident_bytes: int
    threads: int


@dataclass(frozen=True)
class GroupMemory:
    """Memory of a control group; a limit of 0: none."""

    limit_bytes: int = 0
    used_bytes: int = 0
    oom_kills: int = -1


class ResourceMeter:
    """Measures one node. Shares are those of the time since the report before; the first one's are 0."""

    def __init__(self, log_dir: Path, clock: Clock, *, gpu_command: str | None = None) -> None:
        self._log_dir = log_dir
        self._clock = clock
        self._gpu_command = gpu_command or shutil.which("nvidia-smi")
        self._measured_at = 0.0
        self._cpu_s: dict[int, float] = {}
        self._machine: tuple[float, float] = (0.0, 0.0)
        self._disk_free_bytes = -1
        self._gpus: tuple[GpuUse, ...] = ()
        self._aside: asyncio.Task[None] | None = None
        self._aside_at: float | None = None

    async def measure(self, workers: Mapping[str, int]) -> NodeUse:
        """A report of this node and of these workers (worker → process id)."""
        await self._ask_aside()
        now = self._clock.now()
        passed_s, self._measured_at = now - self._measured_at, now
        uses, cpu_s = [], {}
        for worker, pid in workers.items():
            use = read_process(pid)
            spent_s = use.cpu_s - self._cpu_s.get(pid, use.cpu_s)
            cpu_s[pid] = use.cpu_s
            cores = spent_s / passed_s if passed_s > 0 else 0.0
            uses.append(WorkerUse(worker, pid, use.state, cores, use.resident_bytes, use.threads))
        self._cpu_s = cpu_s
        memory, group = read_memory(), read_group_memory()
        return NodeUse(
            cores=available_cores(),
            cpu_share=self._machine_share(),
            load=_load(),
            memory_total_bytes=memory.get("MemTotal", 0),
            memory_available_bytes=memory.get("MemAvailable", 0),
            memory_limit_bytes=group.limit_bytes,
            memory_used_bytes=group.used_bytes,
            oom_kills=group.oom_kills,
            disk_free_bytes=self._disk_free_bytes,
            gpus=self._gpus,
            workers=tuple(uses),
        )

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._aside is not None:
            self._aside.cancel()

    def _machine_share(self) -> float:
        busy, total = read_machine_cpu()
        before_busy, before_total = self._machine
        self._machine = busy, total
        if before_total == 0 or total <= before_total:
            return 0.0
        return max(0.0, min(1.0, (busy - before_busy) / (total - before_total)))

    async def _ask_aside(self) -> None:
        now = self._clock.now()
        is_due = self._aside_at is None or now - self._aside_at >= ASIDE_EVERY_S
        if is_due and (self._aside is None or self._aside.done()):
            self._aside_at = now
            self._aside = asyncio.create_task(self._answer_aside(), name="agent-resources")
        if self._aside is not None and not self._aside.done():
            await asyncio.wait({self._aside}, timeout=ASIDE_WAIT_S)

    async def _answer_aside(self) -> None:
        await asyncio.gather(self._ask_disk(), self._ask_gpus())

    async def _ask_disk(self) -> None:
        self._disk_free_bytes = await _in_daemon_thread(lambda: free_bytes(self._log_dir))

    async def _ask_gpus(self) -> None:
        if self._gpu_command is None:
            return
        try:
            self._gpus = await read_gpus(self._gpu_command)
        except ProgramStuck as error:
            self._gpu_command, self._gpus = None, ()
            log.warning("%s: accelerators are not looked at any more, their driver may hang", error)


def read_process(pid: int) -> ProcessUse:
    """A process's state and use; all empty when it is gone."""
    fields = stat_fields(pid)
    if not fields:
        return ProcessUse("", 0.0, 0, 0)
    ticks_s, page_bytes = 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    return ProcessUse(
        state=fields[0],
        cpu_s=(int(fields[11]) + int(fields[12])) * ticks_s,
        resident_bytes=int(fields[21]) * page_bytes,
        threads=int(fields[17]),
    )


def process_state(pid: int) -> str:
    """The state letter of a process (R, S, D, T, t, Z); empty when it is gone."""
    return read_process(pid).state


def belongs_to(pid: int, leader: int) -> bool:
    """Whether a process is of the session that another one leads, or descends from that one."""
    with contextlib.suppress(OSError):
        if os.getsid(pid) == leader:
            return True
    for _ in range(ANCESTORS_MAX):
        pid = parent_of(pid)
        if pid == leader:
            return True
    return False


def parent_of(pid: int) -> int:
    """The parent of a process; 0: it has none, or is gone."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def main_thread_wakeups(pid: int) -> int:
    """How often the main thread has been put on a processor so far; -1 when the process is gone."""
    switches = _fields(Path(f"/proc/{pid}/task/{pid}/status"), ":")
    counts = [int(value) for name, value in switches.items() if name.endswith("voluntary_ctxt_switches")]
    return sum(counts) if counts else -1


def read_memory() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    kibibytes = {
        name: value.split()[0] for name, value in _fields(Path("/proc/meminfo"), ":").items() if value
    }
    return {name: int(value) * 1024 for name, value in kibibytes.items() if value.isdigit()}


def read_machine_cpu() -> tuple[float, float]:
    """Ticks in which the machine's processors were busy so far, and all ticks."""
    try:
        with Path("/proc/stat").open() as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return 0.0, 0.0
    idle = sum(ticks[3:5])  # idle, and waiting for a disk
    return float(sum(ticks) - idle), float(sum(ticks))


def available_cores(proc: Path = Path("/proc")) -> float:
    """Processors that this process may use: by its affinity and its control group's quota."""
    cores, quota = float(len(os.sched_getaffinity(0))), processor_quota(proc)
    return cores if quota is None else min(cores, quota)


def read_group_memory() -> GroupMemory:
    """The tightest memory limit of this process's control group and those above it, and what is used of it."""
    group = own_group()
    if group is None:
        return GroupMemory()
    limit_bytes, tightest = group.least_limit()
    kills = group.oom_kills()
    return GroupMemory(
        limit_bytes, tightest.used_bytes() if limit_bytes else 0, -1 if kills is None else kills
    )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write there; -1 when there is no such folder."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return -1
    return status.f_bavail * status.f_frsize


async def read_gpus(command: str, *, timeout_s: float = GPU_TIMEOUT_S) -> tuple[GpuUse, ...]:
    """What `nvidia-smi` says; nothing when it fails or takes too long. Raises ProgramStuck."""
    query = (command, f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits")
    try:
        said = await run_program(*query, timeout_s=timeout_s)
    except ProgramStuck:
        raise
    except (OSError, TimeoutError):
        return ()
    return parse_gpus(said.stdout.decode(errors="replace")) if said.code == 0 else ()


def parse_gpus(text: str) -> tuple[GpuUse, ...]:
    """`nvidia-smi --query-gpu` in CSV without units; lines that are none are left out, unknown values are 0."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 5 and row[0].isdigit():
            busy, used, total = (int(field) if field.isdigit() else 0 for field in row[2:])
            gpus.append(GpuUse(int(row[0]), bounded_text(row[1]), busy / 100, used << 20, total << 20))
    return tuple(gpus)


def _load() -> float:
    text = read_text(Path("/proc/loadavg"))
    return float(text.split()[0]) if text else 0.0


def _fields(path: Path, separator: str) -> dict[str, str]:
    lines = (line.partition(separator) for line in read_text(path).splitlines())
    return {name: value.strip() for name, _, value in lines}


def _in_daemon_thread(ask: Callable[[], int]) -> asyncio.Future[int]:
    """Its answer; a thread that never comes back keeps nobody from ending."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[int] = loop.create_future()

    def give(value: int) -> None:
        if not answer.done():
            answer.set_result(value)

    def work() -> None:
        value = ask()
        with contextlib.suppress(RuntimeError):  # the loop is closed by now
            loop.call_soon_threadsafe(give, value)

    threading.Thread(target=work, name="stoker-aside", daemon=True).start()
    return answer
