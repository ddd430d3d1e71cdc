"""What an agent does about directives and about its workers: pure, effects out."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stoker.wire.job import (
    Directive,
    NodeReport,
    Order,
    Outcome,
    WorkerExit,
    WorkerReport,
    WorkerSpec,
    WorkerState,
)


@dataclass(frozen=True)
class Spawn:
    """Start a worker process."""

    spec: WorkerSpec


@dataclass(frozen=True)
class Stop:
    """End a worker process: SIGTERM, then SIGKILL after the grace time; `at_once` skips the first."""

    worker: str
    at_once: bool


@dataclass(frozen=True)
class GiveOrder:
    """Tell a worker."""

    worker: str
    order: Order


@dataclass(frozen=True)
class Leave:
    """The agent's work is done."""

    outcome: Outcome | None
    """None: this node left, the job goes on."""


Effect = Spawn | Stop | GiveOrder | Leave


@dataclass
class LocalWorker:
    """A worker of this node."""

    spec: WorkerSpec
    pid: int = 0
    state: WorkerState = WorkerState()
    exit: WorkerExit | None = None
    connected: bool = False
    ordered: Order | None = None
    stopping: bool = False


class NodeCore:
    """Turns the newest directive and the workers' own words into starts, stops, orders and reports."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.workers: dict[str, LocalWorker] = {}
        self.leaving = ""
        self.problem = ""
        self.directive = Directive(seq=0, generation=0)
        self._seq = 0
        self._started: set[str] = set()
        self._left = False

    # -- what happens -------------------------------------------------------------------------------------

    def on_directive(self, directive: Directive) -> list[Effect]:
        """Take the newest directive; an older or doubled one changes nothing."""
        if directive.seq <= self.directive.seq:
            return []
        self.directive = directive
        effects: list[Effect] = []
        wanted = {spec.worker for spec in directive.run}
        for name, worker in list(self.workers.items()):
            if worker.exit is not None and name not in wanted:
                del self.workers[name]
            elif worker.exit is None and name not in wanted and directive.outcome is None:
                effects += self._stop(worker, at_once=not self.leaving)
        for spec in directive.run:
            if spec.worker not in self._started and directive.outcome is None:
                self._started.add(spec.worker)
                self.workers[spec.worker] = LocalWorker(spec)
                effects.append(Spawn(spec))
        if directive.outcome is not None:
            for worker in self.workers.values():
                if not directive.outcome.success or worker.state.phase != "finished":
                    effects += self._stop(worker, at_once=False)
        return effects + self._orders() + self._leave_if_done()

    def on_spawned(self, worker: str, pid: int) -> None:
        self.workers[worker].pid = pid

    def on_hello(self, worker: str) -> list[Effect]:
        """A worker opened its channel."""
        known = self.workers.get(worker)
        if known is None or known.exit is not None:
            return []
        known.connected = True
        known.ordered = None
        known.state = msgspec.structs.replace(known.state, elastic=True)
        return self._orders()

    def on_state(self, worker: str, state: WorkerState) -> list[Effect]:
        """A worker says what it is."""
        known = self.workers.get(worker)
        if known is not None and known.exit is None:
            known.state = state
        return self._orders()

    def on_exit(self, worker: str, ended: WorkerExit) -> list[Effect]:
        """A worker process ended."""
        known = self.workers.get(worker)
        if known is None:
            return self._leave_if_done()
        known.exit = ended
        known.connected = False
        if worker not in {spec.worker for spec in self.directive.run}:
            del self.workers[worker]
        return self._leave_if_done()

    def on_stream_lost(self) -> list[Effect]:
        """The master is out of reach: this node's workers are of no world any more."""
        effects: list[Effect] = []
        for worker in self.workers.values():
            effects += self._stop(worker, at_once=True)
        return effects

    def is_stopping(self, worker: str) -> bool:
        """Whether its end was asked for."""
        known = self.workers.get(worker)
        return known is None or known.stopping

    def stop_all(self) -> list[Effect]:
        """End every worker now."""
        effects: list[Effect] = []
        for worker in self.workers.values():
            worker.stopping = False
            effects += self._stop(worker, at_once=True)
        return effects

    # -- what it says -------------------------------------------------------------------------------------

    def report(self, spare_port: int) -> NodeReport:
        """All that this node is, with the next number."""
        self._seq += 1
        return NodeReport(
            node=self.node,
            seq=self._seq,
            workers=tuple(
                WorkerReport(worker=w.spec.worker, slot=w.spec.slot, pid=w.pid, state=w.state, exit=w.exit)
                for w in self.workers.values()
            ),
            spare_port=spare_port,
            leaving=self.leaving,
            problem=self.problem,
        )

    # -- helpers ------------------------------------------------------------------------------------------

    def _stop(self, worker: LocalWorker, *, at_once: bool) -> list[Effect]:
        if worker.exit is not None or worker.stopping:
            return []
        worker.stopping = True
        return [Stop(worker.spec.worker, at_once)]

    def _orders(self) -> list[Effect]:
        directive = self.directive
        order = Order(
            generation=directive.generation,
            stop_at_commit=directive.stop_at_commit,
            world=directive.world,
            released=directive.outcome is not None and directive.outcome.success,
        )
        effects: list[Effect] = []
        for worker in self.workers.values():
            if worker.connected and worker.exit is None and worker.ordered != order:
                worker.ordered = order
                effects.append(GiveOrder(worker.spec.worker, order))
        return effects

    def _leave_if_done(self) -> list[Effect]:
        running = any(w.exit is None for w in self.workers.values())
        outcome = self.directive.outcome
        told_to_go = bool(self.leaving) and self.directive.seq > 0 and not self.directive.run
        if self._left or running or (outcome is None and not told_to_go):
            return []
        self._left = True
        return [Leave(outcome)]
