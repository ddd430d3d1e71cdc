"""A seeded world of one job: the shipping master, agents and worker membership over a bad network.

Only processes, sockets and gradients are made up. Decisions are made by `JobMachine`, `NodeCore` and
`MemberCore`, who reads what by `GlobalOrder` and `share_of`, and the verdict by `audit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.agent import core as agent_core
from stoker.agent.core import NodeCore
from stoker.base.rng import mix64
from stoker.data.audit import Committed, Entry, Read, audit
from stoker.data.order import GlobalOrder, share_of
from stoker.job.events import End, NodeJoined, NodeLost, NodeReported, Record, Refuse, Send, Tick
from stoker.job.machine import JobConfig, JobMachine
from stoker.train.member import MemberCore
from stoker.wire.job import Directive, Join, Outcome, WorkerExit, WorkerSpec, World
from tests.sim.loop import Loop

BEAT_S = 1.0
BEAT_TIMEOUT_S = 5.0
USER_TIMEOUT_S = 40.0
LIMIT_S = 600.0


@dataclass(frozen=True)
class Position:
    """A training state: how far, and a digest of everything that led here."""

    commits: int = 0
    epoch: int = 0
    cursor: int = 0
    digest: int = 0


@dataclass
class Group:
    """The collectives of one generation."""

    world: World
    alive: set[str] = field(default_factory=set)
    entered: set[str] = field(default_factory=set)
    arrived: dict[int, dict[str, Callable[[bool], None]]] = field(default_factory=dict)


class SimWorker:
    """A training process: its loop is a chain of callbacks that a kill cuts off."""

    def __init__(self, world: JobWorld, node: SimNode, spec: WorkerSpec) -> None:
        self.world, self.node, self.spec = world, node, spec
        self.core = MemberCore(spec.worker)
        self.position = Position()
        self.alive = True
        self.group: Group | None = None
        self.turn = 0
        self.moved = False
        """The optimizer has changed the parameters since the last commit, and nothing can undo that."""
        self.slowness = world.rng.uniform(0.5, 1.5)

    @property
    def name(self) -> str:
        return self.spec.worker

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back unless this worker has died or its loop has taken another turn since."""
        turn = self.turn
        self.world.loop.after(delay_s, lambda: callback() if self.alive and self.turn == turn else None)

    def start(self) -> None:
        self.later(self.world.rng.uniform(0.1, 2.5), self.ready)

    def ready(self) -> None:
        self.position = self.world.checkpoint
        self.node.on_hello(self)
        self.core.park(commits=self.position.commits, clean=True, store=f"{self.name}:1")
        self.say()

    def say(self) -> None:
        self.node.on_worker_state(self)
        self.try_enter()

    def on_order(self) -> None:
        before = self.core.state()
        if self.core.interruption() == "now" and self.group is not None:
            self.break_off(clean=self.world.rng.chance(0.9))
            return
        if self.core.phase == "finished" and self.core.released:
            self.world.exit_worker(self, WorkerExit(code=0, signal=None))
            return
        if self.core.state() != before:
            self.say()
        else:
            self.try_enter()
            if self.core.phase == "parked":
                self.node.on_worker_state(self)

    def try_enter(self) -> None:
        offered = self.core.offered_world()
        if offered is None:
            return
        self.core.enter(offered)
        self.group = self.world.enter_group(self, offered)
        self.node.on_worker_state(self)
        self.collective(0, self.sync)

    def sync(self) -> None:
        assert self.group is not None
        world = self.group.world
        rank = self.core.rank_in(world)
        assert rank is not None
        source = self.world.state_at_entry(world)
        if world.members[rank].copy_state:
            self.position = source
        self.world.check(
            self.position == source, f"{self.name} entered generation {world.generation} with another state"
        )
        self.core.synced(self.position.commits)
        self.node.on_worker_state(self)
        self.next_step()

    def next_step(self) -> None:
        config = self.world
        assert self.group is not None
        position, world = self.begin_step(), self.group.world
        if position.epoch >= config.epochs:
            self.core.finish()
            self.say()
            return
        rank = self.core.rank_in(world)
        assert rank is not None
        share = share_of(rank, len(world.members), position.cursor, config.batch, config.records)
        order = config.order(position.epoch)
        config.entries.append(
            Read(
                generation=world.generation,
                step=position.commits + 1,
                epoch=position.epoch,
                rank=rank,
                world_size=len(world.members),
                records=tuple(order[share.start : share.stop]),
                wall_s=config.loop.now,
                dataset="d",
            )
        )
        delay_s = config.rng.uniform(0.05, 0.3) * self.slowness
        self.later(delay_s, lambda: self.collective(position.commits + 1, self.apply_step))

    def begin_step(self) -> Position:
        """The committed position, moved into the next epoch where this one is used up."""
        at = self.position
        if at.cursor < self.world.records:
            return at
        return Position(at.commits, at.epoch + 1, 0, at.digest)

    def apply_step(self) -> None:
        """The gradients are here: the optimizer changes the state, then the commit seals it.

        In some steps the script has a second collective between the two (a metric, say).
        """
        if mix64(self.position.commits + self.world.seed) % 6 == 0:
            self.core.clean = False
            self.moved = True
            step = -1 - self.position.commits
            self.later(self.world.rng.uniform(0.0, 0.2), lambda: self.collective(step, self.commit))
        else:
            self.commit()

    def commit(self) -> None:
        assert self.group is not None
        world = self.group.world
        old = self.begin_step()
        cursor = min(old.cursor + self.world.batch, self.world.records)
        digest = mix64(old.digest ^ mix64(old.commits * 1_000_003 + old.cursor))
        self.position = Position(old.commits + 1, old.epoch, cursor, digest)
        self.core.clean = True
        self.moved = False
        self.world.sealed.add(self.position)
        self.core.commit()
        rank = self.core.rank_in(world)
        assert rank is not None
        self.world.on_commit(self, world.generation, rank)
        self.node.on_worker_state(self)
        if self.core.interruption() == "now":
            self.break_off(clean=True)
        else:
            self.next_step()

    def collective(self, step: int, then: Callable[[], None]) -> None:
        assert self.group is not None
        group = self.group
        turn = self.turn

        def done(ok: bool) -> None:
            if self.alive and self.turn == turn:
                if ok:
                    then()
                else:
                    self.break_off(clean=self.core.clean)

        self.world.arrive(group, step, self, done)

    def break_off(self, *, clean: bool) -> None:
        """Out of the world: the loop starts a new turn, the group loses a member."""
        self.turn += 1
        group, self.group = self.group, None
        if self.moved:
            at = self.position
            self.position = Position(at.commits, at.epoch, at.cursor, mix64(at.digest ^ 0xBAD))
            self.moved = False
        still_clean = clean and self.core.clean
        if self.core.fresh and self.core.phase == "member":
            still_clean = self.core.clean and self.position.commits == self.core.commits
        self.core.leave(clean=still_clean)
        if group is not None:
            self.world.leave_group(self, group)
        self.later(self.world.rng.uniform(0.001, 0.05), self.say)


class SimNode:
    """An agent: `NodeCore` and the processes it started."""

    def __init__(self, world: JobWorld, name: str, slots: int) -> None:
        self.world, self.slots = world, slots
        self.name = name
        self.core = NodeCore(name)
        self.processes: dict[str, SimWorker] = {}
        self.alive = True
        self.cut_until = 0.0
        self.heard = world.loop.now
        self.done = False

    def join(self) -> None:
        join = Join(node=self.name, job="none", host=self.name, address="10.0.0.1", slots=self.slots)
        self.world.deliver_to_master(self, NodeJoined(join), reliable=True)
        self.beat()

    def beat(self) -> None:
        if not self.alive or self.done:
            return
        if self.world.loop.now - self.heard > BEAT_TIMEOUT_S * 2:
            self.lose_stream()
            return
        self.report()
        self.world.loop.after(BEAT_S, self.beat)

    def lose_stream(self) -> None:
        """Out of the master's reach for too long: kill the workers, come back as a new node."""
        self.run(self.core.on_stream_lost())
        self.alive = False
        self.world.replace_node(self)

    def report(self) -> None:
        if self.alive:
            self.world.deliver_to_master(self, NodeReported(self.core.report(spare_port=1)))

    def on_directive(self, directive: Directive) -> None:
        if self.alive:
            self.heard = self.world.loop.now
            self.run(self.core.on_directive(directive))

    def on_hello(self, worker: SimWorker) -> None:
        self.run(self.core.on_hello(worker.name))

    def on_worker_state(self, worker: SimWorker) -> None:
        self.run(self.core.on_state(worker.name, worker.core.state()))
        self.report()

    def run(self, effects: list[agent_core.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, agent_core.Spawn):
                worker = SimWorker(self.world, self, effect.spec)
                self.processes[worker.name] = worker
                self.core.on_spawned(worker.name, 1)
                worker.start()
            elif isinstance(effect, agent_core.Stop):
                worker = self.processes[effect.worker]
                delay_s = 0.0 if effect.at_once else self.world.rng.uniform(0.0, 5.0)
                killed = WorkerExit(code=None, signal=9)
                self.world.loop.after(delay_s, lambda w=worker, k=killed: self.world.exit_worker(w, k))  # type: ignore[misc]
            elif isinstance(effect, agent_core.GiveOrder):
                worker = self.processes[effect.worker]
                order = effect.order

                def give(worker: SimWorker = worker, order: object = order) -> None:
                    if worker.alive:
                        worker.core.on_order(order)  # type: ignore[arg-type]
                        worker.on_order()

                self.world.loop.after(self.world.rng.uniform(0.0001, 0.01), give)
            else:
                self.done = True
                if effect.outcome is None:
                    self.world.on_left(self)


class JobWorld:
    """One seeded story."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = Loop(seed)
        self.rng = rng = self.loop.rng
        self.log: list[str] = []
        self.records = 1 + rng.below(40)
        self.batch = 1 + rng.below(9)
        self.epochs = 1 + rng.below(3)
        nodes = 1 + rng.below(3)
        slots = 1 + rng.below(3)
        min_nodes = 1 + rng.below(nodes)
        self.loss = rng.uniform(0, 0.2) if rng.chance(0.6) else 0.0
        self.config = JobConfig(
            min_nodes=min_nodes,
            max_nodes=nodes + rng.below(2),
            max_restarts=rng.below(5),
            timeout_s=USER_TIMEOUT_S,
            beat_timeout_s=BEAT_TIMEOUT_S,
            park_s=USER_TIMEOUT_S,
            last_call_s=1.0,
        )
        self.machine = JobMachine(self.config)
        self.checkpoint_every = 1 + rng.below(6)
        self.checkpoint = Position()
        self.entries: list[Entry] = []
        self.nodes: list[SimNode] = []
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
        self.plan_faults()
        self.tick()

    # -- faults -------------------------------------------------------------------------------------------

    def plan_faults(self) -> None:
        for _ in range(self.rng.below(5)):
            fault = self.rng.choice(
                (
                    self.kill_worker,
                    self.kill_worker,
                    self.kill_node,
                    self.cut_node,
                    self.leave_node,
                    self.fail_script,
                )
            )
            if fault == self.fail_script and self.rng.chance(0.8):
                fault = self.kill_worker
            self.loop.after(self.rng.uniform(0.5, 25.0), fault)

    def living(self) -> list[SimWorker]:
        return [w for n in self.nodes if n.alive for w in n.processes.values() if w.alive]

    def kill_worker(self) -> None:
        living = self.living()
        if living:
            worker = self.rng.choice(living)
            self.note(f"kill {worker.name}")
            self.exit_worker(worker, WorkerExit(code=None, signal=9))

    def fail_script(self) -> None:
        living = self.living()
        if living:
            worker = self.rng.choice(living)
            self.note(f"exception in {worker.name}")
            self.exit_worker(worker, WorkerExit(code=1, signal=None, message="ValueError"))

    def kill_node(self) -> None:
        nodes = [n for n in self.nodes if n.alive and not n.done]
        if not nodes:
            return
        node = self.rng.choice(nodes)
        self.note(f"kill node {node.name}")
        node.alive = False
        for worker in list(node.processes.values()):
            self.exit_worker(worker, WorkerExit(code=None, signal=9))
        self.loop.after(self.rng.uniform(0.001, 0.05), lambda: self.feed(NodeLost(node.name, "stream broke")))
        self.replace_node(node)

    def cut_node(self) -> None:
        nodes = [n for n in self.nodes if n.alive and not n.done]
        if nodes:
            node = self.rng.choice(nodes)
            node.cut_until = self.loop.now + self.rng.uniform(0.5, 20.0)
            self.note(f"cut {node.name} until {node.cut_until:.1f}")

    def leave_node(self) -> None:
        nodes = [n for n in self.nodes if n.alive and not n.done]
        if nodes:
            node = self.rng.choice(nodes)
            self.note(f"{node.name} asks to leave")
            node.core.leaving = "preempted"
            node.report()

    def replace_node(self, node: SimNode) -> None:
        self.add_node(node.slots, self.rng.uniform(0.5, 10.0))

    def on_left(self, node: SimNode) -> None:
        self.loop.after(self.rng.uniform(0.001, 0.05), lambda: self.feed(NodeLost(node.name, "it left")))
        if self.rng.chance(0.7):
            self.replace_node(node)

    def add_node(self, slots: int, delay_s: float) -> None:
        self.node_count += 1
        name = f"node-{self.node_count}"

        def come() -> None:
            if self.outcome is None:
                node = SimNode(self, name, slots)
                self.nodes.append(node)
                node.join()

        self.loop.after(delay_s, come)

    # -- network ------------------------------------------------------------------------------------------

    def deliver_to_master(
        self, node: SimNode, event: NodeJoined | NodeReported, *, reliable: bool = False
    ) -> None:
        if not reliable:
            if node.cut_until > self.loop.now or (self.loss and self.rng.chance(self.loss)):
                return
            if self.loss and self.rng.chance(0.05):
                self.loop.after(self.rng.uniform(0.001, 3.0), lambda: self.feed(event))
        delay_s = 0.0001 if reliable else self.rng.uniform(0.0005, 0.02)
        self.loop.after(delay_s, lambda: self.feed(event))

    def deliver_to_node(self, name: str, directive: Directive) -> None:
        node = next((n for n in self.nodes if n.name == name), None)
        if node is None or node.cut_until > self.loop.now or (self.loss and self.rng.chance(self.loss)):
            return
        delay_s = self.rng.uniform(0.0005, 0.02)
        if self.loss and self.rng.chance(0.1):
            self.loop.after(self.rng.uniform(0.001, 3.0), lambda: node.on_directive(directive))
        self.loop.after(delay_s, lambda: node.on_directive(directive))

    # -- the master's shell -------------------------------------------------------------------------------

    def tick(self) -> None:
        self.feed(Tick())
        self.loop.after(BEAT_S, self.tick)

    def feed(self, event: NodeJoined | NodeReported | NodeLost | Tick) -> None:
        if isinstance(event, NodeLost) and event.node not in self.machine.roster.nodes:
            return
        for effect in self.machine.step(event, self.loop.now):
            if isinstance(effect, Send):
                world = effect.directive.world
                if world is not None:
                    known = self.worlds.setdefault(world.generation, world)
                    self.check(known == world, f"two worlds in generation {world.generation}")
                self.deliver_to_node(effect.node, effect.directive)
            elif isinstance(effect, End):
                self.check(self.outcome is None, "the job ended twice")
                self.outcome = effect.outcome
            elif isinstance(effect, Record):
                self.note(f"{effect.kind}: {effect.why} {effect.details}")
            elif isinstance(effect, Refuse):
                node = next((n for n in self.nodes if n.name == effect.node), None)
                if node is not None and node.alive:
                    node.lose_stream()

    # -- processes and groups -------------------------------------------------------------------------

    def exit_worker(self, worker: SimWorker, ended: WorkerExit) -> None:
        if not worker.alive:
            return
        worker.alive = False
        if worker.group is not None:
            self.leave_group(worker, worker.group)
        node = worker.node

        def seen() -> None:
            if node.alive:
                node.run(node.core.on_exit(worker.name, ended))
                node.report()

        self.loop.after(self.rng.uniform(0.0001, 0.005), seen)

    def enter_group(self, worker: SimWorker, world: World) -> Group:
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
            other = self.find(name)
            if other is None or not other.alive:
                group.alive.discard(name)
        return group

    def find(self, name: str) -> SimWorker | None:
        for node in self.nodes:
            if name in node.processes:
                return node.processes[name]
        return None

    def state_at_entry(self, world: World) -> Position:
        return self.entry_state[world.generation]

    def arrive(self, group: Group, step: int, worker: SimWorker, done: Callable[[bool], None]) -> None:
        if len(group.alive) < len(group.world.members):
            self.loop.after(self.rng.uniform(0.01, 0.1), lambda: done(False))
            return
        waiting = group.arrived.setdefault(step, {})
        waiting[worker.name] = done
        if len(waiting) == len(group.world.members):
            positions = {self.find(n).position for n in waiting} if step > 0 else set()  # type: ignore[union-attr]
            self.check(
                len(positions) <= 1, f"step {step} of generation {group.world.generation}: states differ"
            )
            del group.arrived[step]
            for callback in waiting.values():
                self.loop.after(self.rng.uniform(0.0, 0.05), lambda cb=callback: cb(True))  # type: ignore[misc]

    def leave_group(self, worker: SimWorker, group: Group) -> None:
        group.alive.discard(worker.name)
        for waiting in group.arrived.values():
            for callback in waiting.values():
                self.loop.after(self.rng.uniform(0.01, 0.1), lambda cb=callback: cb(False))  # type: ignore[misc]
        group.arrived.clear()

    def on_commit(self, worker: SimWorker, generation: int, rank: int) -> None:
        position = worker.position
        known = self.history.setdefault((generation, position.commits), position)
        self.check(
            known == position, f"commit {position.commits} of generation {generation} is not one state"
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

    def run(self) -> str:
        self.loop.run(LIMIT_S, lambda: self.outcome is not None)
        self.check(self.outcome is not None, f"the run neither ended nor said why within {LIMIT_S:.0f} s")
        assert self.outcome is not None
        self.check(bool(self.outcome.why), "the run ended without a reason")
        if self.outcome.success:
            report = audit(self.entries, {"d": self.records}, self.epochs)
            self.check(report.missed == 0, f"{report.missed} records were never read")
            self.check(report.repeated == 0, f"{report.repeated} records were read twice")
        self.loop.run(self.loop.now + 60.0, lambda: not self.reachable())
        self.check(not self.reachable(), f"workers outlive the job: {[w.name for w in self.reachable()]}")
        verdict = "done" if self.outcome.success else f"ended: {self.outcome.why}"
        return f"{verdict} after {self.loop.now:.0f} s, {self.machine.generation} generations"

    def reachable(self) -> list[SimWorker]:
        return self.living()


def names_of(world: World) -> set[str]:
    return {m.worker for m in world.members}


def run_world(seed: int) -> str:
    """Play the story of one seed. Raises AssertionError with the event log if an invariant is violated."""
    return JobWorld(seed).run()
