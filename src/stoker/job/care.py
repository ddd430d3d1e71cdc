"""Looking after nodes and workers: checks before they join, hangs and stragglers while they run. PURE.

It feeds the health cores what is reported, and turns what they find into ends, events and questions to the agents.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from statistics import median

from stoker.errors import EXIT_FAILED
from stoker.job import watch
from stoker.job.events import Tell
from stoker.job.health_check import RESULT_GRACE_S, CheckEffect, NodeCheck, Verdict
from stoker.job.health_hangs import BreakWorld, GiveUp, HangEffect, HangWatch, Hung, Slow, TakeStacks
from stoker.job.health_stragglers import StragglerScores
from stoker.job.roster import Node, Worker
from stoker.job.state import JobState
from stoker.job.workers import Staff
from stoker.wire.exits import ExitFacts, Reason
from stoker.wire.health import CheckGroup, CheckReply, CheckTask, StackReply, StackRequest
from stoker.wire.job import NodeReport

CHECK_TIMEOUT_S = 60.0
CHECK_SHARE = 0.5
"""Share of the user's timeout that a group's check may take: a job without enough nodes ends when that is over."""
ASK_AGAIN_S = 2.0
"""Seconds after which a node that has not replied is told its check again: the task or the reply may have been on a
stream that broke. An agent that is at it goes on, one that has been through it replies again."""
STEPS_KEPT = 32
"""Step times whose median is the usual one."""


@dataclass
class _Asked:
    """What a node under check was told."""

    task: CheckTask
    at: float


class Care:
    """Watches over one job's nodes and workers."""

    def __init__(self, state: JobState, staff: Staff) -> None:
        config = state.config
        self.state = state
        self.staff = staff
        self.hangs = HangWatch(user_timeout_s=config.timeout_s, least_s=config.hang_after_s)
        self.stragglers = StragglerScores()
        limit_s = min(CHECK_TIMEOUT_S + RESULT_GRACE_S, CHECK_SHARE * config.timeout_s)
        grace_s = min(RESULT_GRACE_S, limit_s / 4)
        self.check = NodeCheck(timeout_s=limit_s - grace_s, grace_s=grace_s)
        self._asked: dict[str, _Asked] = {}
        """Nodes whose reply is awaited."""
        self._watched = 0
        """Generation of the world that is watched; 0: none."""
        self._starting: set[str] = set()
        self._steps_s: list[float] = []
        self._counted: tuple[int, float] | None = None
        """Commits and time at which the newest step time was taken."""

    # -- what happens -------------------------------------------------------------------------------------

    def on_report(self, report: NodeReport, now: float) -> None:
        """An agent has said how its workers are."""
        state = self.state
        for said in report.workers:
            worker = state.roster.workers.get(said.worker)
            if worker is None or worker.ended:
                continue
            self._note_start(worker, now)
            if self._watched and worker.worker in state.generations.members:
                live = worker.state
                self.stragglers.observe(worker.worker, live.commits, live.busy_s)
                if live.phase == "finished":
                    self.hangs.finished(worker.worker, now)
                else:
                    self.hangs.observe(worker.worker, live.commits, live.progress, now)
        self._note_step(now)

    def look(self, now: float) -> None:
        """Something has changed: which world is to be watched, who is to be checked?"""
        state = self.state
        generation = state.generations.number if state.phase == "running" else 0
        if generation != self._watched:
            self._watched, self._counted = generation, None
            if generation:
                ranks = {m.worker: m.rank for m in state.generations.members.values()}
                self.hangs.begin_world(ranks, state.roster.highest_commit, now)
                self.stragglers.begin_world(ranks)
            else:
                self.hangs.end_world()
        for name in list(self._starting):
            worker = state.roster.workers.get(name)
            if worker is None or worker.ended:
                self.hangs.gone(name, now)
                self._starting.discard(name)
        if state.config.check_nodes:
            self._begin_checks(now)
            self._ask_again(now)

    def on_tick(self, now: float) -> None:
        """Time has passed."""
        if self.state.phase == "ended":
            return
        usual_s = median(self._steps_s) if self._steps_s else 0.0
        self._on_hang_effects(self.hangs.tick(now, usual_s), now)
        for change in self.stragglers.tick(now):
            worker = self.state.roster.workers.get(change.worker)
            if worker is None:
                continue
            kind = "straggler" if change.slow else "no-straggler"
            self.state.record(kind, change.why, worker=change.worker, node=worker.node)
            if change.slow and self.state.config.exclude_stragglers:
                self._exclude(worker, change.why, now)
        self._on_check_effects(self.check.tick(now), now)

    def on_stacks(self, reply: StackReply, now: float) -> None:
        """The stacks of a worker are here."""
        self._on_hang_effects(self.hangs.on_stacks(reply.look, reply.worker, reply.samples, now), now)

    def on_checked(self, node: str, reply: CheckReply, now: float) -> None:
        """A node's check is over."""
        asked = self._asked.get(node)
        if asked is not None and asked.task.group == reply.group:
            del self._asked[node]
        self._on_check_effects(self.check.result(node, reply.group, reply.result, now), now)

    # -- hangs and stragglers -----------------------------------------------------------------------------

    def _note_start(self, worker: Worker, now: float) -> None:
        if worker.state.phase != "starting" or worker.state.progress:
            if worker.worker in self._starting:
                self._starting.discard(worker.worker)
                self.hangs.ready(worker.worker)
        elif self.state.roster.elastic and worker.worker not in self._starting:
            self._starting.add(worker.worker)
            self.hangs.started(worker.worker, now)

    def _note_step(self, now: float) -> None:
        commits = self.state.roster.highest_commit
        before = self._counted
        if before is None or commits < before[0]:
            self._counted = (commits, now)
        elif commits > before[0]:
            self._steps_s = [*self._steps_s, (now - before[1]) / (commits - before[0])][-STEPS_KEPT:]
            self._counted = (commits, now)

    def _on_hang_effects(self, effects: list[HangEffect], now: float) -> None:
        state = self.state
        for effect in effects:
            match effect:
                case TakeStacks(request, why):
                    state.record("hang-suspected", why)
                    self._ask_stacks(request)
                case Hung(name, why, stacks, world):
                    worker = state.roster.workers.get(name)
                    if worker is not None and not worker.ended:
                        verdict: Reason = "not-ready" if worker.state.phase == "starting" else "hung"
                        shown = f"{stacks}\n\nall ranks:\n{world}" if world else stacks
                        state.record("hang", why, worker=name, node=worker.node, stacks=shown)
                        facts = ExitFacts(code=None, signal=9, message=f"{why}\n{stacks}", verdict=verdict)
                        self.staff.on_exit(worker, facts, now)
                case Slow(name, why):
                    state.record("slow", why, worker=name)
                case BreakWorld(why, stacks):
                    state.record("hang", why, stacks=stacks)
                    state.begin_forming(why, now)
                case GiveUp(why, stacks):
                    state.fail(EXIT_FAILED, f"{why}\n{stacks}")
            state.is_news = True

    def _ask_stacks(self, request: StackRequest) -> None:
        by_node: dict[str, list[str]] = {}
        for name in request.workers:
            worker = self.state.roster.workers.get(name)
            if worker is not None:
                by_node.setdefault(worker.node, []).append(name)
        for node, names in by_node.items():
            wanted = StackRequest(request.look, tuple(names), request.samples, request.interval_s)
            self.state.effects.append(Tell(node, wanted))

    def _exclude(self, worker: Worker, why: str, now: float) -> None:
        """Do without a slow node while the others hold the minimum."""
        state = self.state
        node = state.roster.nodes.get(worker.node)
        others = [n for n in state.roster.staying() if n.node != worker.node]
        mine = {w.worker for w in state.roster.on_node(worker.node)}
        if node is None or node.going or len(others) < state.config.min_nodes:
            return
        if watch.would_survive(state.generations, state.roster, mine):
            self.staff.cordon(node, why, now, lasting_s=state.config.relaunch.cordon_s)

    # -- node checks --------------------------------------------------------------------------------------

    def on_stood_still(self, now: float) -> None:
        """The master was stopped: that nothing was heard says nothing about the workers."""
        self.hangs.stood_still(now)

    def being_checked(self) -> int:
        """How many nodes are here that may run workers once their check is passed."""
        nodes = self.state.roster.nodes.values()
        return sum(n.heard and n.check != "passed" and not n.going for n in nodes)

    def _begin_checks(self, now: float) -> None:
        """Check who is new, and who comes back from a cordon."""
        nodes = self.state.roster.nodes
        for node in nodes.values():
            if node.cordoned and node.check == "passed" and not self.state.roster.on_node(node.node):
                node.check = "wanted"
                self.state.touched.add(node.node)
        for name in self.check.checking:
            if name not in nodes:
                self._on_check_effects(self.check.gone(name, now), now)
        wanted = [n for n in nodes.values() if n.check == "wanted" and n.spare_port and not n.cordoned]
        if not wanted:
            return
        for node in wanted:
            node.check = "under way"
        names = [n.node for n in sorted(wanted, key=lambda n: n.age)]
        self.state.record("node-check", f"checking {', '.join(names)} before they join")
        self._on_check_effects(self.check.begin(names, now), now)

    def _ask_again(self, now: float) -> None:
        """Repeat what may have got lost, at once when a node is back."""
        for name, asked in list(self._asked.items()):
            node = self.state.roster.nodes.get(name)
            if node is None:
                del self._asked[name]
            elif node.cut_since is not None:
                self.check.disturb(name)
                asked.at = -inf
            elif now - asked.at >= ASK_AGAIN_S:
                asked.at = now
                self.state.effects.append(Tell(name, asked.task))

    def _on_check_effects(self, effects: list[CheckEffect], now: float) -> None:
        state = self.state
        for effect in effects:
            if isinstance(effect, CheckGroup):
                self._tell_group(effect, now)
                continue
            self._asked.pop(effect.node, None)
            node = state.roster.nodes.get(effect.node)
            if node is not None:
                self._on_verdict(node, effect, now)
            state.is_news = True

    def _tell_group(self, group: CheckGroup, now: float) -> None:
        nodes = [self.state.roster.nodes[name] for name in group.nodes if name in self.state.roster.nodes]
        if len(nodes) != len(group.nodes):
            return  # the check learns of it in a moment
        store = f"{nodes[0].join.address}:{nodes[0].spare_port}"
        for rank, node in enumerate(nodes):
            task = CheckTask(group.group, rank, len(nodes), store, self.check.timeout_s)
            self._asked[node.node] = _Asked(task, now)
            self.state.effects.append(Tell(node.node, task))

    def _on_verdict(self, node: Node, verdict: Verdict, now: float) -> None:
        state = self.state
        node.check = "passed"
        state.touched.add(node.node)
        excluded = verdict.kind == "straggler" and state.config.exclude_stragglers
        others = sum(n is not node and n.heard and not n.going for n in state.roster.nodes.values())
        kept = ""
        if excluded and others < state.config.min_nodes:
            excluded, kept = False, "; it is kept, for the others are too few without it"
        state.record("node-checked", verdict.why + kept, node=node.node, verdict=verdict.kind)
        if verdict.kind == "faulty" or excluded:
            why = f"the node check says: {verdict.why}"
            self.staff.cordon(node, why, now, lasting_s=state.config.relaunch.cordon_s)
