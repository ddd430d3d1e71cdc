"""A seeded world of one job: the shipping master, agents and worker membership over a bad network.

Only processes, sockets and gradients are made up. Decisions are made by `JobMachine`, `NodeCore` and
`MemberCore`, who reads what by `GlobalOrder` and `share_of`, and the verdict by `audit`. The master may be killed: the
next one knows what the journal kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from stoker.data.audit import Committed, Entry, audit
from stoker.data.order import GlobalOrder
from stoker.job.events import Effect, End, Event, Keep, NodeCut, NodeLost, Record, Refuse, Send, Tell, Tick
from stoker.job.machine import JobConfig, JobMachine
from stoker.job.relaunch import RelaunchConfig
from stoker.wire.exits import ExitFacts
from stoker.wire.health import CheckResult, CheckTask
from stoker.wire.job import Directive, Outcome, World
from tests.sim.job_actors import (
    BEAT_S,
    BEAT_TIMEOUT_S,
    USER_TIMEOUT_S,
    Group,
    Position,
    SimNode,
    SimWorker,
)
from tests.sim.job_faults import Faults
from tests.sim.job_invariants import Invariants
from tests.sim.loop import Loop

LIMIT_S = 600.0


class JobWorld:
    """One seeded story."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.seed = seed
        self.loop = Loop(seed)
        self.rng = rng = self.loop.rng
        self.log: list[str] = []
        self.records = 1 + rng.below(40)
        self.batch = 1 + rng.below(9)
        self.epochs = 1 + rng.below(3)
        if rng.chance(0.1):
            self.records, self.batch, self.epochs = 60, 1, 3  # long enough for all the faults to strike
        nodes = 1 + rng.below(4)
        slots = 1 + rng.below(3)
        unit = rng.choice((1, 1, 1, 2)) if nodes > 1 else 1
        min_nodes = max(unit, (1 + rng.below(nodes)) // unit * unit)
        max_nodes = nodes + rng.below(2)
        check = rng.chance(0.15)
        self.loss = rng.uniform(0, 0.2) if rng.chance(0.6) else 0.0
        self.config = JobConfig(
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            node_unit=unit,
            check_nodes=check,
            auto_scale=rng.choice(("off", "off", "off", "apply")),
            hang_after_s=rng.uniform(4.0, 15.0),
            relaunch=RelaunchConfig(
                max_restarts=rng.below(5),
                relaunch_errors=rng.chance(0.2),
                cordon_s=rng.choice((None, 5.0)),
                memory_bytes=rng.choice((0, 1 << 30)),
                memory_max_bytes=4 << 30,
            ),
            exclude_stragglers=rng.chance(0.3),
            timeout_s=USER_TIMEOUT_S,
            beat_timeout_s=BEAT_TIMEOUT_S,
            park_s=USER_TIMEOUT_S,
            last_call_s=1.0,
        )
        if not faults:
            self.loss = 0.0
            self.config = replace(
                self.config,
                min_nodes=nodes,
                max_nodes=nodes,
                node_unit=1,
                check_nodes=False,
                auto_scale="off",
                exclude_stragglers=False,
            )
        self.machine: JobMachine | None = JobMachine(self.config)
        self.journal: dict[str, bytes] = {}
        self.invariants = Invariants(self)
        self.is_named_twice = False
        """Nobody is left who knew of a world, and another one has its number: by that, reads cannot be told apart."""
        self.has_forgotten = self.was_cut = False
        """A master has died with decisions that were not kept; a node was out of reach for a while."""
        self.master_losses = 0
        self.unkept: dict[str, bytes | None] = {}
        """Records that are still to be written."""
        self.is_journal_full = False
        self.is_master_stopped = self.ticked_late = self.was_stopped = False
        self.unread: list[Event] = []
        """What the kernel holds for a master that is stopped."""
        self.streams: dict[int, str] = {}
        self.stream_count = 0
        self.newest_step = 0
        self.deaf: dict[frozenset[str], float] = {}
        """Pairs of nodes that cannot hear each other, and until when."""
        self.broken = (
            {name for name in (f"node-{n}" for n in range(1, 9)) if rng.chance(0.2)} if check else set()
        )
        """Nodes with a fault that the node check finds."""
        self.checks: dict[int, set[str]] = {}
        self.checkpoint_every = 1 + rng.below(6)
        self.checkpoint = Position()
        self.entries: list[Entry] = []
        self.nodes: list[SimNode] = []
        self.by_name: dict[str, SimNode] = {}
        self.groups: dict[int, Group] = {}
        self.worlds: dict[int, World] = {}
        self.history: dict[tuple[int, int], Position] = {}
        self.sealed = {Position()}
        self.entry_state: dict[int, Position] = {}
        self.outcome: Outcome | None = None
        self._orders: dict[int, list[int]] = {}
        self.node_count = 0
        for _ in range(nodes):
            self.add_node(slots, rng.uniform(0.0, 3.0))
        if self.config.max_nodes > nodes:
            self.add_node(slots, rng.uniform(2.0, 15.0))
        self.is_state_large = faults and rng.chance(0.1)
        """It takes a while to copy it to newcomers."""
        if faults:
            Faults(self).plan(rng.below(6), 25.0)
        self.tick()

    # -- nodes --------------------------------------------------------------------------------------------

    def living(self) -> list[SimWorker]:
        return [w for n in self.nodes if n.alive for w in n.processes.values() if w.alive]

    def replace_node(self, node: SimNode) -> None:
        self.add_node(node.slots, self.rng.uniform(0.5, 10.0))

    def on_left(self, node: SimNode) -> None:
        stream = node.stream
        self.loop.after(
            self.rng.uniform(0.001, 0.05), lambda: self.from_stream(stream, NodeLost(node.name, "it left"))
        )
        if self.rng.chance(0.7):
            self.replace_node(node)

    def add_node(self, slots: int, delay_s: float) -> None:
        self.node_count += 1
        name = f"node-{self.node_count}"

        def come() -> None:
            if self.outcome is None:
                node = SimNode(self, name, slots)
                self.nodes.append(node)
                self.by_name[name] = node
                node.connect()
                node.beat()

        self.loop.after(delay_s, come)

    # -- network ------------------------------------------------------------------------------------------

    def accept(self, node: SimNode) -> int:
        """A new stream's number; 0 while there is no master."""
        if self.machine is None or self.is_master_stopped:
            return 0
        self.stream_count += 1
        self.streams[self.stream_count] = node.name
        return self.stream_count

    def break_stream(self, node: SimNode) -> None:
        """The connection is reset: both sides see it."""
        stream, name = node.stream, node.name
        self.loop.after(self.rng.uniform(0.0, 0.05), lambda: self.from_stream(stream, NodeCut(name, "reset")))
        self.loop.after(self.rng.uniform(0.0, 0.05), lambda: node.on_broken(stream))

    def from_stream(self, stream: int, event: NodeLost | NodeCut) -> None:
        """The end of a stream, which counts unless its node has another one by now."""
        if self.streams.pop(stream, None) is not None and event.node not in self.streams.values():
            self.feed(event)

    def to_master(self, node: SimNode, event: Event, *, reliable: bool = False) -> None:
        stream = node.stream

        def arrive() -> None:
            if stream in self.streams:
                self.feed(event)

        if not reliable:
            if node.is_cut or (self.loss and self.rng.chance(self.loss)):
                return
            if self.loss and self.rng.chance(0.05):
                self.loop.after(self.rng.uniform(0.001, 3.0), arrive)
        self.loop.after(0.0001 if reliable else self.rng.uniform(0.0005, 0.02), arrive)

    def to_node(self, name: str, directive: Directive) -> None:
        node = self.by_name.get(name)
        if node is None or node.is_cut or (self.loss and self.rng.chance(self.loss)):
            return
        stream = node.stream
        if stream not in self.streams:  # it holds one to a master that has died, and does not know yet
            return

        def arrive() -> None:
            if node.stream == stream:
                node.on_directive(directive)

        if self.loss and self.rng.chance(0.1):
            self.loop.after(self.rng.uniform(0.001, 3.0), arrive)
        self.loop.after(self.rng.uniform(0.0005, 0.02), arrive)

    # -- the master's shell -------------------------------------------------------------------------------

    def tell_node(self, told: Tell) -> None:
        node = self.by_name.get(told.node)
        if node is None or node.is_cut or node.stream not in self.streams:
            return
        stream, message = node.stream, told.message
        self.loop.after(
            self.rng.uniform(0.0005, 0.02), lambda: node.on_told(message) if node.stream == stream else None
        )

    def check_result(self, node: SimNode, task: CheckTask) -> CheckResult:
        """A broken node fails its check and takes its partners' down; the group's nodes share one store."""
        self.checks.setdefault(task.group, set()).add(node.name)
        if node.name in self.broken:
            return CheckResult(ok=False, why="wrong product", stage="matmul")
        if any(name in self.broken for name in self.checks[task.group]):
            return CheckResult(ok=False, why="the peer hung up", stage="allreduce")
        return CheckResult(ok=True, matmul_s=0.01, allreduce_s=0.01, elapsed_s=1.0)

    def are_deaf(self, world: World) -> bool:
        """Whether two nodes of a world cannot hear each other now."""
        nodes = {m.node for m in world.members}
        return any(pair <= nodes and until > self.loop.now for pair, until in self.deaf.items())

    def break_groups(self, pair: frozenset[str]) -> None:
        for group in self.groups.values():
            if pair <= {m.node for m in group.world.members}:
                self.fail_waiting(group)

    def fail_waiting(self, group: Group) -> None:
        for waiting in group.arrived.values():
            for callback in waiting.values():
                self.loop.after(self.rng.uniform(0.01, 0.1), lambda cb=callback: cb(False))  # type: ignore[misc]
        group.arrived.clear()

    def lose_master(self) -> None:
        """SIGKILL of the master; another one starts from the journal a little later.

        Not of one that cannot keep that the job is over: whoever has heard of that is gone, and takes nothing up again.
        """
        if self.machine is None or (self.is_journal_full and self.outcome is not None):
            return
        away_s = self.rng.uniform(0.05, 8.0)
        self.master_losses += 1
        self.has_forgotten = self.has_forgotten or bool(self.unkept)
        self.note(f"the master is killed, back after {away_s:.1f} s")
        self.machine = None
        self.unkept.clear()
        self.is_master_stopped, self.unread = False, []
        self.streams.clear()
        for node in self.nodes:
            if node.is_up and node.stream and not node.is_cut:
                stream = node.stream
                self.loop.after(self.rng.uniform(0.001, 0.1), lambda n=node, s=stream: n.on_broken(s))  # type: ignore[misc]

        def restart() -> None:
            self.machine = JobMachine.restore(self.config, dict(self.journal), self.loop.now)
            self.perform(self.machine.decide(self.loop.now))

        self.loop.after(away_s, restart)

    def stop_master(self) -> None:
        """SIGSTOP of the master, and SIGCONT a while later, perhaps when every node has hung up on it."""
        if self.machine is None or self.is_master_stopped:
            return
        self.is_master_stopped, self.ticked_late = True, True
        self.master_losses += 1
        away_s = self.rng.uniform(0.5, 5 * BEAT_TIMEOUT_S)
        self.note(f"the master is stopped for {away_s:.1f} s")

        def go_on() -> None:
            self.is_master_stopped = False
            unread, self.unread = self.unread, []
            for event in unread:
                self.feed(event)

        self.loop.after(away_s, go_on)

    def tick(self) -> None:
        """As the master's shell does: the first tick after it was stopped is left out."""
        if self.machine is not None and not self.is_master_stopped:
            is_first, self.ticked_late = self.ticked_late, False
            if not is_first:
                self.feed(Tick(was_stopped=self.was_stopped))
            self.was_stopped = is_first
        self.loop.after(BEAT_S, self.tick)

    def feed(self, event: Event) -> None:
        if self.machine is not None and self.is_master_stopped:
            self.unread.append(event)
        elif self.machine is not None:
            self.perform(self.machine.step(event, self.loop.now))

    def perform(self, effects: list[Effect]) -> None:
        assert self.machine is not None
        self.invariants.check(effects)
        for effect in effects:
            if isinstance(effect, Keep):
                self.unkept[effect.key] = (
                    None if effect.record is None else msgspec.msgpack.encode(effect.record)
                )
            elif isinstance(effect, Send):
                if effect.directive.world is not None:
                    world = self.machine.world
                    assert world is not None
                    known = self.worlds.setdefault(world.generation, world)
                    if known != world:  # the journal has lost a whole job
                        living = names_of(known) & {w.name for w in self.living()} - names_of(world)
                        lets_pass = self.has_forgotten and self.was_cut  # nobody can know what it has decided
                        self.check(not living or lets_pass, f"two worlds in generation {world.generation}")
                        self.worlds[world.generation] = world
                        self.is_named_twice = True
                        self.groups.pop(world.generation, None)
                self.to_node(effect.node, effect.directive)
            elif isinstance(effect, Tell):
                self.tell_node(effect)
            elif isinstance(effect, End):
                self.check(self.outcome in (None, effect.outcome), "the job ended twice")
                self.outcome = effect.outcome
            elif isinstance(effect, Record):
                self.note(f"{effect.kind}: {effect.why} {effect.details}")
            elif isinstance(effect, Refuse):
                node = self.by_name.get(effect.node)
                if node is not None:
                    self.loop.after(self.rng.uniform(0.001, 0.02), node.on_refused)
        self.keep()
        for stream, name in list(self.streams.items()):
            if name not in self.machine.roster.nodes:
                del self.streams[stream]
                node = self.by_name[name]
                if not node.is_cut:
                    self.loop.after(self.rng.uniform(0.001, 0.05), lambda n=node, s=stream: n.on_broken(s))  # type: ignore[misc]

    def keep(self) -> None:
        """Write down what is to be kept; what cannot be written waits, and is lost with the master."""
        if self.is_journal_full:
            return
        for key, record in self.unkept.items():
            if record is None:
                self.journal.pop(key, None)
            else:
                self.journal[key] = record
        self.unkept.clear()

    def fill_journal(self) -> None:
        """The disk of the master's host is full for a while."""
        self.note("the journal cannot be written")
        self.is_journal_full = True

        def free() -> None:
            self.is_journal_full = False
            self.keep()

        self.loop.after(self.rng.uniform(1.0, 12.0), free)

    # -- processes and groups -------------------------------------------------------------------------

    def exit_worker(self, worker: SimWorker, ended: ExitFacts) -> None:
        if not worker.alive:
            return
        worker.alive = False
        if worker.group is not None:
            self.leave_group(worker, worker.group)
        self.loop.after(self.rng.uniform(0.0001, 0.005), lambda: worker.node.on_exit(worker, ended))

    def enter_group(self, worker: SimWorker, generation: int) -> Group:
        world = self.worlds[generation]
        group = self.groups.get(world.generation)
        if group is None:
            names = {m.worker for m in world.members}
            group = self.groups[world.generation] = Group(world, alive=names)
        self.check(group.world == world, f"two groups in generation {world.generation}")
        self.check(
            worker.name not in group.entered, f"{worker.name} entered generation {world.generation} twice"
        )
        group.entered.add(worker.name)
        if world.members[world.source].worker == worker.name:
            self.check(worker.core.clean, f"the source {worker.name} does not stand at a commit")
            self.check(
                worker.position in self.sealed, f"the source {worker.name} has a state nobody committed"
            )
            self.entry_state[world.generation] = worker.position
        for name in sorted(names_of(world)):
            other = self.find(world, name)
            if other is None or not other.alive:
                group.alive.discard(name)
        return group

    def find(self, world: World, name: str) -> SimWorker | None:
        """A member's process. Names alone do not tell: a master that has lost its journal gives them again."""
        node = next((member.node for member in world.members if member.worker == name), "")
        return self.by_name[node].processes.get(name) if node in self.by_name else None

    def state_at_entry(self, world: World) -> Position:
        return self.entry_state[world.generation]

    def arrive(self, group: Group, step: int, worker: SimWorker, done: Callable[[bool], None]) -> None:
        if len(group.alive) < len(group.world.members) or self.are_deaf(group.world):
            self.loop.after(self.rng.uniform(0.01, 0.1), lambda: done(False))
            return
        waiting = group.arrived.setdefault(step, {})
        waiting[worker.name] = done
        if len(waiting) == len(group.world.members):
            positions = {self.find(group.world, n).position for n in waiting} if step > 0 else set()  # type: ignore[union-attr]
            self.check(
                len(positions) <= 1, f"step {step} of generation {group.world.generation}: states differ"
            )
            if step == 0 and self.is_state_large:
                self.copy_slowly(group, waiting)
            else:
                self.complete(group, step, waiting)

    def copy_slowly(self, group: Group, waiting: dict[str, Callable[[bool], None]]) -> None:
        """A large state is on its way, and may fill the link of the node that sends it."""
        takes_s = self.rng.uniform(0.0, 20.0)
        source = self.by_name[group.world.members[group.world.source].node]
        if self.rng.chance(0.5):
            self.was_cut = True
            source.cut_until = max(source.cut_until, self.loop.now + takes_s)
            self.note(f"{source.name} sends the state, and nothing else until {source.cut_until:.1f}")
        self.loop.after(takes_s, lambda: self.complete(group, 0, waiting))

    def complete(self, group: Group, step: int, waiting: dict[str, Callable[[bool], None]]) -> None:
        """All are there, unless one has gone meanwhile."""
        if group.arrived.get(step) is not waiting:
            return
        del group.arrived[step]
        if step > 0:
            self.on_complete(group, step)
        for callback in waiting.values():
            self.loop.after(self.rng.uniform(0.0, 0.05), lambda cb=callback: cb(True))  # type: ignore[misc]

    def on_complete(self, group: Group, step: int) -> None:
        """Every member has brought its gradients. One that is stopped then may commit long after the others are in a
        newer world, which nobody can keep it from; no step is begun there any more."""
        generation = group.world.generation
        self.newest_step = max(self.newest_step, generation)
        self.check(
            generation == self.newest_step or (self.has_forgotten and self.was_cut),
            f"a step of generation {generation} is complete while {self.newest_step} trains",
        )
        group.complete.add(step)

    def leave_group(self, worker: SimWorker, group: Group) -> None:
        group.alive.discard(worker.name)
        self.fail_waiting(group)

    def on_commit(self, worker: SimWorker, generation: int, rank: int) -> None:
        position = worker.position
        known = self.history.setdefault((generation, position.commits), position)
        self.check(
            known == position, f"commit {position.commits} of generation {generation} is not one state"
        )
        self.check(
            position.commits in self.groups[generation].complete or self.is_named_twice,
            f"{worker.name} commits {position.commits} in generation {generation}, which the others had no part in",
        )
        self.entries.append(
            Committed(generation=generation, step=position.commits, rank=rank, wall_s=self.loop.now)
        )
        if rank == 0 and position.commits % self.checkpoint_every == 0:
            self.checkpoint = position

    # -- the verdict --------------------------------------------------------------------------------------

    def order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = GlobalOrder(self.records, seed=7, epoch=epoch)
            self._orders[epoch] = order.at(0, self.records).tolist()
        return self._orders[epoch]

    def note(self, text: str) -> None:
        self.log.append(f"{self.loop.now:8.3f} {text}")

    def check(self, ok: bool, what: str) -> None:
        if not ok:
            raise AssertionError("\n".join([*self.log[-60:], f"{self.loop.now:8.3f} VIOLATED: {what}"]))

    def is_able(self, node: SimNode) -> bool:
        """Whether a node is there and nothing is known against it."""
        known = self.machine.roster.nodes.get(node.name) if self.machine is not None else None
        if known is None or not known.heard or known.going or self.machine.roster.is_used_up(known):  # type: ignore[union-attr]
            return False
        return node.is_up and bool(node.stream) and not node.is_cut and node.name not in self.broken

    def run(self) -> str:
        self.loop.run(LIMIT_S, lambda: self.outcome is not None)
        self.check(self.outcome is not None, f"the run neither ended nor said why within {LIMIT_S:.0f} s")
        assert self.outcome is not None
        self.check(bool(self.outcome.why), "the run ended without a reason")
        if "nodes with workers" in self.outcome.why:
            able = [n.name for n in self.nodes if self.is_able(n)]
            self.check(
                len(able) < self.config.min_nodes, f"it gives up for want of nodes, and {able} are there"
            )
        if self.outcome.success:
            report = audit(self.entries, {"d": self.records}, self.epochs)
            self.check(report.missed == 0 or self.is_named_twice, f"{report.missed} records were never read")
            self.check(
                report.repeated == 0 or self.is_named_twice, f"{report.repeated} records were read twice"
            )
        self.loop.run(self.loop.now + 60.0, lambda: not self.reachable())
        self.check(not self.reachable(), f"workers outlive the job: {[w.name for w in self.reachable()]}")
        verdict = "done" if self.outcome.success else f"ended: {self.outcome.why}"
        return f"{verdict} after {self.loop.now:.0f} s, {max(self.worlds, default=0)} generations"

    def reachable(self) -> list[SimWorker]:
        return self.living()


def names_of(world: World) -> set[str]:
    return {m.worker for m in world.members}


def run_world(seed: int) -> str:
    """Play the story of one seed. Raises AssertionError with the event log if an invariant is violated."""
    return JobWorld(seed).run()
