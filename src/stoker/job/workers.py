"""Which workers run where: starting them, and what follows when one ends. PURE."""

from __future__ import annotations

from math import inf

from stoker.base.rng import Rng
from stoker.errors import EXIT_FAILED
from stoker.job.relaunch import Decision, RelaunchPolicy, WorldFacts, classify, describe
from stoker.job.roster import Node, Worker
from stoker.job.state import JobState
from stoker.wire.exits import ExitFacts, Reason
from stoker.wire.job import Outcome

NEWS_LAG_S = 0.3
"""Commits made in this time may not have been heard of."""


class Staff:
    """Starts, replaces and lets go workers."""

    def __init__(self, state: JobState, rng: Rng) -> None:
        self.state = state
        self.policy = RelaunchPolicy(state.config.relaunch)
        self._rng = rng

    # -- starting -----------------------------------------------------------------------------------------

    def launch(self, why: str, now: float, not_before: float = 0.0) -> None:
        """Start a worker in every slot of every node that is there."""
        state, roster = self.state, self.state.roster
        state.generations.take(None)
        state.begin_forming(why, now)
        state.launched_at = now
        roster.order_by_hint()
        roster.note_nodes()
        for node in roster.staying():
            for slot in range(node.join.slots):
                self.start(node, slot, not_before=not_before)
        state.generations.resume(roster.live(), now)

    def start(self, node: Node, slot: int, *, not_before: float = 0.0) -> None:
        """Start a worker, now or when `not_before` has come."""
        state, config = self.state, self.state.config.relaunch
        for before in state.roster.on_node(node.node):
            if before.spec.slot == slot and before.ended and not before.finished:
                state.remove(before)
        worker = state.roster.new_worker(
            node,
            slot,
            restarts=state.restarts,
            max_restarts=config.max_restarts or 0,
            memory_bytes=max(config.memory_bytes, state.budgets.memory_bytes),
        )
        worker.not_before = not_before
        state.touched |= {worker.worker, node.node}
        state.record("worker-started", f"slot {slot}", worker=worker.worker, node=node.node)

    def fill(self, now: float) -> None:
        """Give new nodes their workers."""
        roster = self.state.roster
        new = [node for node in roster.staying() if node.node not in roster.by_node]
        if new and self.state.runs_plain:
            if self.state.is_ending or self.state.is_kind_open(now):
                return
            self.restart_all(f"{new[0].node} joined", now)
            return
        roster.note_nodes()
        for node in new:
            for slot in range(node.join.slots):
                self.start(node, slot)

    def on_tick(self, now: float) -> None:
        """Start those whose time has come; let nodes in again whose cordon is over."""
        state = self.state
        if not state.is_kind_known and state.launched_at > -inf and not state.is_kind_open(now):
            state.is_kind_known = state.is_roster_news = True
        for worker in state.roster.live():
            if 0 < worker.not_before <= now:
                worker.not_before = 0.0
                state.touched.add(worker.node)
        for node in state.roster.nodes.values():
            if node.cordoned and not state.budgets.cordon_reason(place_of(node), now):
                node.cordoned = ""
                state.touched.add(node.node)
                for worker in state.roster.on_node(node.node):
                    if worker.ended and not worker.finished:
                        state.remove(worker)
                state.roster.note_nodes()
                state.record("node-uncordoned", "its cordon is over", node=node.node)

    # -- ends ---------------------------------------------------------------------------------------------

    def on_exit(self, worker: Worker, facts: ExitFacts, now: float) -> None:
        """A worker ended, or is given up."""
        state = self.state
        world = self._world_facts(worker)
        worker.ended = state.is_news = True
        state.roster.changes += 1
        state.roster.note_worker(worker.node)
        state.touched |= {worker.worker, worker.node}
        state.generations.note(worker)
        if state.phase == "ended" or worker.finished or not state.roster.is_staying(worker):
            return
        reason = classify(facts)
        state.budgets.note_commits(state.roster.progress, now)
        decision = self.policy.decide(reason, facts, state.budgets, world, now, self._rng)
        state.are_budgets_touched = True
        if decision.action == "done":
            worker.finished = True
            why = "it ended with code 0" + (" within a world" if worker.state.phase == "member" else "")
            state.record("worker-finished", why, worker=worker.worker, node=worker.node)
            return
        given_up = f"{facts.message}; " if facts.verdict == "evicted" and facts.message else ""
        rank = state.rank_of(worker)
        details = {"worker": worker.worker, "node": worker.node, "rank": rank, "reason": reason}
        if rank < 0:
            del details["rank"]
        state.record(f"worker-{decision.action}", f"{given_up}{decision.why}", **details)
        self._carry_out(decision, worker, facts, reason, now)

    def _carry_out(
        self, decision: Decision, worker: Worker, facts: ExitFacts, reason: Reason, now: float
    ) -> None:
        state = self.state
        node = state.roster.nodes[worker.node]
        if decision.action == "stop":
            signal_code = 128 + facts.signal if facts.signal is not None else 0
            outcome = Outcome(
                success=False,
                exit_code=facts.code or signal_code or EXIT_FAILED,
                why=f"{state.name_of(worker)}: {decision.why}",
                error=facts.message,
                failed_worker=worker.worker,
            )
            state.end(outcome)
        elif decision.action == "replace":
            state.restarts += 1
            not_before = now + decision.delay_s if decision.delay_s > 0 else 0.0
            if state.roster.elastic:
                self.start(node, worker.spec.slot, not_before=not_before)
            else:
                self.restart_all(decision.why, now, not_before)
        elif decision.action == "cordon":
            self.cordon(node, f"{worker.worker} {describe(reason, facts)}", now)

    def cordon(self, node: Node, why: str, now: float, lasting_s: float | None = None) -> None:
        """This node runs no more workers: for ever, or at first for `lasting_s` seconds, each time twice as long."""
        state = self.state
        if node.cordoned:
            return
        node.cordoned = why
        state.roster.note_nodes()
        if not state.budgets.cordon_reason(place_of(node), now):
            state.budgets.cordon(place_of(node), why, now, lasting_s)
            state.are_budgets_touched = True
        state.touched.add(node.node)
        state.record("node-cordoned", why, node=node.node)
        if state.runs_plain:
            state.restarts += 1
            self.restart_all(why, now)

    def drop(self, workers: tuple[Worker, ...], verdict: Reason, why: str, now: float) -> None:
        """Do without these workers, and replace them if the budget allows."""
        state = self.state
        facts = ExitFacts(code=None, signal=9, message=why, verdict=verdict)
        for worker in workers:
            if state.phase == "forming":
                self.on_exit(worker, facts, now)
        if state.phase == "forming":
            state.begin_forming(f"{', '.join(w.worker for w in workers)}: {why}", now)

    def restart_all(self, why: str, now: float, not_before: float = 0.0) -> None:
        """Plain scripts: every worker starts anew, with the ranks of the nodes that are there."""
        state = self.state
        for worker in list(state.roster.workers.values()):
            state.remove(worker)
        state.generations.take(None)
        state.roster.through.clear()
        state.record("restart-all", why)
        if len(state.roster.staying()) >= state.config.min_nodes:
            self.launch(why, now, not_before)
        else:
            state.phase = "waiting"

    def _world_facts(self, worker: Worker) -> WorldFacts:
        """Where the run stands as this worker ends."""
        state, roster = self.state, self.state.roster
        node, world = roster.nodes[worker.node], self.state.generations.world
        is_member = world is not None and worker.worker in state.generations.members
        here = [w for w in roster.on_node(worker.node) if not w.ended and w is not worker]
        return WorldFacts(
            node=place_of(node),
            slot=worker.spec.slot,
            elastic=roster.elastic,
            generation=world.generation if world is not None and is_member else worker.state.left,
            commits=roster.progress,
            commits_slack=int(roster.pace * NEWS_LAG_S),
            min_nodes=state.config.min_nodes,
            other_nodes=roster.other_usable(worker.node),
            others_here=len(here),
            newcomers=roster.other_usable(worker.node) < state.config.max_nodes > 1,
        )


def place_of(node: Node) -> str:
    """By what a node's budgets go: its address, by which it is known again should it come back as a new node."""
    address = node.join.address
    return node.node if address.startswith("127.") or address in ("localhost", "::1", "") else address
