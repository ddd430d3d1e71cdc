"""What a job's master says over its HTTP control API, and what it can be asked to do.

Routes, all below `/v1` and all but `healthz` with `Authorization: Bearer JOB_TOKEN`:

    GET  /v1/status                               JobStatus
    GET  /v1/events?after=&limit=&wait_s=         EventPage; waits for newer events up to `wait_s`
    GET  /v1/events?follow=1                      JobEvent per line (application/x-ndjson) until the job ends
    POST /v1/scale                 ScaleRequest   Accepted
    POST /v1/stop                  StopRequest    Accepted
    POST /v1/nodes/{node}/leave    LeaveRequest   Accepted
    GET  /v1/stacks?timeout_s=                    StackDump: what every rank does now
    GET  /v1/shards                               ShardList
    GET  /v1/advice                               Advice: how many nodes the job should have
    GET  /v1/metrics                              Prometheus text
    GET  /v1/healthz                              Health
    GET  /v1/openapi.json                         these routes as OpenAPI 3.1

An error is an ErrorBody with the status that `control_errors.ERRORS` names. Requests with unknown fields are refused;
unknown fields of answers are ignored, so that an older client reads a newer master. `*_wall_s` are seconds since 1970,
all other `*_s` are durations in seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from stoker.base.exposition import CONTENT_TYPE
from stoker.errors import EXIT_INTERRUPTED

JSON = "application/json"
NDJSON = "application/x-ndjson"
PROMETHEUS = CONTENT_TYPE

EVENTS_LIMIT_MAX = 10_000
WAIT_S_MAX = 60.0
STACKS_TIMEOUT_S_MAX = 60.0
BODY_BYTES_MAX = 64 * 1024

JobPhase = Literal["waiting", "forming", "running", "ended"]
NodeState = Literal["checking", "standby", "active", "away", "leaving", "cordoned"]

Why = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class Answer(msgspec.Struct, frozen=True):
    """Base of what the master says."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what the master is asked."""


class WorkerStatus(Answer, frozen=True):
    """A training process as the master knows it."""

    worker: str
    """Its id, unique in the job."""
    rank: int | None = None
    """Its rank in the newest world; null outside it."""
    slot: int = 0
    """Its place on the node: the local rank."""
    pid: int = 0
    """Its process on the node; 0 before the node has said so."""
    phase: str = "starting"
    """starting, working (without a world), parked, member, finished, stopped or exited."""
    commits: int = 0
    """Steps that its state stands at."""
    straggler_score: float | None = None
    """How much slower it is than the median of the ranks: 1.0 is as fast; null where it is not measured."""
    memory_bytes: int | None = None
    """Resident memory of the process; null where it is not measured."""
    metrics: dict[str, float | None] = {}
    """What the script reported last (`ctx.report`); null: not a finite number."""


class GpuUse(Answer, frozen=True):
    """One accelerator of a node."""

    index: int
    name: str
    busy_share: float
    """Share of the time in which a kernel ran, 0 to 1."""
    memory_used_bytes: int
    memory_total_bytes: int


class NodeUse(Answer, frozen=True):
    """What a node has and what of it is in use."""

    cores: float
    cpu_share: float
    """Share of the machine's processors that is busy, 0 to 1."""
    load: float
    """The load average over one minute."""
    memory_total_bytes: int
    memory_available_bytes: int
    disk_free_bytes: int
    """Free in the folder of the logs; -1: not known."""
    gpus: tuple[GpuUse, ...] = ()


class NodeStatus(Answer, frozen=True):
    """A node as the master knows it."""

    node: str
    """Its id, unique in the job."""
    host: str
    """The machine's name."""
    address: str
    """Where the other nodes reach it."""
    slots: int
    """Workers that it offers."""
    age: int = 0
    """Its place in the order of joining, 0 the oldest; older nodes have lower ranks."""
    state: NodeState = "active"
    """checking: it is being tested; standby: ready, and more than the target; active: its workers train or soon will;
    away: its stream is broken and it may come back; leaving: it goes at the next agreed commit; cordoned: not to be
    used."""
    why: str = ""
    """Why it is in that state."""
    silent_s: float = 0.0
    """Since its last sign of life."""
    workers: tuple[WorkerStatus, ...] = ()
    """Its workers, by slot."""
    use: NodeUse | None = None
    """What it has and what of it is in use, as it said a few seconds ago; null: it has not yet."""


class JobOutcome(Answer, frozen=True):
    """How the job ended."""

    success: bool
    exit_code: int
    why: str
    error: str = ""
    """Traceback of the first failure."""
    failed_worker: str = ""


class MasterStatus(Answer, frozen=True):
    """The master itself."""

    pid: int
    started_wall_s: float
    """When this process started."""
    incarnation: int = 0
    """How many masters this job had before this one."""
    journal: str = ""
    """Where its durable state is; empty: nowhere."""
    version: str = ""
    """Version of Stoker."""


class JobStatus(Answer, frozen=True, kw_only=True):
    """A job at a glance."""

    job: str
    """Its name (`--rdzv-id`)."""
    phase: JobPhase
    """waiting: for enough nodes; forming: the next generation; running; ended."""
    why: str
    """The phase in a sentence: what is waited for, and until when."""
    generation: int
    world_size: int
    """Workers in the newest world."""
    nodes_min: int
    nodes_max: int
    nodes_target: int
    """How many nodes the job should have now, between `nodes_min` and `nodes_max`."""
    node_unit: int = 1
    """Nodes in a world are a multiple of this."""
    commits: int = 0
    """Steps committed since the run began."""
    steps_per_s: float = 0.0
    """Commits per second, lately."""
    restarts: int = 0
    """Workers that were started in another's place, whatever the reason."""
    restarts_used: int = 0
    """Of the job's budget, those that are not forgiven yet."""
    restarts_max: int | None = None
    """The job's budget of restarts; null: not known."""
    since_commit_s: float | None = None
    """Since the last commit; null before the first."""
    started_wall_s: float = 0.0
    """When the job began, under whichever master."""
    nodes: tuple[NodeStatus, ...] = ()
    """Nodes by age."""
    outcome: JobOutcome | None = None
    """Set once the phase is `ended`."""
    master: MasterStatus


class JobEvent(Answer, frozen=True):
    """A line of the job's log: what was decided, and why."""

    seq: int
    """Its place in the log, from 1; later is higher."""
    wall_s: float
    kind: str
    """generation, world, node-joined, worker-replace, …"""
    why: str
    details: dict[str, Any] = {}
    """The node, worker, rank or generation that it is about."""


class EventPage(Answer, frozen=True):
    """Events after the one asked for, oldest first."""

    events: tuple[JobEvent, ...]
    after: int
    """What to ask with next: the last event's `seq`, or what was asked with."""
    ended: bool = False
    """The job has ended and no event is left."""


class EventsQuery(Request, frozen=True):
    """Which events."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Only events with a higher `seq`."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=EVENTS_LIMIT_MAX)] = 1000
    """At most so many."""
    wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=WAIT_S_MAX)] = 0.0
    """How long to wait for one where there is none yet."""
    follow: bool = False
    """Stream one JSON object per line until the job ends, as `Accept: application/x-ndjson` does too."""


class ScaleRequest(Request, frozen=True):
    """Have this many nodes."""

    nodes: Annotated[int, msgspec.Meta(ge=1)]
    """Between the job's minimum and maximum, and a multiple of its node unit."""


class StopRequest(Request, frozen=True):
    """End the job now."""

    why: Why = "stopped through the control API"
    """What the log and the nodes' output say."""
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] = EXIT_INTERRUPTED
    """What `stoker run` exits with on every node."""


class LeaveRequest(Request, frozen=True):
    """Have a node leave at an agreed commit: no step is lost."""

    why: Why = "drained through the control API"


class Accepted(Answer, frozen=True):
    """The master has taken the request on; `GET /v1/status` and the events show how it goes."""

    why: str
    """What will happen, in a sentence."""


class StacksQuery(Request, frozen=True):
    """How long to wait for stacks."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=STACKS_TIMEOUT_S_MAX)] = 10.0
    """Ranks that have not answered by then are listed with a problem."""


class StackFrame(Answer, frozen=True):
    """One call."""

    function: str
    file: str
    line: int


class StackThread(Answer, frozen=True):
    """One thread's calls."""

    name: str
    frames: tuple[StackFrame, ...]
    """The innermost first."""
    is_main: bool = False
    holds_gil: bool | None = None
    """null: not known."""


class WorkerStacks(Answer, frozen=True):
    """What one worker's threads do right now."""

    worker: str
    node: str
    rank: int | None = None
    pid: int = 0
    threads: tuple[StackThread, ...] = ()
    state: str = ""
    """The process's state letter as in /proc: R, S, D, T (stopped), Z; empty: not known."""
    problem: str = ""
    """Why there are no stacks."""


class StackDump(Answer, frozen=True):
    """The stacks of all workers, by rank."""

    workers: tuple[WorkerStacks, ...]


class ShardLease(Answer, frozen=True):
    """A shard in a worker's hands."""

    shard: int
    worker: str
    left_s: float
    """Until the lease runs out and the shard goes back."""
    failures: int = 0
    """Attempts at it that failed."""


class ShardStatus(Answer, frozen=True):
    """How far one dataset's dynamic shards have come, counted in shards of all epochs."""

    dataset: str
    total: int
    """-1 for a stream."""
    done: int
    doing: int
    todo: int
    waiting: int = 0
    """Workers that wait for a shard."""
    failures: int = 0
    """Failed attempts at shards that are not done yet."""
    epoch: int = 0
    """The epoch that is being handed out."""
    is_finished: bool = False
    leases: tuple[ShardLease, ...] = ()


class ShardList(Answer, frozen=True):
    """All datasets that are read by dynamic shards; none in synchronous training."""

    shards: tuple[ShardStatus, ...]


class SpeedAt(Answer, frozen=True):
    """How fast the job was with that many nodes."""

    nodes: int
    steps_per_s: float


class ScaleAdvice(Answer, frozen=True):
    """How many nodes the job should have."""

    nodes: int
    nodes_now: int
    why: str
    speedup: float | None = None
    """Predicted speed at that size over the present one; null: not known."""
    confidence: float = 0.0
    """Least over greatest speed that the measurements allow at that size: 1 is certain, 0 is a guess."""
    applies: bool = False
    """The job changes to this size by itself (`--auto-scale apply`)."""
    measured: tuple[SpeedAt, ...] = ()
    """What the advice rests on."""


class Advice(Answer, frozen=True):
    """The advice there is; null until enough was measured."""

    advice: ScaleAdvice | None


class Health(Answer, frozen=True):
    """The master's process serves. It says nothing about the job."""

    status: Literal["ok"]
