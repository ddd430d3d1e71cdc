"""Messages of a training job: agent ↔ master, and worker ↔ agent.

Both directions are *level-triggered*: a report carries all that a node is, a directive all that it should be,
each with a sequence number. A lost message is healed by the next one, a doubled or late one is dropped by its
number, and nobody has to remember what was acknowledged.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stoker.wire.exits import ExitFacts
from stoker.wire.health import CheckReply, CheckTask, NodeUse, StackReply, StackRequest

PROTOCOL = 2
"""Version of these messages. A peer with another one is refused."""

REFUSAL = 0
"""Number of the answer to a hello that is refused; calls are numbered from 1."""

WorkerPhase = Literal["starting", "parked", "member", "finished", "exited"]


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages: immutable, tagged with its class name."""


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
    """It has never shared a world's state: it must copy, whatever its commits say, unless `restored` says more."""
    restored: str = ""
    """Of a fresh one: what its state was loaded from, the same where all is the same bit for bit but random generators,
    which each worker has of its own; empty: not known."""
    store: str = ""
    """`host:port` of its rendezvous store."""
    elastic: bool = False
    """It imported Stoker and can change worlds in the process."""
    progress: int = 0
    """Batches handed out and collectives entered since its last commit: of those who wait for each other, the one that
    is behind keeps the others waiting."""
    busy_s: float = 0.0
    """Seconds of its own work in all steps so far: from a commit until its gradients were ready."""
    metrics: dict[str, float] = {}
    """What the script has reported of itself."""
    broke: str = ""
    """What broke the world that it left last, in one line; empty: an order did."""


class WorkerReport(Message, frozen=True, tag="worker"):
    """A worker as its agent sees it."""

    worker: str
    slot: int
    pid: int
    state: WorkerState
    exit: ExitFacts | None = None
    stopped_s: float = 0.0
    """Seconds that the process has been stopped (state T); 0: it runs."""


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
    resumes: bool = False
    """It was taken before and its workers run: only the stream to the master is new."""
    report_seq: int = -1
    """Number of the last report that it made: older ones may still be under way."""
    directive_seq: int = 0
    """Number of the newest directive that it holds."""
    generation: int = 0
    """The newest generation that it has heard of."""
    world: int = 0
    """Generation of the newest world that it was told of."""


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
    directive_seq: int = 0
    """The newest directive that it holds: should there be a newer one, it got lost."""


class Beat(Message, frozen=True, tag="beat"):
    """Nothing has changed since the report with this number."""

    node: str
    seq: int
    directive_seq: int = 0


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
    memory_bytes: int = 0
    """Its memory limit; 0: none."""


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

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that copy the state."""
        return tuple(m.rank for m in self.members if m.copy_state)


class WorldView(Message, frozen=True, tag="world_view"):
    """A world as one node needs to know it: its own members, and how many there are in all."""

    generation: int
    size: int
    members: tuple[Member, ...]
    """This node's own, ordered by rank."""
    source: int
    commits: int
    store: str
    receivers: tuple[int, ...] = ()
    """Ranks that copy the state; empty with `all_receive`."""
    all_receive: bool = False
    """Every rank but the source copies it."""

    def member(self, worker: str) -> Member | None:
        """This worker's place in it."""
        return next((m for m in self.members if m.worker == worker), None)


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
    world: WorldView | None = None
    """The world of `generation` once everybody has acknowledged it."""
    run: tuple[WorkerSpec, ...] = ()
    outcome: Outcome | None = None
    leave: str = ""
    """Why this node is asked to leave the job; empty: it stays."""
    note: str = ""
    """What the job is doing, for people."""
    epoch: int = 0
    """Number of the mastership that gives it: one of an older master is refused."""
    report_interval_s: float = 0.0
    """Least seconds between two reports of commits alone: many nodes would drown the master in them."""
    saves: bool = False
    """Of all nodes, this one writes its snapshots to the storage."""


class Refused(Message, frozen=True, tag="refused"):
    """The master does not take this node."""

    why: str
    is_stranger: bool = False
    """It is not this node's master, and never was: the node's own may come back."""
    outcome: Outcome | None = None
    """It comes after the end of the job: how that was, for a node that was away then."""


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
    world: WorldView | None = None
    released: bool = False
    """The run is over: leave."""


class Call(Message, frozen=True, tag="call"):
    """A worker asks a service of the master's. Asked again with the same number it gets the same answer."""

    number: int
    service: str
    """`shards`, `meeting` or `remarks`."""
    body: bytes
    """The service's own message."""


class Answer(Message, frozen=True, tag="answer"):
    """What a service says to a call."""

    number: int
    body: bytes = b""
    error: str = ""
    """Why the call cannot be answered; empty: it was."""


class WorkerCall(Message, frozen=True, tag="worker_call"):
    """A worker's call, passed on by its agent, which repeats it on a new stream until it is answered."""

    worker: str
    call: Call


class WorkerAnswer(Message, frozen=True, tag="worker_answer"):
    """The answer to a worker's call, on its way."""

    worker: str
    answer: Answer


ToMaster = Join | NodeReport | Beat | WorkerCall | StackReply | CheckReply | NodeUse
ToAgent = Directive | Refused | WorkerAnswer | StackRequest | CheckTask
FromWorker = Hello | WorkerState | Failure | Call
ToWorker = Order | Answer


def view_of(world: World, members: tuple[Member, ...]) -> WorldView:
    """A world cut down to a node with these members."""
    receivers = world.receivers
    everybody = len(receivers) == len(world.members) - 1
    return WorldView(
        generation=world.generation,
        size=len(world.members),
        members=members,
        source=world.source,
        commits=world.commits,
        store=world.store,
        receivers=() if everybody else receivers,
        all_receive=everybody,
    )
