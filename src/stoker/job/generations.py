"""How one generation gives way to the next: who is awaited, and what is to be done. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from stoker.job.membership import NoSource, form_world, select_nodes
from stoker.job.roster import Roster, Worker
from stoker.wire.job import Member, World, WorldView, view_of

FRUITLESS_LIMIT = 20
"""Worlds in a row that must have broken before their first commit, besides the timeout, before the job gives up."""
FRUITLESS_FREE = 4
"""Of these, the ones that are formed again at once; those after them wait, each twice as long as the one before."""
FRUITLESS_WAIT_S = 0.25
FRUITLESS_WAIT_MAX_S = 8.0
STEPS_AWAITED = 4
"""Steps within which the commit that the world agreed to end at must come, if half the time to leave a step is less."""
UNEXPLAINED_LIMIT = 3
"""Such worlds, all of whose workers live on, after which one of the nodes is suspected."""

Step = Literal["wait", "again", "drop", "empty", "roll-back", "fruitless", "run"]


class Verdict(NamedTuple):
    """What a forming generation needs next, and why."""

    step: Step
    why: str = ""
    workers: tuple[Worker, ...] = ()
    world: World | None = None


class Limits(NamedTuple):
    """What a world must and may be."""

    min_nodes: int
    target_nodes: int
    node_unit: int
    park_s: float
    timeout_s: float


@dataclass
class Generations:
    """The generation being formed or run, and the world that is left or live."""

    number: int = 0
    world: World | None = None
    """The newest world; while a generation forms, the one that is being left."""
    members: dict[str, Member] = field(default_factory=dict)
    """Its members by worker."""
    stop_at_commit: int = -1
    pending: set[str] = field(default_factory=set)
    """Workers that have to acknowledge the generation and have not yet."""
    gone: set[str] = field(default_factory=set)
    """Of those who had to, the ones that ended before."""
    dead: set[str] = field(default_factory=set)
    """Members of the newest world of which their own agents have said that they ended."""
    since: float = 0.0
    why: str = ""
    fruitless: int = 0
    last_start: int = -1
    """How far the job had come when the newest world began."""
    is_unexplained: bool = False
    """The world that is left broke although, as far as is known, all its workers live."""
    stuck_since: float = 0.0
    """When the run began to stand at this commit."""
    unexplained: int = 0
    """Worlds in a row that broke so before their first commit."""
    _by_node: dict[str, tuple[Member, ...]] = field(default_factory=dict)
    _shared: WorldView | None = None
    """What every node's view of the newest world has in common."""

    def begin(self, why: str, now: float, live: Iterable[Worker], stop_at_commit: int = -1) -> None:
        """Name the next generation; every member of the old world and all who stand ready have to acknowledge it."""
        self.number += 1
        self.why, self.since, self.stop_at_commit = why, now, stop_at_commit
        live = list(live)
        parked = {w.worker for w in live if w.state.phase == "parked"}
        self.gone = set(self.members) - {w.worker for w in live}
        self.pending = (set(self.members) | parked) - self.gone

    def resume(self, live: Iterable[Worker], now: float) -> None:
        """Take up the forming of a generation that a master before has named."""
        names = {w.worker for w in live}
        self.since = self.stuck_since = now
        self.gone = set(self.members) - names
        self.pending = set(self.members) - self.gone if self.world is not None else names

    def note(self, worker: Worker) -> None:
        """A worker has said something or ended."""
        if worker.worker not in self.pending:
            return
        if worker.ended:
            self.pending.discard(worker.worker)
            self.gone.add(worker.worker)
        elif worker.has_parked(self.number):
            self.pending.discard(worker.worker)

    def judge(self, roster: Roster, now: float, limits: Limits) -> Verdict:
        """Whether the world can be fixed now, and what to do if not."""
        if self.stop_at_commit >= 0 and self.gone:
            return Verdict("again", f"{', '.join(sorted(self.gone))} ended before the agreed commit")
        if self.pending:
            return self._press(roster, now - self.since, limits.park_s)
        staying = [w for w in roster.live() if roster.is_staying(w)]
        ready = [w for w in staying if w.has_parked(self.number)]
        if not ready:
            self.pending |= {w.worker for w in staying}
            return Verdict("wait" if staying else "empty", "no worker is left")
        chosen = chosen_workers(ready, roster, limits)
        through = roster.through_nodes()  # they count, for they will not come again
        if not chosen or len({w.node for w in chosen} | through) < limits.min_nodes:
            return Verdict("wait", "too few nodes")
        chosen = with_last_holder(chosen, roster, limits, self.number)
        world = form_world(self.number, [roster.candidate(w) for w in chosen])
        if isinstance(world, NoSource):
            return Verdict("roll-back", world.why, tuple(chosen))
        if self.last_start == world.commits + roster.work_done and self.fruitless >= FRUITLESS_FREE:
            lasted_s = now - self.stuck_since
            if self.fruitless >= FRUITLESS_LIMIT and lasted_s > limits.timeout_s:
                return Verdict("fruitless", f"for {lasted_s:.0f} s, the last because: {self.why}")
            wait_s = FRUITLESS_WAIT_S * 2.0 ** min(self.fruitless - FRUITLESS_FREE, 10)
            if now - self.since < min(wait_s, FRUITLESS_WAIT_MAX_S):
                return Verdict("wait", "worlds break again and again: a pause before the next one")
        return Verdict("run", world=world)

    def settle(self, world: World, progress: int, now: float) -> None:
        """The world is fixed. `progress`: how far the job has come with it."""
        is_stuck = self.last_start == progress
        if not is_stuck:
            self.stuck_since = now
        self.fruitless = self.fruitless + 1 if is_stuck else 0
        self.unexplained = self.unexplained + 1 if is_stuck and self.is_unexplained and not self.gone else 0
        self.last_start = progress
        self.stop_at_commit = -1
        self.take(world)

    def take(self, world: World | None) -> None:
        """This is the newest world."""
        self.world = world
        self.dead.clear()
        self.members = {m.worker: m for m in world.members} if world is not None else {}
        by_node: dict[str, list[Member]] = {}
        for member in world.members if world is not None else ():
            by_node.setdefault(member.node, []).append(member)
        self._by_node = {node: tuple(members) for node, members in by_node.items()}
        self._shared = view_of(world, ()) if world is not None else None

    @property
    def node_count(self) -> int:
        """Nodes of the newest world."""
        return len(self._by_node)

    def members_on(self, node: str) -> tuple[Member, ...]:
        """The newest world's members on a node, by rank."""
        return self._by_node.get(node, ())

    def view(self, node: str) -> WorldView | None:
        """The newest world as a node needs to know it."""
        if self._shared is None:
            return None
        return msgspec.structs.replace(self._shared, members=self.members_on(node))

    def _press(self, roster: Roster, waited_s: float, park_s: float) -> Verdict:
        """Somebody keeps the others waiting: first stop at once instead of at a commit, then do without it."""
        if self.stop_at_commit >= 0:
            steps_s = STEPS_AWAITED / roster.pace if roster.pace > 0 else 0.0
            if waited_s <= max(park_s / 2, min(steps_s, STEPS_AWAITED * park_s)):
                return Verdict("wait", "the agreed commit is to come")
            return Verdict("again", "the agreed commit did not come")
        if waited_s <= park_s:
            return Verdict("wait", "some are still in a step")
        late = [roster.workers[name] for name in sorted(self.pending) if name in roster.workers]
        stuck = tuple(w for w in late if w.state.phase != "starting")
        if not stuck:
            return Verdict("wait", "some are still starting")
        return Verdict("drop", f"it did not leave its step within {park_s:.0f} s", stuck)


def chosen_workers(ready: Sequence[Worker], roster: Roster, limits: Limits) -> list[Worker]:
    """Of the workers that stand ready, those whose nodes make up whole units, the oldest first; with nodes that are
    through where there are too few."""
    names = {w.node for w in ready}
    nodes = sorted(names, key=lambda name: roster.nodes[name].age) + sorted(roster.through_nodes() - names)
    chosen = set(select_nodes(nodes, target=limits.target_nodes, unit=limits.node_unit))
    return [w for w in ready if w.node in chosen]


def with_last_holder(chosen: list[Worker], roster: Roster, limits: Limits, generation: int) -> list[Worker]:
    """Where none of the chosen has the state and somebody else who stands ready has: the node of that one, too.

    It may be one that leaves, for the few steps until it is let go, or too young for a whole unit. The others would
    begin at the last checkpoint, or at nothing.
    """
    if any(w.state.clean and not w.state.fresh for w in chosen):
        return chosen
    newest = max((w.state.commits for w in chosen if w.state.clean), default=-1)
    holders = [
        w
        for w in roster.live()
        if w.node in roster.nodes and w.has_parked(generation) and w.state.clean and not w.state.fresh
        if w.state.commits > newest
    ]
    if not holders:
        return chosen
    last = min(holders, key=lambda w: roster.nodes[w.node].age).node
    names = {w.node for w in chosen} - {last}
    nodes = sorted(names, key=lambda name: roster.nodes[name].age)
    through = len(roster.through_nodes() - names - {last})
    while nodes and (len(nodes) + 1 + through) % limits.node_unit:
        nodes.pop()
    return [w for w in holders if w.node == last] + [w for w in chosen if w.node in nodes]
