"""What a master must remember to be lost: the machine's durable part, as records of a key-value journal. PURE.

Keys: `job`, `world`, `budgets`, `node/<id>`, `worker/<id>`. What agents say again when they come back (states, commits,
pids) is not among it, and neither are times: after a restart every waiting time begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from stoker.errors import WireError
from stoker.job.relaunch_budgets import BudgetsKept
from stoker.wire.job import Join, Message, Outcome, WorkerSpec, World

Phase = Literal["waiting", "forming", "running", "ended"]


class JobRecord(Message, frozen=True, tag="job_record"):
    """The job itself."""

    phase: Phase
    generation: int
    stop_at_commit: int
    why: str
    fruitless: int
    last_start: int
    restarts: int
    nodes_seen: int
    workers_seen: int
    elastic: bool
    target_nodes: int
    regroups: int
    outcome: Outcome | None = None


class NodeRecord(Message, frozen=True, tag="node_record"):
    """A node that is part of the job."""

    join: Join
    age: int
    leaving: str
    asked_to_leave: str
    cordoned: str
    standby: str
    check: str


class WorkerRecord(Message, frozen=True, tag="worker_record"):
    """A worker that should run, or has ended on a node that is still here."""

    spec: WorkerSpec
    node: str
    ended: bool
    finished: bool


Record = JobRecord | NodeRecord | WorkerRecord | World | BudgetsKept


@dataclass(frozen=True)
class Remembered:
    """All records of one job."""

    job: JobRecord | None = None
    world: World | None = None
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    budgets: BudgetsKept | None = None


def decode_records(records: Mapping[str, bytes]) -> Remembered:
    """Read back what was kept; keys of other services are passed over. Raises WireError for what cannot be read."""
    job: JobRecord | None = None
    world: World | None = None
    nodes: dict[str, NodeRecord] = {}
    workers: dict[str, WorkerRecord] = {}
    budgets: BudgetsKept | None = None
    try:
        for key, value in records.items():
            kind, _, name = key.partition("/")
            if key == "job":
                job = msgspec.msgpack.decode(value, type=JobRecord)
            elif key == "world":
                world = msgspec.msgpack.decode(value, type=World)
            elif key == "budgets":
                budgets = msgspec.msgpack.decode(value, type=BudgetsKept)
            elif kind == "node":
                nodes[name] = msgspec.msgpack.decode(value, type=NodeRecord)
            elif kind == "worker":
                workers[name] = msgspec.msgpack.decode(value, type=WorkerRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(
            f"the journal's record {key!r} cannot be read: {error}; was it written by another version of Stoker? "
            "Start the job with a new journal"
        ) from None
    return Remembered(job, world, nodes, workers, budgets)


class Notebook:
    """The records as they were kept last: tells which have changed."""

    def __init__(self) -> None:
        self._kept: dict[str, Record] = {}

    def note(self, key: str, record: Record | None) -> bool:
        """Take over the newest form of a record; whether it has to be written (or, None, removed)."""
        if record is None:
            return self._kept.pop(key, None) is not None
        if self._kept.get(key) == record:
            return False
        self._kept[key] = record
        return True
