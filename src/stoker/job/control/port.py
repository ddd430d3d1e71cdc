"""The port: what a job's master offers to those who watch and steer it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from stoker.wire.control import (
    Accepted,
    JobEvent,
    JobOutcome,
    JobStatus,
    ScaleAdvice,
    ShardStatus,
    WorkerStacks,
)


class JobControl(Protocol):
    """A running job. All methods run on the master's event loop; those that are not coroutines answer at once."""

    def status(self) -> JobStatus:
        """The job at a glance. Costs time for each of its workers: not to be asked for one word of it."""
        ...

    def outcome(self) -> JobOutcome | None:
        """How the job has ended; None: it has not."""
        ...

    def node_names(self) -> Collection[str]:
        """The ids of its nodes."""
        ...

    async def events(self, after: int, limit: int) -> list[JobEvent]:
        """At most `limit` events whose `seq` is above `after`, oldest first."""
        ...

    async def wait_for_events(self, after: int, timeout_s: float) -> None:
        """Return as soon as there is an event above `after`, at the latest after `timeout_s`."""
        ...

    def scale(self, nodes: int) -> Accepted:
        """Have this many nodes. Raises ConfigError outside of MIN:MAX or off the node unit."""
        ...

    def stop(self, why: str, exit_code: int) -> Accepted:
        """End the job now."""
        ...

    def leave_node(self, node: str, why: str) -> Accepted:
        """Have a node leave at an agreed commit. Raises ConfigError where it cannot."""
        ...

    async def stacks(self, timeout_s: float) -> list[WorkerStacks]:
        """What every worker does now, by rank. One that does not answer in time is listed with a problem."""
        ...

    def recommendation(self) -> ScaleAdvice | None:
        """How many nodes the job should have; None until enough was measured."""
        ...

    def shards(self) -> list[ShardStatus]:
        """How far the dynamic shards of each dataset have come."""
        ...
