"""The machine's memory: nodes and workers as last reported. Plain records and questions about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from stoker.job.membership import Candidate, select_nodes
from stoker.job.records import NodeRecord, WorkerRecord
from stoker.wire.job import Directive, Join, WorkerReport, WorkerSpec, WorkerState

NodeCheckState = Literal["wanted", "under way", "passed"]
WORKER = "worker-"
"""What the names of workers begin with; a number follows."""
PACE_WINDOW_S = 0.5
"""Reports of several nodes come in bursts: the pace is measured over at least this long."""


class NodePlace(NamedTuple):
    """Of a node among those whose workers may be in the world."""

    group_rank: int
    first_rank: int
    """Slots of the nodes before it."""


@dataclass
class Node:
    """An agent that the master knows."""

    join: Join
    age: int
    last_seen: float
    last_seq: int = -1
    spare_port: int = 0
    heard: bool = False
    """It has reported, to this master or to the one before."""
    cut_since: float | None = None
    """Since when its stream has been broken; None: it has one."""
    expected_until: float = 0.0
    """A master that was started anew waits for it until then; 0: it has come."""
    is_from_journal: bool = False
    """A master before this one knew it."""
    leaving: str = ""
    asked_to_leave: str = ""
    cordoned: str = ""
    standby: str = ""
    """Why it runs no workers for now; empty: it does."""
    check: NodeCheckState = "passed"
    """Whether the node check lets it in."""
    held: bool = False
    """It is silent, and kept all the same: nobody else holds the state."""
    sent: Directive | None = None
    """The last directive, with its number left out."""
    sent_at: float = 0.0
    next_seq: int = 1

    @property
    def node(self) -> str:
        return self.join.node

    @property
    def going(self) -> str:
        """Why its workers are to leave the world; empty: they stay."""
        return self.leaving or self.asked_to_leave or self.cordoned or self.standby

    @property
    def is_willing(self) -> bool:
        """It has reported and is not to leave for good."""
        return (
            self.heard
            and self.check == "passed"
            and not (self.leaving or self.asked_to_leave or self.cordoned)
        )

    def record(self) -> NodeRecord:
        """What of it is kept."""
        return NodeRecord(
            self.join, self.age, self.leaving, self.asked_to_leave, self.cordoned, self.standby, self.check
        )


@dataclass
class Worker:
    """A worker that should run, or has ended."""

    spec: WorkerSpec
    node: str
    state: WorkerState = field(default_factory=WorkerState)
    pid: int = 0
    ended: bool = False
    """It exited or was dropped: it will never be in a world again."""
    finished: bool = False
    """Its script came to its end."""
    not_before: float = 0.0
    """It is not to be started sooner."""
    parked_since: float = 0.0
    stopped_s: float = 0.0

    @property
    def worker(self) -> str:
        return self.spec.worker

    def has_parked(self, generation: int) -> bool:
        """Whether it has left its old world and acknowledged this generation."""
        return self.state.phase == "parked" and self.state.generation >= generation

    def record(self) -> WorkerRecord:
        """What of it is kept."""
        return WorkerRecord(self.spec, self.node, self.ended, self.finished)


@dataclass
class Roster:
    """All nodes and workers of the job."""

    nodes: dict[str, Node] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    by_node: dict[str, dict[str, Worker]] = field(default_factory=dict)
    elastic: bool = False
    """The script is known to use Stoker's training API."""
    nodes_seen: int = 0
    workers_seen: int = 0
    changes: int = 0
    """Grows whenever a worker comes or goes."""
    highest_commit: int = 0
    work_done: int = 0
    """Pieces of work that workers have done besides steps, such as shards."""
    committed_at: float = 0.0
    """When the newest commit was heard of; 0: there has been none."""
    pace: float = 0.0
    """Commits per second, lately."""
    through: set[str] = field(default_factory=set)
    """Nodes that had a worker which has finished and is let go."""
    _window: tuple[int, float] | None = None
    """Commits and time at which the measuring of the pace began."""
    _usable: set[str] | None = None
    _staying: dict[str, NodePlace] | None = None
    """Names of the usable nodes, places of the staying ones: worked out once for many ends of workers in a row."""

    # -- nodes --------------------------------------------------------------------------------------------

    def add_node(self, join: Join, now: float) -> Node:
        node = self.nodes[join.node] = Node(join=join, age=self.nodes_seen, last_seen=now)
        self.nodes_seen += 1
        return node

    def restore_node(self, record: NodeRecord, now: float, wait_s: float) -> Node:
        """A node as the master before knew it; it has to come back within `wait_s`."""
        node = self.nodes[record.join.node] = Node(
            join=record.join,
            age=record.age,
            last_seen=now,
            heard=True,
            cut_since=now,
            expected_until=now + wait_s,
            is_from_journal=True,
            leaving=record.leaving,
            asked_to_leave=record.asked_to_leave,
            cordoned=record.cordoned,
            standby=record.standby,
            check="wanted" if record.check == "under way" else record.check,  # type: ignore[arg-type]
        )
        return node

    def willing(self) -> list[Node]:
        """Nodes that have reported and do not want to leave, oldest first."""
        return sorted((n for n in self.nodes.values() if n.is_willing), key=lambda n: n.age)

    def staying(self) -> list[Node]:
        """Nodes whose workers may be in the world, oldest first."""
        return [n for n in self.willing() if not n.standby]

    def is_used_up(self, node: Node) -> bool:
        """Whether its workers have failed and are not to be started again."""
        here = self.by_node.get(node.node)
        return here is not None and all(w.ended and not w.finished for w in here.values())

    def runs_workers(self, node: Node) -> bool:
        """Whether any of its workers may be in a world."""
        here = self.by_node.get(node.node)
        return here is not None and not all(w.ended for w in here.values())

    def usable(self) -> list[Node]:
        """Willing nodes that run a worker or have not been given any yet, oldest first."""
        return [n for n in self.willing() if not self.is_used_up(n)]

    def other_usable(self, name: str) -> int:
        """How many usable nodes there are besides this one."""
        if self._usable is None:
            self._usable = {n.node for n in self.nodes.values() if n.is_willing and not self.is_used_up(n)}
        return len(self._usable) - (name in self._usable)

    def staying_places(self) -> dict[str, NodePlace]:
        """The staying nodes, oldest first, and their places."""
        if self._staying is None:
            self._staying, first_rank = {}, 0
            for group_rank, node in enumerate(self.staying()):
                self._staying[node.node] = NodePlace(group_rank, first_rank)
                first_rank += node.join.slots
        return self._staying

    def through_nodes(self) -> set[str]:
        """Nodes with a worker that has finished, whether they are still here or not."""
        return self.through | {w.node for w in self.workers.values() if w.finished}

    def note_worker(self, name: str) -> None:
        """A worker of this node has come, ended or gone."""
        if self._usable is None:
            return
        node = self.nodes.get(name)
        if node is not None and node.is_willing and not self.is_used_up(node):
            self._usable.add(name)
        else:
            self._usable.discard(name)

    def note_nodes(self) -> None:
        """Nodes have come or gone, or may run workers now, or may not any more."""
        self._usable = self._staying = None

    def choose_active(self, *, target: int, plain_unit: int) -> list[Node]:
        """Let `target` nodes run workers, those that already do before older ones that do not, and the others stand by;
        returns those that have changed.

        Elastic workers beyond a whole number of node units are warm spares: they run and wait. Other scripts cannot
        wait, so their nodes are cut to whole units here.
        """
        willing = sorted(self.usable(), key=lambda n: (not self.runs_workers(n), n.age))
        chosen = set(select_nodes([n.node for n in willing], target=target, unit=plain_unit))
        changed = []
        for node in willing:
            must_wait = node.node not in chosen
            if must_wait != bool(node.standby):
                lacks_peers = len(willing) <= target
                alone = f"it waits for others to make up a unit of {plain_unit} nodes"
                enough = f"the job already runs on {len(chosen)} nodes"
                node.standby = "" if not must_wait else alone if lacks_peers else enough
                changed.append(node)
        return changed

    def order_by_hint(self) -> None:
        """Before the first launch an explicit `--node-rank` decides the order; later, age does."""
        nodes = sorted(
            self.nodes.values(),
            key=lambda n: (not n.is_willing, n.join.rank_hint < 0, n.join.rank_hint, n.age),
        )
        for age, node in enumerate(nodes):
            node.age = age

    # -- workers ------------------------------------------------------------------------------------------

    def live(self) -> list[Worker]:
        """Workers that may still be in a world."""
        return [w for w in self.workers.values() if not w.ended]

    def on_node(self, node: str) -> list[Worker]:
        return list(self.by_node.get(node, {}).values())

    def is_staying(self, worker: Worker) -> bool:
        node = self.nodes.get(worker.node)
        return node is not None and not node.going

    def new_worker(
        self,
        node: Node,
        slot: int,
        *,
        restarts: int,
        max_restarts: int,
        memory_bytes: int,
    ) -> Worker:
        """Make the record of a worker that `node` is to start.

        It is told the place that it has where every slot of the nodes that are here has its worker: the slots' order is
        that of ranks in every world.
        """
        places = self.staying_places()
        first, last = self.nodes[next(iter(places))], self.nodes[next(reversed(places))]
        spec = WorkerSpec(
            worker=f"{WORKER}{self.workers_seen}",
            slot=slot,
            rank=places[node.node].first_rank + slot,
            world_size=places[last.node].first_rank + last.join.slots,
            local_rank=slot,
            local_world_size=node.join.slots,
            group_rank=places[node.node].group_rank,
            group_world_size=len(places),
            master_addr=first.join.address,
            master_port=first.spare_port,
            restart_count=restarts,
            max_restarts=max_restarts,
            memory_bytes=memory_bytes,
        )
        self.workers_seen += 1
        return self.add_worker(Worker(spec=spec, node=node.node))

    def avoid_name(self, name: str) -> None:
        """A master whose journal could not be written has named a worker so: no other one is to have that name."""
        number = name.removeprefix(WORKER)
        if number.isdecimal():
            self.workers_seen = max(self.workers_seen, int(number) + 1)

    def add_worker(self, worker: Worker) -> Worker:
        self.changes += 1
        self.workers[worker.worker] = worker
        self.by_node.setdefault(worker.node, {})[worker.worker] = worker
        self.note_worker(worker.node)
        return worker

    def remove_worker(self, worker: Worker) -> None:
        self.changes += 1
        del self.workers[worker.worker]
        here = self.by_node[worker.node]
        del here[worker.worker]
        if not here:
            del self.by_node[worker.node]
        self.note_worker(worker.node)

    def apply(self, worker: Worker, report: WorkerReport, now: float) -> bool:
        """Take over what an agent said about a worker; whether anything but its progress has changed."""
        old, new = worker.state, report.state
        if new.phase == "parked" and old.phase != "parked":
            worker.parked_since = now
        has_entered = old.phase == "parked" and new.phase == "member"  # the world that it was given: no news
        changed = (
            (old.phase != new.phase and not has_entered)
            or (old.generation, old.left, old.clean, old.store)
            != (new.generation, new.left, new.clean, new.store)
            or bool(report.stopped_s) != bool(worker.stopped_s)
            or report.exit is not None
        )
        worker.state, worker.pid, worker.stopped_s = new, report.pid, report.stopped_s
        worker.finished = new.phase == "finished"
        self.elastic = self.elastic or new.elastic
        self._note_commits(new.commits, now)
        return changed

    @property
    def progress(self) -> int:
        """How far the job has come, in steps and other pieces of work."""
        return self.highest_commit + self.work_done

    def _note_commits(self, commits: int, now: float) -> None:
        if commits > self.highest_commit:
            self.highest_commit, self.committed_at = commits, now
        begun = self._window
        if begun is None or begun[0] > self.highest_commit:
            self._window = (self.highest_commit, now)
        elif now - begun[1] >= PACE_WINDOW_S:
            self.pace = (self.highest_commit - begun[0]) / (now - begun[1])
            self._window = (self.highest_commit, now)

    def candidate(self, worker: Worker) -> Candidate:
        """The worker as one of the coming world."""
        return Candidate(
            worker=worker.worker,
            node=worker.node,
            node_age=self.nodes[worker.node].age,
            slot=worker.spec.slot,
            commits=worker.state.commits,
            clean=worker.state.clean,
            fresh=worker.state.fresh,
            store=worker.state.store,
            restored=worker.state.restored,
        )
