"""Messages of a training job: agent ↔ master, and worker ↔ agent.

Both directions are *level-triggered*: a report carries all that a node is, a directive all that it should be,
each with a sequence number. A lost message is healed by the next one, a doubled or late one is dropped by its
number, and nobody has to remember what was acknowledged.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL = 1
"""Version of these messages. A peer with another one is refused."""

WorkerPhase = Literal["starting", "parked", "member", "finished", "exited"]


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages: immutable, tagged with its class name."""


class WorkerExit(Message, frozen=True, tag="exit"):
    """How a worker process ended."""

    code: int | None
    """Exit code, or None when a signal ended it."""
    signal: int | None
    message: str = ""
    """The script's traceback, or the end of its standard error."""
    wall_s: float = 0.0
    """When it ended, seconds since 1970."""


class WorkerState(Message, frozen=True, tag="worker_state"):
    """What a worker says about itself."""

    phase: WorkerPhase = "starting"
    generation: int = 0
    """The newest generation that this worker has acknowledged."""
    left: int = 0
    """The newest generation that it was a member of and has left."""
    commits: int = 0
    """Steps committed since the run began; also the state's age."""
    clean: bool = True
    """Its state stands exactly at that commit."""
    fresh: bool = True
    """It has never shared a world's state: it must copy, whatever its commits say."""
    store: str = ""
    """`host:port` of its rendezvous store."""
    elastic: bool = False
    """It imported Stoker and can change worlds in the process."""


class WorkerReport(Message, frozen=True, tag="worker"):
    """A worker as its agent sees it."""

    worker: str
    slot: int
    pid: int
    state: WorkerState
    exit: WorkerExit | None = None


class Join(Message, frozen=True, tag="join"):
    """The first message of an agent."""

    node: str
    job: str
    """The job that it wants to be part of (`--rdzv-id`)."""
    host: str
    address: str
    """Where other nodes reach this one."""
    slots: int
    """Workers that this node runs."""
    rank_hint: int = -1
    """`--node-rank`, or -1."""
    protocol: int = PROTOCOL


class NodeReport(Message, frozen=True, tag="report"):
    """All that a node is."""

    node: str
    seq: int
    workers: tuple[WorkerReport, ...]
    spare_port: int = 0
    """A free TCP port on this node, for a script's own rendezvous."""
    leaving: str = ""
    """Why this node asks to leave; empty: it stays."""
    problem: str = ""
    """Why this node cannot run workers (it then leaves)."""


class WorkerSpec(Message, frozen=True, tag="spec"):
    """A worker that a node should run, with the environment that torchrun would give it."""

    worker: str
    slot: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    master_addr: str
    master_port: int
    restart_count: int
    max_restarts: int


class Member(Message, frozen=True, tag="member"):
    """One worker's place in a world."""

    worker: str
    node: str
    rank: int
    local_rank: int
    local_world_size: int
    group_rank: int
    copy_state: bool
    """It receives the state from the source."""


class World(Message, frozen=True, tag="world"):
    """One agreed world. `members` is ordered by rank."""

    generation: int
    members: tuple[Member, ...]
    source: int
    """Rank whose state the others copy."""
    commits: int
    """Commits of that state."""
    store: str
    """`host:port` of the store through which the group meets."""


class Outcome(Message, frozen=True, tag="outcome"):
    """How the job ended."""

    success: bool
    exit_code: int
    why: str
    error: str = ""
    """Traceback of the first failure."""
    failed_worker: str = ""


class Directive(Message, frozen=True, tag="directive"):
    """All that a node should be."""

    seq: int
    generation: int
    """The generation to acknowledge."""
    stop_at_commit: int = -1
    """Members of an older generation leave it at this commit; -1: at once."""
    world: World | None = None
    """The world of `generation` once everybody has acknowledged it."""
    run: tuple[WorkerSpec, ...] = ()
    outcome: Outcome | None = None


class Refused(Message, frozen=True, tag="refused"):
    """The master does not take this node."""

    why: str


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a worker to its agent."""

    worker: str
    pid: int
    protocol: int = PROTOCOL


class Failure(Message, frozen=True, tag="failure"):
    """The script's uncaught exception, said before the process ends."""

    message: str


class Order(Message, frozen=True, tag="order"):
    """What an agent tells its worker: the directive, cut down to what concerns it."""

    generation: int
    stop_at_commit: int = -1
    world: World | None = None
    released: bool = False
    """The run is over: leave."""


ToMaster = Join | NodeReport
ToAgent = Directive | Refused
FromWorker = Hello | WorkerState | Failure
ToWorker = Order
