"""The book's memory: hosts and their agents. Plain records and questions about them. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

AgentPhase = Literal["none", "starting", "joined", "lost", "leaving", "killing"]
STAYING = frozenset({"starting", "joined", "lost"})
NAMED = 5
"""So many hosts are named in a sentence."""


@dataclass
class Host:
    """A host that is or was listed."""

    host: str
    age: int
    slots: int = 0
    """Workers that it is to run; 0: it is not listed."""
    agent: AgentPhase = "none"
    agent_slots: int = 0
    since: float = 0.0
    """When its agent came into this phase."""
    nodes: set[str] = field(default_factory=set)
    """Nodes of the job that the master knows from this host: more than one if an agent came back as a new node."""
    in_world: bool = False
    """Workers of its are in the newest world, so that it has the state."""
    kept_since: float | None = None
    """Since when it should leave and does not, as it is the last one with the state."""
    failures: int = 0
    banned: bool = False
    blamed: bool = False
    """This agent has failed; its coming end says nothing new."""
    paused_until: float = 0.0
    why: str = ""
    """How it failed last."""

    def is_blacklisted(self, now: float) -> bool:
        return self.banned or now < self.paused_until

    def is_free(self) -> bool:
        """Whether no agent of it is left, neither as a process nor as a node of the job."""
        return self.agent == "none" and not self.nodes

    def enter(self, phase: AgentPhase, now: float) -> None:
        self.agent, self.since = phase, now


class HostTable:
    """All hosts that were ever listed and are not forgotten yet."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._ages = 0

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def find(self, name: str) -> Host | None:
        return self._hosts.get(name)

    def get(self, name: str) -> Host:
        """The host of this name, a new one if there is none."""
        if name not in self._hosts:
            self._hosts[name] = Host(name, self._next_age())
        return self._hosts[name]

    def note_listed(self, name: str, slots: int) -> None:
        """It is listed. One that was away is the youngest again."""
        known = self._hosts.get(name)
        if known is not None and not known.slots and known.is_free():
            known.age = self._next_age()
        self.get(name).slots = slots

    def drop(self, host: Host) -> None:
        """It is listed no more. Its failures are remembered."""
        host.slots = 0
        if host.is_free() and not host.failures:
            del self._hosts[host.host]

    def listed(self) -> Sequence[Host]:
        return [host for host in self if host.slots]

    def joined(self) -> int:
        """How many have an agent in the job."""
        return sum(host.agent == "joined" for host in self)

    def of_node(self, node: str) -> Host | None:
        return next((host for host in self if node in host.nodes), None)

    def others_have_state(self, host: Host) -> bool:
        return any(other.in_world and other.agent == "joined" for other in self if other is not host)

    def all_blacklisted(self, now: float) -> str:
        """That they are, and why; empty if one is not or none is listed."""
        listed = self.listed()
        if not listed or not all(host.is_blacklisted(now) for host in listed):
            return ""
        return f"all hosts are blacklisted: {names(f'{host.host} ({host.why})' for host in listed)}"

    def _next_age(self) -> int:
        self._ages += 1
        return self._ages - 1


def why_away(host: Host) -> str:
    """Why this host's agent should not be there; empty: it may stay."""
    if host.agent not in STAYING:
        return ""
    if host.blamed:
        return f"is blacklisted: {host.why}"
    if host.slots == 0:
        return "is no longer listed"
    if host.slots != host.agent_slots:
        return f"has {host.slots} slots now instead of {host.agent_slots}"
    return ""


def state_of(host: Host, now: float) -> str:
    if host.banned:
        return f"is blacklisted for good ({host.why})"
    if host.is_blacklisted(now):
        return f"is blacklisted for another {host.paused_until - now:.0f} s ({host.why})"
    return "is a spare" if host.agent == "none" else f"is {host.agent}"


def names(words: Iterable[str]) -> str:
    every = list(words)
    more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return ", ".join(every[:NAMED]) + more
