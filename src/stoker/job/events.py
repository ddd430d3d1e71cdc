"""What can happen to a job, and what the machine can ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.wire.job import Directive, Join, NodeReport, Outcome


@dataclass(frozen=True)
class NodeJoined:
    """An agent opened its stream."""

    join: Join


@dataclass(frozen=True)
class NodeReported:
    """An agent said what it is."""

    report: NodeReport


@dataclass(frozen=True)
class NodeLost:
    """An agent's stream broke."""

    node: str
    why: str


@dataclass(frozen=True)
class StopRequested:
    """Somebody wants the job to end now."""

    why: str
    exit_code: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = NodeJoined | NodeReported | NodeLost | StopRequested | Tick


@dataclass(frozen=True)
class Send:
    """Give a node its directive."""

    node: str
    directive: Directive


@dataclass(frozen=True)
class Refuse:
    """Turn a node away and close its stream."""

    node: str
    why: str


@dataclass(frozen=True)
class Record:
    """A line of the event log: what was decided, and why."""

    kind: str
    why: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """The job is over."""

    outcome: Outcome


Effect = Send | Refuse | Record | End
