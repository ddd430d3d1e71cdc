"""The machine's memory: nodes and workers as last reported. Plain records and questions about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.job.membership import Candidate
from stoker.wire.job import Directive, Join, WorkerReport, WorkerSpec, WorkerState

PACE_WINDOW_S = 0.5
"""Reports of several nodes come in bursts: the pace is measured over at least this long."""


@dataclass
class Node:
    """An agent that the master knows."""

    join: Join
    age: int
    last_seen: float
    last_seq: int = -1
    spare_port: int = 0
    leaving: str = ""
    sent: Directive | None = None
    """The last directive, with its number left out."""
    next_seq: int = 1

    @property
    def node(self) -> str:
        return self.join.node


@dataclass
class Worker:
    """A worker that should run, or has ended."""

    spec: WorkerSpec
    node: str
    state: WorkerState = field(default_factory=WorkerState)
    ended: bool = False
    """It exited or was dropped: it will never be in a world again."""
    finished: bool = False
    """Its script came to its end."""
    parked_since: float = 0.0

    @property
    def worker(self) -> str:
        return self.spec.worker

    def has_parked(self, generation: int) -> bool:
        """Whether it has left its old world and acknowledged this generation."""
        return self.state.phase == "parked" and self.state.generation >= generation


@dataclass
class Roster:
    """All nodes and workers of the job."""

    nodes: dict[str, Node] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Ids of nodes that were lost: a node back from the dead must come as a new one."""
    elastic: bool = False
    """The script is known to use Stoker's training API."""
    nodes_seen: int = 0
    workers_seen: int = 0
    highest_commit: int = 0
    pace: float = 0.0
    """Commits per second, lately."""
    _window: tuple[int, float] | None = None
    """Commits and time at which the measuring of the pace began."""

    def add_node(self, join: Join, now: float) -> None:
        self.nodes[join.node] = Node(join=join, age=self.nodes_seen, last_seen=now)
        self.nodes_seen += 1

    def live(self) -> list[Worker]:
        """Workers that may still be in a world."""
        return [w for w in self.workers.values() if not w.ended]

    def on_node(self, node: str) -> list[Worker]:
        return [w for w in self.workers.values() if w.node == node]

    def staying(self) -> list[Node]:
        """Nodes that have reported and do not want to leave, oldest first."""
        nodes = (n for n in self.nodes.values() if not n.leaving and n.last_seq >= 0)
        return sorted(nodes, key=lambda n: n.age)

    def usable(self) -> list[Node]:
        """Staying nodes that run a worker or have not been given any yet."""
        used_up = {w.node for w in self.workers.values()} - {w.node for w in self.live()}
        return [n for n in self.staying() if n.node not in used_up]

    def is_staying(self, worker: Worker) -> bool:
        node = self.nodes.get(worker.node)
        return node is not None and not node.leaving

    def order_by_hint(self) -> None:
        """Before the first launch an explicit `--node-rank` decides the order; later, age does."""
        nodes = sorted(self.staying(), key=lambda n: (n.join.rank_hint < 0, n.join.rank_hint, n.age))
        for age, node in enumerate(nodes):
            node.age = age

    def new_worker(
        self, node: Node, slot: int, *, rank: int, world_size: int, restarts: int, max_restarts: int
    ) -> Worker:
        """Make the record of a worker that `node` is to start."""
        nodes = self.staying()
        spec = WorkerSpec(
            worker=f"worker-{self.workers_seen}",
            slot=slot,
            rank=rank,
            world_size=world_size,
            local_rank=slot,
            local_world_size=node.join.slots,
            group_rank=nodes.index(node),
            group_world_size=len(nodes),
            master_addr=nodes[0].join.address,
            master_port=nodes[0].spare_port,
            restart_count=restarts,
            max_restarts=max_restarts,
        )
        self.workers_seen += 1
        worker = Worker(spec=spec, node=node.node)
        self.workers[worker.worker] = worker
        return worker

    def apply(self, worker: Worker, report: WorkerReport, now: float) -> None:
        """Take over what an agent said about a worker."""
        if report.state.phase == "parked" and worker.state.phase != "parked":
            worker.parked_since = now
        worker.state = report.state
        worker.finished = report.state.phase == "finished"
        self.elastic = self.elastic or report.state.elastic
        self._note_commits(report.state.commits, now)

    def _note_commits(self, commits: int, now: float) -> None:
        self.highest_commit = max(self.highest_commit, commits)
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
        )
