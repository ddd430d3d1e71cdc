"""What an agent does about directives and about its workers: pure, effects out."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from stoker.errors import EXIT_ENVIRONMENT
from stoker.wire.exits import ExitFacts
from stoker.wire.job import (
    Answer,
    Beat,
    Call,
    Directive,
    NodeReport,
    Order,
    Outcome,
    WorkerCall,
    WorkerReport,
    WorkerSpec,
    WorkerState,
)

FULL_EVERY = 5
"""Of the beats of a node in which nothing changes, every so many carries the whole report, should one have got lost."""


@dataclass(frozen=True)
class Spawn:
    """Start a worker process."""

    spec: WorkerSpec


@dataclass(frozen=True)
class Stop:
    """End a worker process: SIGTERM, then SIGKILL after the grace time; `at_once` skips the first.

    A process in state T is ended at once: it can do nothing with the grace time.
    """

    worker: str
    at_once: bool


@dataclass(frozen=True)
class GiveOrder:
    """Tell a worker."""

    worker: str
    order: Order


@dataclass(frozen=True)
class PassCall:
    """Hand a worker's call on to the master."""

    call: WorkerCall


@dataclass(frozen=True)
class GiveAnswer:
    """Hand the master's answer on to the worker."""

    worker: str
    answer: Answer


@dataclass(frozen=True)
class Leave:
    """The agent's work is done."""

    outcome: Outcome | None
    """None: this node left, the job goes on."""


Effect = Spawn | Stop | GiveOrder | PassCall | GiveAnswer | Leave


@dataclass
class LocalWorker:
    """A worker of this node."""

    spec: WorkerSpec
    pid: int = 0
    state: WorkerState = WorkerState()
    exit: ExitFacts | None = None
    connected: bool = False
    ordered: Order | None = None
    stopping: bool = False
    stopped_since: float | None = None
    """Since when the process has been in state T."""
    calls: dict[int, Call] = field(default_factory=dict)
    """Its calls that are not answered yet."""


class NodeCore:
    """Turns the newest directive and the workers' own words into starts, stops, orders and reports."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.workers: dict[str, LocalWorker] = {}
        self.leaving = ""
        self.problem = ""
        self.directive = Directive(seq=0, generation=0)
        self.group_rank = -1
        """This node's number in the newest world in which it had workers; -1: there was none."""
        self._world = 0
        self._seq = 0
        self._beats = 0
        self._reported: tuple[WorkerReport, ...] = ()
        self._started: set[str] = set()
        self._left = False

    # -- what happens -------------------------------------------------------------------------------------

    def on_directive(self, directive: Directive) -> list[Effect]:
        """Take the newest directive; an older or doubled one changes nothing."""
        if (directive.epoch, directive.seq) <= (self.directive.epoch, self.directive.seq):
            return []
        self.directive = directive
        if directive.world is not None:
            self._world = directive.world.generation
            self.group_rank = next((m.group_rank for m in directive.world.members), self.group_rank)
        self.leaving = self.leaving or directive.leave
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
                self.problem = ""  # it is tried again
                self.workers[spec.worker] = LocalWorker(spec)
                effects.append(Spawn(spec))
        if directive.outcome is not None:
            for worker in self.workers.values():
                if not directive.outcome.success or worker.state.phase != "finished":
                    effects += self._stop(worker, at_once=False)
        return effects + self._orders() + self._leave_if_done()

    def on_spawned(self, worker: str, pid: int) -> None:
        self.workers[worker].pid = pid

    def on_not_started(self, worker: str, why: str) -> list[Effect]:
        """Its process could not be started: it has ended before it began, and this node has a problem."""
        self.problem = why
        never = ExitFacts(code=EXIT_ENVIRONMENT, signal=None, message=why, verdict="not-ready")
        return self.on_exit(worker, never)

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
            known.stopped_since = None  # who speaks runs, even if a tracer holds it most of the time
        return self._orders()

    def on_exit(self, worker: str, ended: ExitFacts) -> list[Effect]:
        """A worker process ended."""
        known = self.workers.get(worker)
        if known is None:
            return self._leave_if_done()
        known.exit = ended
        known.connected = False
        known.stopped_since = None
        known.calls.clear()
        if worker not in {spec.worker for spec in self.directive.run}:
            del self.workers[worker]
        return self._leave_if_done()

    def on_stopped(self, worker: str, now: float) -> list[Effect]:
        """The process is in state T. One whose end was asked for could go on for a moment when it is continued."""
        known = self.workers.get(worker)
        if known is None or known.stopped_since is not None:
            return []
        known.stopped_since = now
        return [Stop(worker, at_once=True)] if known.stopping and known.exit is None else []

    def on_continued(self, worker: str) -> list[Effect]:
        """It runs again."""
        known = self.workers.get(worker)
        if known is not None:
            known.stopped_since = None
        return []

    def on_tick(self, now: float, stopped_limit_s: float) -> list[Effect]:
        """Time has passed. After the end nobody waits for a process that is stopped."""
        effects: list[Effect] = []
        if self.directive.outcome is not None:
            for worker in self.workers.values():
                since = worker.stopped_since
                if since is not None and now - since > stopped_limit_s:
                    effects += self._stop(worker, at_once=True)
        return effects

    def leave(self, why: str) -> list[Effect]:
        """This node is to leave. After the training, that is the end of scripts that still run."""
        self.leaving = why
        effects: list[Effect] = []
        if self.directive.outcome is not None:
            for worker in self.workers.values():
                effects += self._stop(worker, at_once=False)
        return effects

    def on_call(self, worker: str, call: Call) -> list[Effect]:
        """A worker asks something of the master."""
        known = self.workers.get(worker)
        if known is None or known.exit is not None:
            return []
        known.calls[call.number] = call
        return [PassCall(WorkerCall(worker, call))]

    def on_answer(self, worker: str, answer: Answer) -> list[Effect]:
        """The master has answered; an answer that came before is dropped."""
        known = self.workers.get(worker)
        if known is None or known.calls.pop(answer.number, None) is None:
            return []
        return [GiveAnswer(worker, answer)]

    def open_calls(self) -> list[WorkerCall]:
        """Calls that a new stream has to repeat."""
        return [WorkerCall(w.spec.worker, call) for w in self.workers.values() for call in w.calls.values()]

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

    @property
    def was_taken(self) -> bool:
        """Whether a master has accepted this node."""
        return self.directive.seq > 0

    def turn_to_save(self) -> tuple[int | None, str]:
        """At this node's end: whether it writes its newest snapshot beside others who may do the same, and as which of
        them; None: only if the master has said so. And why.
        """
        if self.directive.outcome is not None or self.leaving:
            return None, "the master has said who writes"
        if self.group_rank < 0:
            return None, "it was in no world"
        return self.group_rank, "there is no master to say who is left"

    @property
    def world(self) -> int:
        """Generation of the newest world that it was told of."""
        return self._world

    @property
    def report_seq(self) -> int:
        """Number of the newest report."""
        return self._seq

    def beat(self, spare_port: int, now: float) -> NodeReport | Beat:
        """A sign of life: short where nothing has changed."""
        self._beats += 1
        if self._beats % FULL_EVERY and self._reported == self._worker_reports(now):
            return Beat(self.node, self._seq, self.directive.seq)
        return self.report(spare_port, now)

    def report(self, spare_port: int, now: float) -> NodeReport:
        """All that this node is, with the next number."""
        self._seq += 1
        self._reported = self._worker_reports(now)
        return NodeReport(
            node=self.node,
            seq=self._seq,
            workers=self._reported,
            spare_port=spare_port,
            leaving=self.leaving,
            problem=self.problem,
            directive_seq=self.directive.seq,
        )

    def _worker_reports(self, now: float) -> tuple[WorkerReport, ...]:
        return tuple(
            WorkerReport(
                worker=w.spec.worker,
                slot=w.spec.slot,
                pid=w.pid,
                state=w.state,
                exit=w.exit,
                stopped_s=0.0 if w.stopped_since is None else max(now - w.stopped_since, 1e-3),
            )
            for w in self.workers.values()
        )

    # -- helpers ------------------------------------------------------------------------------------------

    def _stop(self, worker: LocalWorker, *, at_once: bool) -> list[Effect]:
        if worker.exit is not None or worker.stopping:
            return []
        worker.stopping = True
        is_stopped = worker.stopped_since is not None
        return [Stop(worker.spec.worker, at_once or is_stopped)]

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
