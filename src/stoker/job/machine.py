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

`apply` takes in an event and costs the same whatever the size of the job; `decide` looks at all of it, once for as
many events as have come together. What a master must remember to be lost goes out as `Keep` effects, which come
before the directives that rest on them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stoker.base.rng import Rng
from stoker.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_WORLD, EXIT_OK
from stoker.job import watch
from stoker.job.care import Care
from stoker.job.events import (
    Effect,
    Event,
    NodeAsked,
    NodeBeat,
    NodeChecked,
    NodeCut,
    NodeJoined,
    NodeLost,
    NodeReported,
    ScaleRequested,
    Send,
    StacksTaken,
    StopRequested,
    Tick,
)
from stoker.job.generations import UNEXPLAINED_LIMIT
from stoker.job.growth import Growth
from stoker.job.nodes import Presence
from stoker.job.roster import Roster
from stoker.job.state import JobConfig, JobState
from stoker.job.workers import Staff
from stoker.wire.job import Outcome, World

__all__ = ["JobConfig", "JobMachine"]

UNREACHED_S = 60.0
"""How long a node that the others seem not to reach runs no workers at first."""
TELL_AFTER_S = 1.0
"""Seconds of waiting for nodes after which people are told."""


class JobMachine:
    """Decides who is in the world. Pure: all time comes in as `now`."""

    def __init__(self, config: JobConfig, state: JobState | None = None, rng: Rng | None = None) -> None:
        self.config = config
        self.state = state if state is not None else JobState(config, target_nodes=config.max_nodes)
        self._staff = Staff(self.state, rng if rng is not None else Rng(0))
        self._presence = Presence(self.state, self._staff)
        self.care = Care(self.state, self._staff)
        self.growth = Growth(self.state)
        self._short_since: float | None = None
        self._enough_since: float | None = None
        self._told: tuple[object, ...] = ()
        """What every node's directive rested on when all were last looked at."""

    @classmethod
    def restore(
        cls,
        config: JobConfig,
        records: Mapping[str, bytes],
        now: float,
        *,
        rng: Rng | None = None,
        epoch: int = 0,
    ) -> JobMachine:
        """Go on where the master before was lost. Raises WireError for records that cannot be read."""
        state = JobState.restore(config, records, now)
        state.epoch = epoch
        return cls(config, state, rng)

    def step(self, event: Event, now: float) -> list[Effect]:
        """Feed one event and decide; returns what is to be done, in order."""
        self.apply(event, now)
        return self.decide(now)

    def apply(self, event: Event, now: float) -> None:
        """Take in one event; what is to be done about it `decide` says."""
        match event:
            case NodeBeat(beat):
                self._presence.on_beat(beat, now)
                return
            case NodeReported(report):
                self._presence.on_report(report, now)
                self.care.on_report(report, now)
                self.growth.on_progress(now)
                return
            case NodeJoined(join):
                self._presence.on_joined(join, now)
            case NodeLost(node, why):
                self._presence.on_lost(node, why, now)
            case NodeCut(node, why):
                self._presence.on_cut(node, why, now)
            case NodeAsked(node, why):
                self._presence.on_asked(node, why)
            case ScaleRequested(nodes, why):
                self._on_scale(nodes, why)
            case StopRequested(why, exit_code):
                self.state.fail(exit_code, why)
            case StacksTaken(reply):
                self.care.on_stacks(reply, now)
            case NodeChecked(node, reply):
                self.care.on_checked(node, reply, now)
            case Tick(was_stopped):
                if was_stopped:
                    self._presence.on_stood_still(now)
                    self.care.on_stood_still(now)
                    self._short_since = now if self._short_since is not None else None
                self._presence.on_tick(now)
                self._staff.on_tick(now)
                self.care.on_tick(now)
                self.growth.on_tick(now)
                self.state.is_news = True
                if self.phase != "waiting" and self._short_since is None:
                    return
        self.state.is_news = self.state.is_roster_news = True

    def decide(self, now: float) -> list[Effect]:
        """What follows from all that was taken in; returns what is to be done, in order."""
        state = self.state
        state.roster.note_nodes()
        if state.is_news:
            self._advance(now)
            state.is_news = False
        self._send_directives(now)
        keeps = state.changed_records()
        effects, state.effects = state.effects, []
        return [*keeps, *effects]

    @property
    def needs_decision(self) -> bool:
        """Whether `decide` might have something to do."""
        state = self.state
        return state.is_news or bool(state.touched) or bool(state.retold) or bool(state.effects)

    def note_work(self, done: int, now: float) -> None:
        """So many pieces of work are done besides steps: that is progress too."""
        if done != self.state.roster.work_done:
            self.state.roster.work_done = done
            self.state.budgets.note_commits(self.state.roster.progress, now)

    # -- what is known ------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return self.state.phase

    @property
    def roster(self) -> Roster:
        return self.state.roster

    @property
    def generation(self) -> int:
        return self.state.generations.number

    @property
    def world(self) -> World | None:
        """The newest world; while `forming`, the one that is being left."""
        return self.state.generations.world

    @property
    def outcome(self) -> Outcome | None:
        return self.state.outcome

    @property
    def restarts_used(self) -> int:
        """Restarts on the job's budget that are not forgiven yet."""
        return self.state.budgets.used("job")

    # -- progress -----------------------------------------------------------------------------------------

    def _on_scale(self, nodes: int, why: str) -> None:
        state = self.state
        if nodes != state.target_nodes and self.config.min_nodes <= nodes <= self.config.max_nodes:
            state.record("scale", f"{state.target_nodes} -> {nodes} nodes: {why}")
            state.target_nodes = nodes

    def _advance(self, now: float) -> None:
        state = self.state
        if state.phase == "ended":
            return
        if (state.is_roster_news or state.touched) and self._review(now):
            return
        self.care.look(now)
        if state.phase == "running":
            regroup = watch.regroup_reason(
                state.generations, state.roster, now, state.limits, self.config.last_call_s
            )
            if regroup is not None:
                state.begin_forming(regroup.why, now, regroup.stop_at_commit)
                state.generations.is_unexplained = regroup.is_unexplained
                self._suspect_youngest(now)
        if state.phase == "forming":
            self._try_form(now)
        state.is_roster_news = bool(state.touched)

    def _review(self, now: float) -> bool:
        """Look at all nodes: who is to run workers, are there enough of them? Returns whether all have finished."""
        state = self.state
        self._choose_active(now)
        if state.phase in ("forming", "running"):
            self._staff.fill(now)
            if watch.is_complete(state.generations, state.roster):
                state.end(Outcome(success=True, exit_code=EXIT_OK, why="every worker finished"))
                return True
        self._check_minimum(now)
        if state.phase == "waiting":
            self._wait_for_nodes(now)
        return False

    def _choose_active(self, now: float) -> None:
        """Who runs workers and who stands by."""
        state, roster = self.state, self.state.roster
        unit = 1 if roster.elastic else self.config.node_unit
        changed = roster.choose_active(target=state.target_nodes, plain_unit=unit)
        roster.note_nodes()
        must_restart = state.runs_plain and any(n.standby and roster.on_node(n.node) for n in changed)
        for node in changed:
            state.touched.add(node.node)
            why = node.standby or "there is room for it"
            state.record("node-standby" if node.standby else "node-active", why, node=node.node)
        self._release_going()
        if must_restart:
            self._staff.restart_all("the number of nodes has changed", now)

    def _release_going(self) -> None:
        """Workers of a node that stands by, is cordoned or leaves end as soon as they have left the world."""
        for node in self.state.roster.nodes.values():
            if node.going and not self.state.generations.members_on(node.node):
                for worker in self.state.roster.on_node(node.node):
                    self.state.remove(worker)

    def _wait_for_nodes(self, now: float) -> None:
        state = self.state
        here = len(state.roster.staying())
        if here < self.config.min_nodes:
            self._enough_since = None
            return
        if self._enough_since is None:
            self._enough_since = now
        if here >= state.target_nodes or now - self._enough_since >= self.config.last_call_s:
            why = f"{here} of {self.config.min_nodes}:{self.config.max_nodes} nodes are here"
            self._staff.launch(why, now)

    def _try_form(self, now: float) -> None:
        """Fix the world once everybody who must has acknowledged the generation."""
        state = self.state
        verdict = state.generations.judge(state.roster, now, state.limits)
        match verdict.step:
            case "again":
                state.begin_forming(verdict.why, now)
            case "drop":
                self._staff.drop(verdict.workers, "hung", verdict.why, now)
            case "empty" if self._is_hopeless():
                state.fail(EXIT_FAILED, f"{verdict.why}, and none is to be started again")
            case "roll-back":
                state.record("rollback", f"{verdict.why}: starting again from the last checkpoint")
                self._staff.drop(verdict.workers, "evicted", verdict.why, now)
            case "fruitless":
                count = state.generations.fruitless + 1
                why = f"{count} worlds in a row broke before their first step {verdict.why}"
                state.fail(
                    EXIT_NO_WORLD, f"{why}. Can the nodes reach each other's addresses (--local-addr)?"
                )
            case "run":
                assert verdict.world is not None
                self._run(verdict.world, now)

    def _suspect_youngest(self, now: float) -> None:
        """World after world breaks and nobody dies: some nodes may not reach each other. Try without the youngest."""
        state = self.state
        generations, roster = state.generations, state.roster
        if not generations.is_unexplained or roster.progress > generations.last_start:
            return
        names = {m.node for m in generations.members.values()}
        nodes = sorted((roster.nodes[name] for name in names if name in roster.nodes), key=lambda n: n.age)
        enough = len(nodes) - self.config.node_unit >= self.config.min_nodes
        if generations.unexplained + 1 < UNEXPLAINED_LIMIT or not enough:
            return
        generations.unexplained = 0
        why = (
            f"{UNEXPLAINED_LIMIT} worlds in a row broke before their first step though every worker lives: trying "
            "without the youngest node, which the others may not reach"
        )
        self._staff.cordon(nodes[-1], why, now, lasting_s=UNREACHED_S)

    def _is_hopeless(self) -> bool:
        """No worker is left and none will be, though nodes enough are here: they are used up."""
        roster = self.state.roster
        fresh = [n for n in roster.usable() if not roster.on_node(n.node)]
        return bool(roster.workers) and len(roster.staying()) >= self.config.min_nodes and not fresh

    def _run(self, world: World, now: float) -> None:
        state = self.state
        lost = max(0, state.roster.highest_commit - world.commits)
        state.roster.highest_commit = world.commits
        state.generations.settle(world, state.roster.progress, now)
        state.phase = "running"
        self._release_going()
        cost = f"; {lost} commits are lost" if lost else ""
        if lost and not world.commits:
            cost += ", for there is no checkpoint (see --checkpoint-dir)"
        state.record(
            "world",
            f"{world.size} workers go on from commit {world.commits} of rank {world.source}{cost}",
            workers=[m.worker for m in world.members],
            commits=world.commits,
            commits_lost=lost,
        )

    def _check_minimum(self, now: float) -> None:
        state = self.state
        have = len({n.node for n in state.roster.usable()} | state.roster.through_nodes())
        need = self.config.min_nodes
        leaving = [n.leaving for n in state.roster.nodes.values()]
        may_others_come = self.config.outlives_nodes and not any("SIGINT" in why for why in leaving)
        if leaving and all(leaving) and not may_others_come:
            state.fail(EXIT_INTERRUPTED, f"every node leaves: {leaving[0]}")
            return
        if have >= need:
            self._short_since, state.note = None, ""
            return
        checked = self.care.being_checked()
        if have + checked >= need:  # every check ends
            self._short_since, state.note = None, f"{checked} nodes are being checked before they join"
            return
        timeout_s = self.config.timeout_s
        if self._short_since is None:
            self._short_since = now
            state.record("waiting", f"{have} of at least {need} nodes are here")
        if now - self._short_since > TELL_AFTER_S:
            ends = f"giving up after {timeout_s:.0f} s"
            state.note = f"waiting for nodes: {have} of at least {need} are here; {ends}"
        if now - self._short_since > timeout_s:
            why = (
                f"only {have} of at least {need} nodes with workers for {timeout_s:.0f} s: start the missing ones, "
                "lower the minimum (--nnodes MIN:MAX) or raise --timeout"
            )
            state.fail(EXIT_NO_WORLD, why)

    # -- directives ---------------------------------------------------------------------------------------

    def _send_directives(self, now: float) -> None:
        """Tell the nodes whose directive may have changed: all of them if it is about the world."""
        state, roster = self.state, self.state.roster
        is_fixed = state.phase != "forming"
        told = (
            state.generations.number,
            state.generations.stop_at_commit,
            state.generations.world if is_fixed else None,
            state.outcome,
            state.note,
            watch.saving_node(state.generations, roster),
        )
        same = len(told) == len(self._told) and all(
            a is b or a == b for a, b in zip(told, self._told, strict=True)
        )
        self._told = told
        some = sorted(name for name in state.touched | state.retold if name in roster.nodes)
        state.retold.clear()
        for name in some if same else list(roster.nodes):
            node = roster.nodes[name]
            wanted = watch.directive_for(
                node,
                roster,
                state.generations,
                now=now,
                is_fixed=is_fixed,
                outcome=state.outcome,
                note=state.note,
                epoch=state.epoch,
            )
            if node.sent != wanted:
                node.sent, node.sent_at = wanted, now
                state.effects.append(Send(name, msgspec.structs.replace(wanted, seq=node.next_seq)))
                node.next_seq += 1
