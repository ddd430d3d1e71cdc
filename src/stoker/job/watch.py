"""Questions about a running world: must it change, is it done? Each answer carries its reason."""

from __future__ import annotations

from typing import NamedTuple

from stoker.job.generations import Generations, Limits, chosen_workers
from stoker.job.roster import Node, Roster, Worker
from stoker.wire.job import Directive, Member, Outcome

STOP_AHEAD = 2
REPORT_LAG_S = 0.3
AHEAD_MAX = 1000
"""An interruption that can wait comes this many commits after the newest one known, and as many more as are made while
news travel, so that it reaches every member before any of them gets there and no step is broken."""
REPORTS_PER_S_MAX = 5000.0
"""Reports of commits that all nodes together may send to the master."""


class Regroup(NamedTuple):
    """Why the world must change, and at which commit (-1: at once)."""

    why: str
    stop_at_commit: int = -1
    is_unexplained: bool = False
    """It broke although all its workers live: the network between them, perhaps."""


def report_interval_s(nodes: int) -> float:
    """Least seconds between two reports of commits alone."""
    return nodes / REPORTS_PER_S_MAX


def regroup_reason(
    generations: Generations, roster: Roster, now: float, limits: Limits, last_call_s: float
) -> Regroup | None:
    """Whether a running world must give way to a new one."""
    world = generations.world
    if world is None:
        return None
    lag_s = REPORT_LAG_S + report_interval_s(len(roster.nodes))
    soon = roster.highest_commit + STOP_AHEAD + min(AHEAD_MAX, int(roster.pace * lag_s))
    if roster.work_done and not roster.committed_at:
        soon = -1  # no commit may ever come, and what is under way goes back without harm
    polite: Regroup | None = None
    for member in world.members:
        worker = roster.workers.get(member.worker)
        if worker is not None and worker.finished:
            continue
        if worker is None or worker.ended:
            return Regroup(f"{_name(member)} is gone")
        if worker.state.left >= world.generation:
            why = f"{_name(member)} was the first to lose touch with its peers"
            if worker.state.broke:
                why += f": {worker.state.broke}"
            return Regroup(why, is_unexplained=True)
        if polite is None and not roster.is_staying(worker):
            polite = Regroup(f"{worker.node} leaves: {roster.nodes[worker.node].going}", soon)
    if polite is not None and _waits_for_heirs(generations, roster):
        return None
    if polite is not None or any(w.finished for w in roster.workers.values()):
        return polite
    return _newcomers_reason(generations, roster, now, limits, last_call_s, soon)


def _waits_for_heirs(generations: Generations, roster: Roster) -> bool:
    """Whether every member is to leave and those who will take over are still starting: the run goes on until then."""
    staying = [w for w in roster.live() if roster.is_staying(w)]
    starting = [w for w in staying if w.state.phase == "starting"]
    return bool(starting) and not any(w.worker in generations.members for w in staying)


def _newcomers_reason(
    generations: Generations, roster: Roster, now: float, limits: Limits, last_call_s: float, soon: int
) -> Regroup | None:
    members = generations.members
    outside = [w for w in roster.live() if w.worker not in members and roster.is_staying(w)]
    ready = [w for w in outside if w.state.phase == "parked"]
    if not ready:
        return None
    coming = [w for w in roster.live() if w.worker in members and roster.is_staying(w)]
    ready = [w for w in chosen_workers([*coming, *ready], roster, limits) if w.worker not in members]
    if not ready:
        return None
    waiting_s = now - min(w.parked_since for w in ready)
    if len(ready) < len(outside) and waiting_s < last_call_s:
        return None
    return Regroup(f"{_some([w.worker for w in ready])} ready to join", soon)


def is_complete(generations: Generations, roster: Roster) -> bool:
    """Whether every worker that is left has come to the end of its script.

    A member that died after another one had finished is not missed: the finished one holds the final state. Neither is
    one that died without ever having been in a world: another has taken its place, or the others do its work.
    """
    workers: list[Worker] = [w for w in roster.workers.values() if w.finished or not w.ended]
    if generations.world is not None:
        workers = [w for w in workers if w.worker in generations.members]
    return bool(workers) and all(w.finished for w in workers)


def would_survive(generations: Generations, roster: Roster, without: set[str]) -> bool:
    """Whether nothing more is lost should the workers `without` be: others hold the state, or nobody does any more.

    Before the first world nobody does. Neither do newcomers that are still to receive it.
    """
    if generations.world is None or generations.members.keys() <= generations.dead:
        return True
    named = (roster.workers.get(name) for name in generations.members)
    members = [worker for worker in named if worker is not None and not worker.ended]
    holders = [worker for worker in members if not worker.state.fresh] or members
    return any(worker.worker not in without and not worker.stopped_s for worker in holders)


def directive_for(
    node: Node,
    roster: Roster,
    generations: Generations,
    *,
    now: float,
    is_fixed: bool,
    outcome: Outcome | None,
    note: str,
    epoch: int,
) -> Directive:
    """All that a node should be now; `is_fixed`: the world of the generation is known. The number is left out."""
    may_go = bool(node.going) and not generations.members_on(node.node)
    return Directive(
        seq=0,
        generation=generations.number,
        stop_at_commit=generations.stop_at_commit,
        world=generations.view(node.node) if is_fixed else None,
        run=()
        if may_go
        else tuple(w.spec for w in roster.on_node(node.node) if not w.ended and w.not_before <= now),
        outcome=outcome,
        leave=node.asked_to_leave,
        note=note,
        epoch=epoch,
        report_interval_s=report_interval_s(len(roster.nodes)),
        saves=node.sent.saves  # it stays with who was to write at the end: when that is done its node goes
        if node.sent is not None and node.sent.outcome is not None
        else saving_node(generations, roster) == node.node,
    )


def saving_node(generations: Generations, roster: Roster) -> str:
    """Whose snapshots are written to the storage: of the nodes of the newest world that are still there, the one of
    the lowest rank. Where rank 0's was lost another stands in for it, also where no new world forms. Empty: none."""
    members = generations.world.members if generations.world is not None else ()
    return next((member.node for member in members if member.node in roster.nodes), "")


def _name(member: Member) -> str:
    return f"rank {member.rank} ({member.worker})"


def _some(names: list[str], most: int = 8) -> str:
    """The names, or the first few of many."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"
