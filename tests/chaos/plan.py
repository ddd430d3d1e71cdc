"""What goes wrong, when and where: a pure function of the seed. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from stoker.base.rng import Rng

Kind = Literal[
    "kill-worker",
    "kill-agent",
    "kill-run",
    "kill-host",
    "kill-master",
    "stop-worker",
    "stop-agent",
    "stop-master",
    "blink-worker",
    "blink-agent",
    "hang",
    "partition",
    "split",
    "cut",
    "cut-master",
    "reset",
    "slow",
    "leave",
    "scale",
    "full-disk",
    "full-journal",
]
"""
| kind | what happens |
|---|---|
| kill-worker, kill-master | SIGKILL |
| kill-agent | SIGKILL to `stoker run`; another starts after `duration_s` |
| kill-run | the same where that is the parent of the job's master, which lives on |
| kill-host | everything on the host dies at once; it is back after `duration_s` |
| stop-worker, stop-agent | SIGSTOP for longer than anything may be silent |
| stop-master | SIGSTOP for less than what makes its nodes give up |
| blink-worker, blink-agent | SIGSTOP for a moment: nobody may be given up for it |
| hang | a worker stands still in its step, for ever |
| partition | the hosts hear nothing of all others, silently |
| split | two hosts hear nothing of each other; both still reach the master |
| cut | the host's link is down |
| cut-master | the link of the master's host is down: the others lose it, and it loses them |
| reset | every TCP connection of the host breaks |
| slow | the host's bandwidth is small |
| leave | the agent gets SIGTERM; another joins after `duration_s` |
| scale | the job is to have one or two nodes fewer, and after `duration_s` all again |
| full-disk, full-journal | the disk of the checkpoints, or of the master's journal, is full |
"""
KINDS: tuple[Kind, ...] = get_args(Kind)
MASTER = 1
"""The host that the master is on, where it is bound to one."""

WITH_FILE: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "kill-host")
"""Faults that a job survives whose journal is a file: its host must stay."""
WITH_ETCD: tuple[Kind, ...] = tuple(
    kind for kind in KINDS if kind not in ("kill-run", "cut-master", "full-journal")
)
"""Faults that a job survives whose journal is in etcd. No host is the master's there: who leads may be on any."""

ON_MASTER: frozenset[Kind] = frozenset(
    {"kill-worker", "stop-worker", "blink-worker", "blink-agent", "hang", "kill-run"}
)
"""What may also hit the host that the master is bound to."""

NOWHERE: frozenset[Kind] = frozenset({"full-disk", "full-journal", "kill-master", "stop-master", "scale"})
"""What takes no host out of the world."""
ON_JOURNAL: frozenset[Kind] = frozenset({"full-journal", "kill-master"})
"""Of these, those of which only one comes at a time: a master that dies before its journal can be written takes along
what it has not told."""

DISTURBS_LINK: frozenset[Kind] = frozenset({"kill-host", "partition", "split", "cut", "slow"})
"""What a member of etcd's quorum on the host feels."""

DURATIONS: dict[Kind, tuple[tuple[float, float], ...]] = {
    "kill-agent": ((0.5, 6.0),),
    "kill-run": ((0.5, 6.0),),
    "kill-host": ((0.5, 8.0),),
    "stop-worker": ((8.0, 12.0),),
    "stop-agent": ((7.5, 12.0), (22.0, 26.0)),
    "stop-master": ((0.5, 8.0),),
    "blink-worker": ((0.3, 1.5),),
    "blink-agent": ((0.3, 1.5),),
    "partition": ((7.5, 12.0), (22.0, 26.0)),
    "split": ((10.0, 16.0),),
    "hang": ((10.0, 14.0),),
    "cut": ((1.0, 3.0), (7.5, 12.0), (22.0, 26.0)),
    "cut-master": ((1.0, 3.0), (7.5, 9.5)),
    "slow": ((4.0, 8.0),),
    "leave": ((1.0, 8.0),),
    "scale": ((4.0, 10.0),),
    "full-disk": ((6.0, 10.0),),
    "full-journal": ((3.0, 6.0),),
}
"""Seconds: ranges of which one is drawn; for `hang`: until it is found out. They fit a user's timeout of 16 s: silence
is noticed after 5, a node without a master gives up after 16."""

RECOVERY_S = 7.0
"""A host counts as disturbed for so long after the fault's end: its worker has to start again."""

MOST_DISTURBED = 2
"""Hosts that may be disturbed at a time; more would leave fewer than the job's minimum."""


class Fault(NamedTuple):
    """One thing that goes wrong."""

    at_s: float
    """Seconds after the job has begun."""
    kind: Kind
    hosts: tuple[int, ...]
    """Numbers of the hosts that it hits, from 1."""
    duration_s: float
    fewer: int = 0
    """For `scale`: so many nodes less."""

    @property
    def end_s(self) -> float:
        return self.at_s + self.duration_s

    def __str__(self) -> str:
        where = ", ".join(f"h{n}" for n in self.hosts)
        what = f"{self.fewer} fewer" if self.fewer else where
        lasting = f" for {self.duration_s:.1f} s" if self.duration_s else ""
        return f"{self.at_s:7.1f} s  {self.kind:12} {what}{lasting}"


class Ground(NamedTuple):
    """What the faults come over."""

    hosts: int = 4
    bound_to: int = MASTER
    """The host that the master cannot leave; 0: it can."""
    quorum: tuple[int, ...] = ()
    """Hosts with a member of etcd. Two of three must always hear each other."""


def make_plan(
    seed: int, seconds: float, *, ground: Ground | None = None, kinds: Sequence[Kind] = WITH_FILE
) -> tuple[Fault, ...]:
    """Faults that all end within `seconds`, in the order of time; every kind comes once before any comes twice.

    Most wait until the one before is mended; one in three comes while it lasts.
    """
    ground = ground if ground is not None else Ground()
    rng = Rng(seed)
    plan: list[Fault] = []
    bag: list[Kind] = []
    at_s = 0.0
    while True:
        if not bag:
            bag = list(kinds)
            rng.shuffle(bag)
        drawn = _draw(rng, bag.pop(), ground)
        mended_s = max((fault.end_s for fault in plan), default=0.0) + rng.uniform(1.5, 5.0)
        at_s = at_s + rng.uniform(0.5, 3.0) if plan and rng.chance(0.35) else max(at_s + 0.5, mended_s)
        at_s = _earliest(plan, drawn._replace(at_s=at_s), ground)
        if at_s > seconds:
            return tuple(plan)
        fault = drawn._replace(at_s=at_s)
        if fault.end_s <= seconds:
            plan.append(fault)


def _draw(rng: Rng, kind: Kind, ground: Ground) -> Fault:
    """A fault of this kind at time 0."""
    everybody = range(1, ground.hosts + 1)
    others = [number for number in everybody if number != ground.bound_to or kind in ON_MASTER]
    rng.shuffle(others)
    count = 1
    if kind == "split" or (kind == "partition" and rng.chance(0.4)):
        count = 2
    hit = tuple(sorted(others[:count]))
    if kind == "kill-run":
        hit = (ground.bound_to,)
    elif kind == "cut-master":
        hit = tuple(number for number in everybody if number != ground.bound_to)
    elif kind in NOWHERE:
        hit = ()
    ranges = DURATIONS.get(kind)
    duration_s = rng.uniform(*rng.choice(ranges)) if ranges else 0.0
    fewer = rng.choice((1, 2)) if kind == "scale" else 0
    return Fault(0.0, kind, hit, round(duration_s, 1), fewer)


def _earliest(plan: Sequence[Fault], fault: Fault, ground: Ground) -> float:
    """From `fault.at_s` on, the first time at which it disturbs no host twice, and not too many at once."""
    candidates = [fault.at_s, *(f.end_s + RECOVERY_S for f in plan if f.end_s + RECOVERY_S > fault.at_s)]
    for at_s in sorted(candidates):
        disturbed = [f for f in plan if f.end_s + RECOVERY_S > at_s]
        if all(_go_together(other, fault, ground) for other in disturbed) and _leaves_enough(
            disturbed, fault
        ):
            return at_s
    raise AssertionError("after the last fault nothing is disturbed")


def _go_together(one: Fault, other: Fault, ground: Ground) -> bool:
    """Whether the one may come while the other lasts."""
    if one.kind in NOWHERE and other.kind in NOWHERE:
        return one.kind != other.kind and not {one.kind, other.kind} <= ON_JOURNAL
    kinds = {one.kind, other.kind}
    if "cut-master" in kinds and kinds & {"kill-master", "stop-master", "scale"}:
        return False  # nobody could ask it anything, or its nodes would give up
    both_on_quorum = set(one.hosts) & set(ground.quorum) and set(other.hosts) & set(ground.quorum)
    if both_on_quorum and kinds <= DISTURBS_LINK:
        return False
    return not set(one.hosts) & set(other.hosts)


def _leaves_enough(disturbed: Sequence[Fault], fault: Fault) -> bool:
    """Whether the job keeps its minimum. All may lose the master's host for a while, if nothing else happens."""
    if fault.kind in NOWHERE:
        return True
    hosts = {number for f in disturbed if f.kind not in NOWHERE for number in f.hosts}
    return not hosts if fault.kind == "cut-master" else len(hosts | set(fault.hosts)) <= MOST_DISTURBED
