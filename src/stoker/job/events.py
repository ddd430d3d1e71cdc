"""What can happen to a job, and what the machine can ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from stoker.wire.health import CheckReply, CheckTask, StackReply, StackRequest
from stoker.wire.job import Beat, Directive, Join, NodeReport, Outcome


@dataclass(frozen=True)
class NodeJoined:
    """An agent opened its stream."""

    join: Join


@dataclass(frozen=True)
class NodeReported:
    """An agent said what it is."""

    report: NodeReport


@dataclass(frozen=True)
class NodeBeat:
    """An agent said that nothing has changed."""

    beat: Beat


@dataclass(frozen=True)
class NodeLost:
    """An agent has ended, and its workers with it."""

    node: str
    why: str


@dataclass(frozen=True)
class NodeCut:
    """An agent's stream broke without the agent having closed it: it may well live and come back."""

    node: str
    why: str


@dataclass(frozen=True)
class NodeAsked:
    """Somebody wants a node to leave in good order."""

    node: str
    why: str


@dataclass(frozen=True)
class ScaleRequested:
    """Somebody wants the job to run on so many nodes."""

    nodes: int
    why: str


@dataclass(frozen=True)
class StopRequested:
    """Somebody wants the job to end now."""

    why: str
    exit_code: int


@dataclass(frozen=True)
class StacksTaken:
    """An agent sends the stacks of a worker that it was asked for."""

    reply: StackReply


@dataclass(frozen=True)
class NodeChecked:
    """An agent sends the result of its node check."""

    node: str
    reply: CheckReply


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    was_stopped: bool = False
    """The master itself did nothing for a while: that it has heard of nobody says nothing about them."""


Event = (
    NodeJoined
    | NodeReported
    | NodeBeat
    | NodeLost
    | NodeCut
    | NodeAsked
    | ScaleRequested
    | StacksTaken
    | NodeChecked
    | StopRequested
    | Tick
)


@dataclass(frozen=True)
class Keep:
    """Write a record into the journal (None: remove it), before anything else that comes of this event is done."""

    key: str
    record: msgspec.Struct | None


@dataclass(frozen=True)
class Send:
    """Give a node its directive."""

    node: str
    directive: Directive


@dataclass(frozen=True)
class Tell:
    """Give a node something to do besides."""

    node: str
    message: StackRequest | CheckTask


@dataclass(frozen=True)
class Refuse:
    """Turn a node away and close its stream."""

    node: str
    why: str
    is_stranger: bool = False
    """This master never took it: it may belong to another job."""
    outcome: Outcome | None = None
    """How the job has ended to which it comes too late."""


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


Effect = Keep | Send | Tell | Refuse | Record | End
