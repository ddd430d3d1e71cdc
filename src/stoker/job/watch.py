"""Questions about a running world: must it change, is it done? Each answer carries its reason."""

from __future__ import annotations

from typing import NamedTuple

from stoker.job.roster import Node, Roster
from stoker.wire.job import Directive, Outcome, World

STOP_AHEAD = 2
REPORT_LAG_S = 0.3
AHEAD_MAX = 1000
"""An interruption that can wait comes this many commits after the newest one known, and as many more as are made while
news travel, so that it reaches every member before any of them gets there and no step is broken."""


class Regroup(NamedTuple):
    """Why the world must change, and at which commit (-1: at once)."""

    why: str
    stop_at_commit: int = -1


def regroup_reason(world: World, roster: Roster, now: float, last_call_s: float) -> Regroup | None:
    """Whether a running world must give way to a new one."""
    soon = roster.highest_commit + STOP_AHEAD + min(AHEAD_MAX, int(roster.pace * REPORT_LAG_S))
    for member in world.members:
        worker = roster.workers.get(member.worker)
        name = f"rank {member.rank} ({member.worker})"
        if worker is not None and worker.finished:
            continue
        if worker is None or worker.ended:
            return Regroup(f"{name} is gone")
        if worker.state.left >= world.generation:
            return Regroup(f"{name} lost touch with its peers")
        if not roster.is_staying(worker):
            return Regroup(f"{worker.node} leaves: {roster.nodes[worker.node].leaving}", soon)
    if any(w.finished for w in roster.workers.values()):
        return None
    return _newcomers_reason(world, roster, now, last_call_s, soon)


def _newcomers_reason(
    world: World, roster: Roster, now: float, last_call_s: float, soon: int
) -> Regroup | None:
    members = {m.worker for m in world.members}
    outside = [w for w in roster.live() if w.worker not in members and roster.is_staying(w)]
    ready = [w for w in outside if w.state.phase == "parked"]
    if not ready:
        return None
    waiting_s = now - min(w.parked_since for w in ready)
    if len(ready) < len(outside) and waiting_s < last_call_s:
        return None
    return Regroup(f"{', '.join(w.worker for w in ready)} ready to join", soon)


def is_complete(world: World | None, roster: Roster) -> bool:
    """Whether every worker that is left has come to the end of its script.

    A member that died after another one had finished is not missed: the finished one holds the final state.
    """
    workers = list(roster.workers.values())
    if world is not None:
        members = {m.worker for m in world.members}
        workers = [w for w in workers if w.worker in members and (w.finished or not w.ended)]
    return bool(workers) and all(w.finished for w in workers)


def directive_for(
    node: Node,
    roster: Roster,
    *,
    generation: int,
    stop_at_commit: int,
    world: World | None,
    old_world: World | None,
    outcome: Outcome | None,
) -> Directive:
    """All that a node should be now; `world` is None while it is being formed. The number is left out."""
    binding = world if world is not None else old_world
    members_here = binding is not None and any(m.node == node.node for m in binding.members)
    may_go = bool(node.leaving) and not members_here
    return Directive(
        seq=0,
        generation=generation,
        stop_at_commit=stop_at_commit,
        world=world,
        run=() if may_go else tuple(w.spec for w in roster.on_node(node.node) if not w.ended),
        outcome=outcome,
    )
