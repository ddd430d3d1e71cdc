"""Nodes that come, speak, fall silent and go. PURE."""

from __future__ import annotations

from stoker.errors import EXIT_ENVIRONMENT
from stoker.job import watch
from stoker.job.events import Refuse
from stoker.job.roster import Node
from stoker.job.state import RETURNS_PER_S, JobState
from stoker.job.workers import Staff, place_of
from stoker.wire.exits import ExitFacts
from stoker.wire.job import PROTOCOL, Beat, Join, NodeReport

BLIP_S = 1.0
"""Seconds that a node whose stream broke has to come back before the beat timeout."""
HELD_BEATS = 3
"""Beat timeouts beyond the user's timeout after which a silent node has stopped its workers: it counts from the last
that it heard, which may be a beat timeout later than the last that was heard of it, and then ends them."""
RESEND_S = 0.5
"""Seconds after which a directive that is not acknowledged is taken for lost."""


class Presence:
    """Takes in what agents say, and gives up those that say nothing."""

    def __init__(self, state: JobState, staff: Staff) -> None:
        self.state = state
        self.staff = staff

    # -- what agents say ----------------------------------------------------------------------------------

    def on_joined(self, join: Join, now: float) -> None:
        """An agent opened its stream, for the first time or again."""
        state = self.state
        node = state.roster.nodes.get(join.node)
        why = self._refusal(join)
        if why:
            is_stranger = join.protocol != PROTOCOL or join.job != state.config.job
            outcome = None if is_stranger else state.outcome
            state.effects.append(Refuse(join.node, why, is_stranger, outcome))
            state.record("node-refused", why, node=join.node)
            if not is_stranger:
                self._note_generation(join, (state.generations.number, join.world), now)
            return
        if node is None:
            node = state.roster.add_node(join, now)
            node.check = "wanted" if state.config.check_nodes else "passed"
            node.cordoned = state.budgets.cordon_reason(place_of(node), now)
            known_fault = f"; it stays idle: {node.cordoned}" if node.cordoned else ""
            state.record(
                "node-joined", f"{join.host} offers {join.slots} workers{known_fault}", node=join.node
            )
        else:
            node.last_seen, node.cut_since, node.held = now, None, False
            node.expected_until = 0.0
            state.record("node-back", "its stream is there again", node=join.node)
            if node.is_from_journal and node.last_seq < 0:  # it has not said anything to this master
                self._note_generation(join, state.restored, now)
        node.last_seq = max(node.last_seq, join.report_seq)
        node.next_seq = max(node.next_seq, join.directive_seq + 1)
        node.sent = None
        state.touched.add(join.node)

    def _note_generation(self, join: Join, known: tuple[int, int], now: float) -> None:
        """Name a generation above all that nodes have seen from a master whose journal could not be written."""
        state = self.state
        generation, world = known
        if join.generation <= generation and join.world <= world:
            return
        state.generations.number = max(state.generations.number, join.generation)
        if state.phase in ("forming", "running"):
            seen = f"generation {join.generation}" if join.generation > generation else f"world {join.world}"
            why = f"{join.node} has seen {seen}: the journal is older than that"
            state.begin_forming(why, now)

    def on_beat(self, beat: Beat, now: float) -> None:
        """An agent is alive."""
        node = self.state.roster.nodes.get(beat.node)
        if node is not None and beat.seq >= node.last_seq:
            self._seen(node, beat.directive_seq, now)

    def on_report(self, report: NodeReport, now: float) -> None:
        """An agent said all that it is; an older or doubled report changes nothing."""
        state, roster = self.state, self.state.roster
        node = roster.nodes.get(report.node)
        if node is None or report.seq <= node.last_seq:
            return
        node.last_seq, node.spare_port = report.seq, report.spare_port
        self._seen(node, report.directive_seq, now)
        if not node.heard:
            node.heard = state.is_news = state.is_roster_news = True
            roster.note_nodes()
        if report.problem and not node.cordoned:
            self._on_problem(node, report.problem, now)
        if report.leaving and not node.leaving:
            node.leaving = report.leaving
            state.is_news = True
            roster.note_nodes()
            state.touched.add(node.node)
            state.record("node-leaving", report.leaving, node=node.node)
            if (
                state.runs_plain
                and not state.is_ending
                and any(not w.ended for w in roster.on_node(node.node))
            ):
                self.staff.restart_all(f"node {node.node} leaves", now)
        self._miss_workers(node, report, now)
        for said in report.workers:
            if said.exit is not None and said.worker in state.generations.members:
                state.generations.dead.add(said.worker)
            worker = roster.workers.get(said.worker)
            if worker is None:
                roster.avoid_name(said.worker)
            if worker is None or worker.node != report.node or worker.ended:
                continue
            before = (worker.finished, roster.elastic)
            if roster.apply(worker, said, now):
                state.is_news = True
            if (worker.finished, roster.elastic) != before:
                state.is_roster_news = True
                state.touched.add(worker.worker)
            state.generations.note(worker)
            state.budgets.note_commits(roster.progress, now)
            if said.exit is not None:
                self.staff.on_exit(worker, said.exit, now)

    def _on_problem(self, node: Node, problem: str, now: float) -> None:
        """A node cannot run workers. Where the others are enough the job does without it."""
        state = self.state
        state.is_news = state.is_roster_news = True
        if state.roster.other_usable(node.node) >= state.config.min_nodes:
            self.staff.cordon(node, problem, now)
        else:
            state.fail(EXIT_ENVIRONMENT, f"{node.node}: {problem}")

    def _miss_workers(self, node: Node, report: NodeReport, now: float) -> None:
        """An agent that has its newest directive reports every worker in it, unless that one has ended already under a
        master whose journal could not be written: it is not started a second time."""
        sent = node.sent
        if not node.is_from_journal or sent is None or report.directive_seq != node.next_seq - 1:
            return
        there = {said.worker for said in report.workers}
        for worker in [self.state.roster.workers.get(spec.worker) for spec in sent.run]:
            if worker is not None and worker.worker not in there and not worker.ended:
                facts = ExitFacts(code=None, signal=9, message="its node does not run it", verdict="evicted")
                self.staff.on_exit(worker, facts, now)

    def on_asked(self, name: str, why: str) -> None:
        """Somebody wants this node to leave in good order."""
        node = self.state.roster.nodes.get(name)
        if node is not None and not (node.leaving or node.asked_to_leave):
            node.asked_to_leave = why
            self.state.touched.add(name)
            self.state.record("node-asked", why, node=name)

    # -- what they do not say any more --------------------------------------------------------------------

    def on_cut(self, name: str, why: str, now: float) -> None:
        """A stream broke; its agent may well come back."""
        node = self.state.roster.nodes.get(name)
        if node is not None and node.cut_since is None:
            node.cut_since = now
            self.state.record("node-cut", why, node=name)

    def on_lost(self, name: str, why: str, now: float) -> None:
        """A node is gone, with all that ran on it."""
        state = self.state
        if state.roster.nodes.pop(name, None) is None:
            return
        state.roster.note_nodes()
        state.touched.add(name)
        state.record("node-lost", why, node=name)
        here = state.roster.on_node(name)
        must_restart = state.runs_plain and any(not w.ended for w in here)
        for worker in here:
            state.remove(worker)
        if must_restart:
            self.staff.restart_all(f"node {name} is gone", now)

    def on_tick(self, now: float) -> None:
        """Give up who was silent for too long, and repeat directives as a sign of life."""
        beat_timeout_s = self.state.config.beat_timeout_s
        self._give_up_silent(now)
        if self.state.phase != "ended":
            self._give_up_stopped(now)
        for node in self.state.roster.nodes.values():
            if now - node.sent_at > beat_timeout_s:
                node.sent = None
                self.state.retold.add(node.node)

    def on_stood_still(self, now: float) -> None:
        """The master was stopped: nodes may have hung up on it, and have as long to come back as after its death."""
        wait_s = self.state.config.beat_timeout_s + len(self.state.roster.nodes) / RETURNS_PER_S
        for node in self.state.roster.nodes.values():
            node.expected_until = max(node.expected_until, now + wait_s)

    # -- helpers ------------------------------------------------------------------------------------------

    def _refusal(self, join: Join) -> str:
        """Why this agent cannot be taken; empty: it can."""
        state = self.state
        known = state.roster.nodes.get(join.node)
        if join.protocol != PROTOCOL:
            return f"it speaks protocol {join.protocol}, this master {PROTOCOL}: upgrade one of them"
        if join.job != state.config.job:
            return f"it wants job {join.job!r}, this master runs {state.config.job!r}: use another --rdzv-endpoint"
        if state.phase == "ended" and known is None:
            return "the job has ended"
        if join.resumes and known is None:
            return "this node was given up: a node back from the dead is a new node"
        return ""

    def _seen(self, node: Node, directive_seq: int, now: float) -> None:
        node.last_seen, node.held = now, False
        got_lost = node.sent is not None and directive_seq < node.next_seq - 1
        if got_lost and now - node.sent_at > RESEND_S:
            node.sent = None
            self.state.retold.add(node.node)

    def _give_up_silent(self, now: float) -> None:
        """Nodes without a sign of life for the beat timeout are lost: those that were cut sooner, those that a master
        before has left behind a little later.

        Unless nobody else holds the state. Then it is waited for, until it must have given up itself: it stops its
        workers when it has not reached a master for the user's timeout.
        """
        state, roster = self.state, self.state.roster
        limit_s = state.config.beat_timeout_s
        silent: dict[str, float] = {}
        for node in roster.nodes.values():
            if now < node.expected_until:
                continue
            silent_s = now - node.last_seen
            if silent_s > limit_s or (node.cut_since is not None and now - node.cut_since > BLIP_S):
                silent[node.node] = silent_s
        if not silent:
            return
        workers = {w.worker for name in silent for w in roster.on_node(name)}
        is_over = state.phase == "ended"
        must_hold = (
            not is_over and bool(workers) and not watch.would_survive(state.generations, roster, workers)
        )
        for name, silent_s in silent.items():
            why = f"no sign of life for {silent_s:.1f} s"
            node = roster.nodes[name]
            if not must_hold or silent_s > state.config.timeout_s + HELD_BEATS * limit_s:
                self.on_lost(name, why, now)
            elif not node.held:
                node.held = True
                state.record("node-silent", f"{why}; waiting, for nobody else holds the state", node=name)

    def _give_up_stopped(self, now: float) -> None:
        """A process in state T takes part in nothing, and the others wait for it.

        Where all who hold the state are stopped, somebody may well have done it on purpose: they have more time.
        """
        state = self.state
        limit_s = state.config.beat_timeout_s
        stopped = [w for w in state.roster.live() if w.stopped_s > limit_s]
        names = {w.worker for w in stopped}
        if not watch.would_survive(state.generations, state.roster, names):
            stopped = [w for w in stopped if w.stopped_s > state.config.timeout_s]
        for worker in stopped:
            why = f"it was stopped (state T) for {worker.stopped_s:.1f} s"
            state.record("worker-stopped", why, worker=worker.worker, node=worker.node)
            facts = ExitFacts(code=None, signal=9, message=why, verdict="stopped")
            self.staff.on_exit(worker, facts, now)
