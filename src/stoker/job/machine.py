"""The state machine of one job: events in, effects out.

The life of a job, in phases:

    waiting ──enough nodes──▶ forming ──all have left the old world──▶ running
                                 ▲                                        │
                                 └── a member died, left or broke;  ◀─────┘
                                     a newcomer is ready
    any phase ──▶ ended

A *generation* is one agreed world. Forming one has two halves: the directive names the new generation, and each
worker leaves its old world and acknowledges it (it "parks"); when all who must have parked, the world is fixed
and sent. A worker that dies in between starts the next generation, so no world ever holds a worker that had not
left its older one.

Scripts that never import Stoker ("plain") cannot park: they stay in the first half for ever, which is just
right, and any change of membership restarts all of them, as torchrun does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stoker.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_WORLD, EXIT_OK
from stoker.job import relaunch, watch
from stoker.job.events import (
    Effect,
    End,
    Event,
    NodeJoined,
    NodeLost,
    NodeReported,
    Record,
    Refuse,
    Send,
    StopRequested,
)
from stoker.job.generations import FRUITLESS_LIMIT, Generations
from stoker.job.roster import Node, Roster, Worker
from stoker.wire.job import PROTOCOL, NodeReport, Outcome, WorkerExit, World

Phase = Literal["waiting", "forming", "running", "ended"]


@dataclass(frozen=True)
class JobConfig:
    """What the user asked for; times in seconds."""

    job: str = "none"
    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int | None = None
    timeout_s: float = 300.0
    beat_timeout_s: float = 5.0
    park_s: float = 300.0
    last_call_s: float = 1.0


class JobMachine:
    """Decides who is in the world. Pure: all time comes in as `now`."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.roster = Roster()
        self.phase: Phase = "waiting"
        self.generations = Generations()
        self.restarts_used = 0
        self.outcome: Outcome | None = None
        self._effects: list[Effect] = []
        self._short_since: float | None = None
        self._enough_since: float | None = None

    def step(self, event: Event, now: float) -> list[Effect]:
        """Feed one event; returns what is to be done, in order."""
        self._effects = []
        match event:
            case NodeJoined():
                self._on_joined(event, now)
            case NodeReported(report):
                self._on_report(report, now)
            case NodeLost(node, why):
                self._on_node_lost(node, why, now)
            case StopRequested(why, exit_code):
                self._fail(exit_code, why)
            case _:
                self._on_tick(now)
        self._advance(now)
        self._send_directives()
        return self._effects

    @property
    def generation(self) -> int:
        return self.generations.number

    @property
    def world(self) -> World | None:
        """The newest world; while `forming`, the one that is being left."""
        return self.generations.world

    # -- events -------------------------------------------------------------------------------------------

    def _on_joined(self, event: NodeJoined, now: float) -> None:
        join = event.join
        known = join.node in self.roster.nodes or join.node in self.roster.gone
        if join.protocol != PROTOCOL:
            why = f"it speaks protocol {join.protocol}, this master {PROTOCOL}: upgrade one of them"
        elif join.job != self.config.job:
            why = f"it wants job {join.job!r}, this master runs {self.config.job!r}: use another --rdzv-endpoint"
        elif known:
            why = "this node id was seen before: a node back from the dead is a new node"
        elif self.phase == "ended":
            why = "the job has ended"
        elif len(self.roster.nodes) >= self.config.max_nodes:
            why = f"the job already has its {self.config.max_nodes} nodes (--nnodes)"
        else:
            self.roster.add_node(join, now)
            self._record("node-joined", f"{join.host} offers {join.slots} workers", node=join.node)
            return
        self._effects.append(Refuse(join.node, why))
        self._record("node-refused", why, node=join.node)

    def _on_report(self, report: NodeReport, now: float) -> None:
        node = self.roster.nodes.get(report.node)
        if node is None or report.seq <= node.last_seq:
            return
        node.last_seq, node.last_seen = report.seq, now
        node.spare_port = report.spare_port
        if report.problem:
            self._fail(EXIT_ENVIRONMENT, f"{node.node}: {report.problem}")
            return
        if report.leaving and not node.leaving:
            node.leaving = report.leaving
            self._record("node-leaving", report.leaving, node=node.node)
        for said in report.workers:
            worker = self.roster.workers.get(said.worker)
            if worker is None or worker.node != report.node or worker.ended:
                continue
            self.roster.apply(worker, said, now)
            if said.exit is not None:
                self._on_exit(worker, said.exit, now)

    def _on_node_lost(self, name: str, why: str, now: float) -> None:
        if self.roster.nodes.pop(name, None) is None:
            return
        self.roster.gone.add(name)
        self._record("node-lost", why, node=name)
        here = self.roster.on_node(name)
        for worker in here:
            del self.roster.workers[worker.worker]
        if self._runs_plain() and any(not w.ended for w in here):
            self._restart_all(f"node {name} is gone", now)

    def _on_tick(self, now: float) -> None:
        for name, node in list(self.roster.nodes.items()):
            silent_s = now - node.last_seen
            if silent_s > self.config.beat_timeout_s:
                self._on_node_lost(name, f"no sign of life for {silent_s:.1f} s", now)
            node.sent = None

    def _on_exit(self, worker: Worker, ended: WorkerExit, now: float) -> None:
        worker.ended = True
        if self.phase == "ended" or worker.finished or not self.roster.is_staying(worker):
            return
        decision = relaunch.decide(
            ended,
            elastic=self.roster.elastic,
            restarts_used=self.restarts_used,
            max_restarts=self.config.max_restarts,
        )
        if decision.action == "done":
            worker.finished = True
            return
        rank = self._rank_of(worker)
        self._record(
            f"worker-{decision.action}",
            decision.why,
            worker=worker.worker,
            node=worker.node,
            rank=rank,
        )
        if decision.action == "stop":
            signal_code = 128 + ended.signal if ended.signal is not None else 0
            outcome = Outcome(
                success=False,
                exit_code=ended.code or signal_code or EXIT_FAILED,
                why=f"rank {rank} ({worker.worker} on {worker.node}) {relaunch.describe_exit(ended)}",
                error=ended.message,
                failed_worker=worker.worker,
            )
            self._end(outcome)
        elif decision.action == "replace":
            self.restarts_used += 1
            if self.roster.elastic:
                self._start_worker(self.roster.nodes[worker.node], worker.spec.slot)
            else:
                self._restart_all(decision.why, now)

    # -- progress -----------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        if self.phase in ("forming", "running"):
            self._fill_new_nodes(now)
            if watch.is_complete(self.world, self.roster):
                self._end(Outcome(success=True, exit_code=EXIT_OK, why="every worker finished"))
        if self.phase != "ended":
            self._check_minimum(now)
        if self.phase == "waiting":
            self._wait_for_nodes(now)
        if self.phase == "running" and self.world is not None:
            regroup = watch.regroup_reason(self.world, self.roster, now, self.config.last_call_s)
            if regroup is not None:
                self._begin_forming(regroup.why, now, regroup.stop_at_commit)
        if self.phase == "forming":
            self._try_form(now)

    def _wait_for_nodes(self, now: float) -> None:
        here = len(self.roster.staying())
        if here < self.config.min_nodes:
            self._enough_since = None
            return
        if self._enough_since is None:
            self._enough_since = now
        if here >= self.config.max_nodes or now - self._enough_since >= self.config.last_call_s:
            self._launch(f"{here} of {self.config.min_nodes}:{self.config.max_nodes} nodes are here", now)

    def _launch(self, why: str, now: float) -> None:
        self._begin_forming(why, now)
        self.roster.order_by_hint()
        nodes = self.roster.staying()
        total = sum(node.join.slots for node in nodes)
        rank = 0
        for node in nodes:
            for slot in range(node.join.slots):
                self._start_worker(node, slot, rank=rank, world_size=total)
                rank += 1
        self.generations.awaited = {w.worker for w in self.roster.live()}

    def _start_worker(
        self, node: Node, slot: int, *, rank: int | None = None, world_size: int | None = None
    ) -> None:
        worker = self.roster.new_worker(
            node,
            slot,
            rank=slot if rank is None else rank,
            world_size=node.join.slots if world_size is None else world_size,
            restarts=self.restarts_used,
            max_restarts=self.config.max_restarts or 0,
        )
        self._record("worker-started", f"slot {slot}", worker=worker.worker, node=node.node)

    def _fill_new_nodes(self, now: float) -> None:
        new = [n for n in self.roster.staying() if not self.roster.on_node(n.node)]
        if new and self._runs_plain():
            self._restart_all(f"{new[0].node} joined", now)
            return
        for node in new:
            for slot in range(node.join.slots):
                self._start_worker(node, slot)

    def _begin_forming(self, why: str, now: float, stop_at_commit: int = -1) -> None:
        self.phase = "forming"
        self.generations.begin(why, now, stop_at_commit)
        self.generations.awaited |= {w.worker for w in self.roster.live() if w.state.phase == "parked"}
        self._record("generation", why, stop_at_commit=stop_at_commit)

    def _try_form(self, now: float) -> None:
        """Fix the world once everybody who must has acknowledged the generation."""
        config = self.config
        verdict = self.generations.judge(self.roster, now, min_nodes=config.min_nodes, park_s=config.park_s)
        match verdict.step:
            case "again":
                self._begin_forming(verdict.why, now)
            case "drop":
                self._drop(verdict.workers, verdict.why, now)
            case "empty" if self.roster.workers and len(self.roster.staying()) >= config.min_nodes:
                self._fail(EXIT_FAILED, f"{verdict.why} and all restarts are used ({self.restarts_used})")
            case "roll-back":
                self._record("rollback", f"{verdict.why}: starting again from the last checkpoint")
                self._drop(verdict.workers, verdict.why, now, as_one=True)
            case "fruitless":
                why = (
                    f"{FRUITLESS_LIMIT} worlds in a row broke before their first step, the last because: "
                    f"{verdict.why}. Can the nodes reach each other's addresses (--local-addr)?"
                )
                self._fail(EXIT_NO_WORLD, why)
            case "run":
                assert verdict.world is not None
                self._run(verdict.world)

    def _drop(self, workers: tuple[Worker, ...], why: str, now: float, *, as_one: bool = False) -> None:
        """Do without these workers, and replace them if the budget allows; `as_one`: as a single restart."""
        killed = WorkerExit(code=None, signal=9, message=why)
        used = self.restarts_used
        for worker in workers:
            if self.phase == "forming":
                self._on_exit(worker, killed, now)
                if as_one:
                    self.restarts_used = used
        if as_one:
            self.restarts_used = used + 1
        if self.phase == "forming":
            self._begin_forming(f"{', '.join(w.worker for w in workers)}: {why}", now)

    def _run(self, world: World) -> None:
        lost = max(0, self.roster.highest_commit - world.commits)
        self.roster.highest_commit = world.commits
        self.generations.settle(world)
        self.phase = "running"
        self._record(
            "world",
            f"{len(world.members)} workers go on from commit {world.commits} of rank {world.source}",
            workers=[m.worker for m in world.members],
            commits=world.commits,
            commits_lost=lost,
        )

    def _restart_all(self, why: str, now: float) -> None:
        """Plain scripts: every worker starts anew, with the ranks of the nodes that are there."""
        self.roster.workers.clear()
        self.generations.world = None
        self._record("restart-all", why)
        if len(self.roster.staying()) >= self.config.min_nodes:
            self._launch(why, now)
        else:
            self.phase = "waiting"

    # -- the end ------------------------------------------------------------------------------------------

    def _check_minimum(self, now: float) -> None:
        have, need = len(self.roster.usable()), self.config.min_nodes
        leaving = [n.leaving for n in self.roster.nodes.values()]
        if leaving and all(leaving):
            why = f"every node leaves: {leaving[0]}"
            self._fail(EXIT_INTERRUPTED, why)
            return
        if have >= need:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = now
            self._record("waiting", f"{have} of at least {need} nodes are here")
        if now - self._short_since > self.config.timeout_s:
            why = (
                f"only {have} of at least {need} nodes with workers for {self.config.timeout_s:.0f} s: start the "
                "missing ones, lower the minimum (--nnodes MIN:MAX) or raise --timeout"
            )
            self._fail(EXIT_NO_WORLD, why)

    def _fail(self, exit_code: int, why: str) -> None:
        self._end(Outcome(success=False, exit_code=exit_code, why=why))

    def _end(self, outcome: Outcome) -> None:
        if self.phase == "ended":
            return
        self.phase = "ended"
        self.outcome = outcome
        self._record("ended", outcome.why, success=outcome.success, exit_code=outcome.exit_code)
        self._effects.append(End(outcome))

    def _send_directives(self) -> None:
        formed = self.world if self.phase != "forming" else None
        for node in self.roster.nodes.values():
            wanted = watch.directive_for(
                node,
                self.roster,
                generation=self.generation,
                stop_at_commit=self.generations.stop_at_commit,
                world=formed,
                old_world=self.world,
                outcome=self.outcome,
            )
            if node.sent != wanted:
                node.sent = wanted
                node.next_seq += 1
                self._effects.append(Send(node.node, msgspec.structs.replace(wanted, seq=node.next_seq)))

    # -- helpers ------------------------------------------------------------------------------------------

    def _runs_plain(self) -> bool:
        return bool(self.roster.workers) and not self.roster.elastic and self.phase in ("forming", "running")

    def _rank_of(self, worker: Worker) -> int:
        members = self.world.members if self.world is not None else ()
        return next((m.rank for m in members if m.worker == worker.worker), worker.spec.rank)

    def _record(self, kind: str, why: str, **details: Any) -> None:
        self._effects.append(Record(kind, why, {"generation": self.generation, **details}))
