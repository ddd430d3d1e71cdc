"""Messages about the health of nodes and workers: node checks, stacks of stuck workers, resources in use.

Everything is bounded in size: a stack keeps its innermost and outermost frames, a process its first threads, and
text is cut, so that no report can grow with what a script does.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_FRAMES = 60
"""Frames kept of one thread: of more, the innermost two thirds and the outermost third."""
MAX_THREADS = 40
MAX_TEXT = 300
"""Characters kept of a name or a reason."""

STACK_SIGNAL_OFFSET = 5
"""The signal SIGRTMIN plus this asks a worker to write its stacks."""

CheckStage = Literal["start", "matmul", "meet", "allreduce", "done"]
StackSource = Literal["py-spy", "faulthandler", "none"]


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of these messages: immutable, tagged."""


class CheckGroup(Message, frozen=True, tag="check_group"):
    """What a node is told: check itself together with these nodes."""

    group: int
    """Number of this group; a result carries it, and that of an older group is refused."""
    round: int
    nodes: tuple[str, ...]
    """In the order of their ranks; the first one hosts the store through which they meet."""


class CheckResult(Message, frozen=True, tag="check_result"):
    """How a node's check went."""

    ok: bool
    matmul_s: float = 0.0
    """Median seconds of one matrix product on the device; 0: not measured."""
    allreduce_s: float = 0.0
    """Median seconds of one all-reduce in the group; 0: not measured, or the node was alone."""
    elapsed_s: float = 0.0
    """Seconds of the whole check."""
    why: str = ""
    """Why it failed; empty when ok."""
    stage: CheckStage = "done"
    """How far it came. A failure in `start` or `matmul` is the node's own; later it may be a peer's."""


class CheckTask(Message, frozen=True, tag="check_task"):
    """What an agent is told: run the check program. It is told again until it has replied."""

    group: int
    rank: int
    world_size: int
    store: str
    """`host:port` where rank 0's program listens for the others."""
    timeout_s: float


class CheckReply(Message, frozen=True, tag="check_reply"):
    """What the check program found."""

    group: int
    result: CheckResult


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One call on a stack."""

    function: str
    file: str
    line: int


class ThreadStack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thread's calls, the innermost first."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    active: bool | None = None
    """It was on a processor or holds the GIL; None: not known."""
    holds_gil: bool | None = None


class Stacks(Message, frozen=True, tag="stacks"):
    """The stacks of one process at one moment."""

    pid: int
    source: StackSource = "none"
    threads: tuple[ThreadStack, ...] = ()
    state: str = ""
    """The process's state letter as in /proc: R, S, D, T (stopped), Z; empty: not known."""
    wakeups: int = -1
    """How often its main thread has been put on a processor so far; -1: not known. It does not grow in a deadlock."""
    unavailable: str = ""
    """Why there are no stacks; empty: there are."""

    @property
    def main(self) -> ThreadStack | None:
        """The main thread's stack."""
        return next((thread for thread in self.threads if thread.is_main), None)


class StackRequest(Message, frozen=True, tag="stack_request"):
    """What a node is told: take the stacks of these workers."""

    look: int
    """Number of this look; a reply carries it."""
    workers: tuple[str, ...]
    samples: int
    interval_s: float
    """Seconds between two samples of one worker."""


class StackReply(Message, frozen=True, tag="stack_reply"):
    """The samples of one worker, oldest first."""

    look: int
    worker: str
    samples: tuple[Stacks, ...]


class GpuUse(Message, frozen=True, tag="gpu"):
    """One accelerator of a node."""

    index: int
    name: str
    busy_share: float
    """Share of the time in which a kernel ran, 0 to 1."""
    memory_used_bytes: int
    memory_total_bytes: int


class WorkerUse(Message, frozen=True, tag="worker_use"):
    """What one worker process takes. What it starts itself (data loading processes) is not in it."""

    worker: str
    pid: int
    state: str
    """State letter as in /proc; empty: the process is gone."""
    cpu_cores: float
    """Cores kept busy since the last report."""
    resident_bytes: int
    threads: int


class NodeUse(Message, frozen=True, tag="node_use"):
    """What a node has and what of it is in use."""

    cores: float
    """Processors that this agent and its workers may use; a control group's quota may be a part of one."""
    cpu_share: float
    """Share of the whole machine's processors that was busy since the last report, 0 to 1."""
    load: float
    """The load average over one minute."""
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int = 0
    """The control group's limit; 0: none."""
    memory_used_bytes: int = 0
    """What the control group uses of it."""
    oom_kills: int = -1
    """Processes of the control group that the kernel has killed for want of memory so far; -1: not known."""
    disk_free_bytes: int = -1
    """Free in the folder of the logs; -1: not known."""
    gpus: tuple[GpuUse, ...] = ()
    workers: tuple[WorkerUse, ...] = ()


def bounded_frames(frames: list[Frame]) -> tuple[Frame, ...]:
    """At most MAX_FRAMES of a stack, with a frame that says how many were left out."""
    if len(frames) > MAX_FRAMES:
        outer = MAX_FRAMES // 3
        inner = MAX_FRAMES - outer - 1
        left_out = Frame(f"... {len(frames) - inner - outer} calls left out ...", "", 0)
        frames = [*frames[:inner], left_out, *frames[-outer:]]
    return tuple(Frame(bounded_text(f.function), bounded_text(f.file), f.line) for f in frames)


def bounded_threads(threads: list[ThreadStack]) -> tuple[ThreadStack, ...]:
    """At most MAX_THREADS threads, the main one first."""
    kept = sorted(threads, key=lambda thread: not thread.is_main)[:MAX_THREADS]
    return tuple(
        msgspec.structs.replace(
            thread, name=bounded_text(thread.name), frames=bounded_frames(list(thread.frames))
        )
        for thread in kept
    )


def bounded_text(text: str) -> str:
    """At most MAX_TEXT characters of a name; of a longer one its end, which in a path says more."""
    return text if len(text) <= MAX_TEXT else f"...{text[-MAX_TEXT + 3 :]}"
