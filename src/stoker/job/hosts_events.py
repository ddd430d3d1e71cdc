"""What can happen to the hosts of a job, and what is to be done about it. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.errors import ConfigError
from stoker.job.hosts_list import HostList


@dataclass(frozen=True)
class HostPolicy:
    """What the user asked for; times in seconds."""

    min_hosts: int = 1
    max_hosts: int = 1
    """Agents are started on so many of the listed hosts; the others are spares."""
    timeout_s: float = 300.0
    """The one user-facing timeout: so long may the job be without its least number of hosts."""
    start_s: float = 150.0
    """An agent that has not joined the job after this is given up."""
    rejoin_s: float = 30.0
    """An agent that the master lost may come back for so long; then its host counts as unreachable."""
    leave_grace_s: float = 155.0
    """Between asking an agent to leave and killing it: a long step may end."""
    backoff_first_s: float = 10.0
    """The shortest time that a failing host stays on the blacklist."""
    backoff_limit_s: float = 300.0
    """The longest."""
    good_after_s: float = 60.0
    """A host that has worked for so long starts again without failures."""
    failures_limit: int = 10
    """After so many failures a host is blacklisted for good."""
    reset_limit: int | None = None
    """Changes of the world after which the job fails; None: any number."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_hosts <= self.max_hosts:
            raise ConfigError(
                f"hosts {self.min_hosts}:{self.max_hosts}: the least must be 1 or more, the most no less"
            )
        if not 0 < self.backoff_first_s <= self.backoff_limit_s:
            raise ConfigError(
                f"--blacklist-cooldown-range {self.backoff_first_s:g} {self.backoff_limit_s:g}: give the shortest time "
                "first, above 0"
            )
        if self.failures_limit < 1:
            raise ConfigError(f"--blacklist-limit {self.failures_limit} must be at least 1")
        if self.reset_limit is not None and self.reset_limit < 0:
            raise ConfigError(f"--reset-limit {self.reset_limit} must not be negative")


@dataclass(frozen=True)
class HostMemory:
    """What outlives a driver about a host that failed."""

    host: str
    failures: int
    banned: bool
    pause_left_s: float
    why: str


@dataclass(frozen=True)
class Discovered:
    """The list of hosts was read."""

    listed: HostList


@dataclass(frozen=True)
class ScriptFailed:
    """The discovery script gave no usable list."""

    why: str


@dataclass(frozen=True)
class AgentExited:
    """The process that was started on a host has ended, or could not be started."""

    host: str
    code: int | None
    """Exit code; None: a signal ended it, or it never ran."""
    why: str


@dataclass(frozen=True)
class NodeJoined:
    """An agent on this host became a node of the job, or came back as one."""

    node: str
    host: str


@dataclass(frozen=True)
class NodeLost:
    """The master counts this node as gone."""

    node: str
    why: str


@dataclass(frozen=True)
class NodeCordoned:
    """The master wants this node's host to run no workers for a while."""

    node: str
    why: str


@dataclass(frozen=True)
class WorldFormed:
    """A new world runs; these nodes have workers in it."""

    nodes: frozenset[str]


@dataclass(frozen=True)
class JobEnded:
    """The job is over."""

    success: bool = False
    """Its agents may then take their time: scripts still save what they have made."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Discovered
    | ScriptFailed
    | AgentExited
    | NodeJoined
    | NodeLost
    | NodeCordoned
    | WorldFormed
    | JobEnded
    | Tick
)


@dataclass(frozen=True)
class StartAgent:
    """Start an agent on this host."""

    host: str
    slots: int
    age: int
    """Its place in the order in which the hosts were first listed."""


@dataclass(frozen=True)
class LeaveAgent:
    """Ask the agent to leave the job in good order."""

    host: str
    why: str


@dataclass(frozen=True)
class KillAgent:
    """End the agent now."""

    host: str
    why: str


@dataclass(frozen=True)
class Say:
    """A line of the event log: what was decided, and why."""

    kind: str
    why: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GiveUp:
    """The job cannot go on."""

    why: str
    exit_code: int


Effect = StartAgent | LeaveAgent | KillAgent | Say | GiveUp
