"""The actors of a seeded job: training processes and agents, around the shipping `MemberCore` and `NodeCore`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.agent import core as agent_core
from stoker.agent.core import NodeCore
from stoker.base.rng import mix64
from stoker.data.audit import Read
from stoker.data.order import share_of
from stoker.job.events import Event, NodeBeat, NodeChecked, NodeCut, NodeJoined, NodeReported, StacksTaken
from stoker.train.member import MemberCore
from stoker.wire.exits import ExitFacts
from stoker.wire.health import CheckReply, CheckTask, Frame, StackReply, StackRequest, Stacks, ThreadStack
from stoker.wire.job import Beat, Directive, Join, Order, WorkerSpec, World

if TYPE_CHECKING:
    from tests.sim.job_world import JobWorld

BEAT_S = 1.0
BEAT_TIMEOUT_S = 5.0
USER_TIMEOUT_S = 40.0


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
    complete: set[int] = field(default_factory=set)
    """Steps to which every member has brought its gradients."""


class Freezer:
    """A process that may be stopped (SIGSTOP): what it should do waits until it is continued."""

    def __init__(self) -> None:
        self.is_frozen = False
        self._waiting: list[Callable[[], None]] = []

    def do(self, callback: Callable[[], None]) -> None:
        if self.is_frozen:
            self._waiting.append(callback)
        else:
            callback()

    def thaw(self) -> None:
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            self.do(callback)


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

        self.rank = -1
        self.frozen = Freezer()
        self.is_hung = False
        self.is_waiting = False
        """Its script waits for something that never comes; its process runs."""

    @property
    def name(self) -> str:
        return self.spec.worker

    def later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back, unless this worker has died or its loop has taken another turn since."""
        turn = self.turn
        self.world.loop.after(delay_s, lambda: self.do(turn, callback))

    def do(self, turn: int, callback: Callable[[], None]) -> None:
        """Now, or when the process is continued; never in a script that hangs."""
        if self.is_hung:
            return
        self.frozen.do(lambda: callback() if self.alive and self.turn == turn else None)

    def stacks(self) -> Stacks:
        """What a look at the process shows."""
        waits = Frame("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py", 1)
        own = Frame("step", "/home/user/train.py", 1 + self.world.rng.below(99))
        moving = Frame(f"layer_{self.world.rng.below(1000)}", "/home/user/model.py", 1)
        frames = (own,) if self.is_hung else (waits, own) if self.is_waiting else (moving, own)
        main = ThreadStack("main", frames, is_main=True, active=not (self.is_hung or self.is_waiting))
        return Stacks(pid=1, source="py-spy", threads=(main,), state="T" if self.frozen.is_frozen else "S")

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
            self.world.exit_worker(self, ExitFacts(code=0, signal=None))
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
        member = offered.member(self.name)
        assert member is not None
        self.rank = member.rank
        self.core.enter(offered)
        self.group = self.world.enter_group(self, offered.generation)
        self.node.on_worker_state(self)
        self.collective(0, self.sync)

    def sync(self) -> None:
        assert self.group is not None
        world = self.group.world
        rank = self.rank
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
        rank = self.rank
        self.core.progress += 1
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
        self.core.busy_s += delay_s
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
        self.core.progress = 0
        rank = self.rank
        self.world.on_commit(self, world.generation, rank)
        self.node.on_worker_state(self)
        if self.core.interruption() == "now":
            self.break_off(clean=True)
        else:
            self.next_step()

    def collective(self, step: int, then: Callable[[], None]) -> None:
        assert self.group is not None
        turn = self.turn
        self.is_waiting = True
        self.core.progress += 1

        def done(ok: bool) -> None:
            if self.turn == turn:
                self.is_waiting = False
            self.do(turn, then if ok else lambda: self.break_off(clean=self.core.clean))

        self.world.arrive(self.group, step, self, done)

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
    """An agent: `NodeCore`, its stream to the master, and the processes it started."""

    def __init__(self, world: JobWorld, name: str, slots: int) -> None:
        self.world, self.slots = world, slots
        self.name = name
        self.core = NodeCore(name)
        self.processes: dict[str, SimWorker] = {}
        self.alive = True
        self.frozen = Freezer()
        self.cut_until = 0.0
        self.heard = world.loop.now
        self.stream = 0
        """Number of the stream that it holds; 0: none."""
        self.done = False

    @property
    def is_up(self) -> bool:
        return self.alive and not self.done

    @property
    def is_cut(self) -> bool:
        return self.cut_until > self.world.loop.now

    # -- the stream to the master -------------------------------------------------------------------------

    def connect(self) -> None:
        """Open a stream, or try again a little later; in the end give up, as an agent does."""
        if not self.is_up or self.stream:
            return
        if self.frozen.is_frozen:
            self.frozen.do(self.connect)
            return
        world = self.world
        if world.loop.now - self.heard > USER_TIMEOUT_S:
            self.give_up("no master for the whole timeout")
            return
        stream = 0 if self.is_cut else world.accept(self)
        if not stream:
            world.loop.after(world.rng.uniform(0.02, 1.0), self.connect)
            return
        self.stream = stream
        join = Join(
            node=self.name,
            job="none",
            host=self.name,
            address=f"10.0.0.{self.name}",
            slots=self.slots,
            resumes=self.core.was_taken,
            report_seq=self.core.report_seq,
            directive_seq=self.core.directive.seq,
            generation=self.core.directive.generation,
            world=self.core.world,
        )
        world.to_master(self, NodeJoined(join), reliable=True)
        self.report()

    def on_silence(self) -> None:
        """The master has said nothing for so long that the stream must be broken: reset it and look for another."""
        stream = self.stream
        if stream and not self.is_cut:
            cut = NodeCut(self.name, "reset")
            self.world.loop.after(0.001, lambda: self.world.from_stream(stream, cut))
        self.on_broken(stream)

    def on_broken(self, stream: int) -> None:
        """The stream broke."""
        if self.is_up and self.stream == stream:
            self.stream = 0
            self.world.loop.after(self.world.rng.uniform(0.001, 0.05), self.connect)

    def on_refused(self) -> None:
        if self.is_up:
            self.give_up("refused")

    def give_up(self, why: str) -> None:
        """Kill the workers; whoever runs the agent comes back as a new node."""
        self.world.note(f"{self.name} gives up: {why}")
        self.run(self.core.stop_all())
        self.alive = False
        self.world.replace_node(self)

    def beat(self) -> None:
        if not self.is_up:
            return
        if self.world.loop.now - self.heard > 3 * BEAT_TIMEOUT_S and self.stream:
            self.on_silence()
        if not self.frozen.is_frozen:
            self.run(self.core.on_tick(self.world.loop.now, BEAT_TIMEOUT_S))
        if not self.frozen.is_frozen and self.stream:
            said = self.core.beat(1, self.world.loop.now)
            self.world.to_master(self, NodeBeat(said) if isinstance(said, Beat) else NodeReported(said))
        self.world.loop.after(BEAT_S, self.beat)

    def report(self) -> None:
        if self.is_up and self.stream:
            report = self.core.report(1, self.world.loop.now)
            self.frozen.do(lambda: self.world.to_master(self, NodeReported(report)))

    def on_told(self, message: StackRequest | CheckTask) -> None:
        """Stacks are taken in a moment; a check takes a while, and fails where the node or its partner is broken."""
        world, stream = self.world, self.stream

        def send(reply: Event) -> None:
            if self.is_up and self.stream == stream and stream:
                self.frozen.do(lambda: world.to_master(self, reply))

        if isinstance(message, CheckTask):
            result = world.check_result(self, message)
            world.loop.after(
                world.rng.uniform(0.2, 3.0),
                lambda: send(NodeChecked(self.name, CheckReply(message.group, result))),
            )
            return
        for name in message.workers:
            worker = self.processes.get(name)
            if worker is None or not worker.alive:
                samples = (Stacks(pid=0, unavailable="no such worker here"),)
            else:
                samples = tuple(worker.stacks() for _ in range(message.samples))
            taken = StacksTaken(StackReply(message.look, name, samples))
            world.loop.after(message.samples * message.interval_s, lambda taken=taken: send(taken))  # type: ignore[misc]

    def on_directive(self, directive: Directive) -> None:
        def take() -> None:
            if self.is_up:
                self.heard = self.world.loop.now
                was_leaving = self.core.leaving
                self.run(self.core.on_directive(directive))
                if self.core.leaving != was_leaving:
                    self.report()

        self.frozen.do(take)

    # -- its processes ------------------------------------------------------------------------------------

    def on_hello(self, worker: SimWorker) -> None:
        self.frozen.do(lambda: self.run(self.core.on_hello(worker.name)))

    def on_worker_state(self, worker: SimWorker) -> None:
        state = worker.core.state()

        def take() -> None:
            if self.is_up:
                self.run(self.core.on_state(worker.name, state))
                self.report()

        self.frozen.do(take)

    def on_exit(self, worker: SimWorker, ended: ExitFacts) -> None:
        def take() -> None:
            if self.is_up:
                self.run(self.core.on_exit(worker.name, ended))
                self.report()

        self.frozen.do(take)

    def on_stopped(self, worker: SimWorker, *, is_stopped: bool) -> None:
        def take() -> None:
            if is_stopped:
                self.run(self.core.on_stopped(worker.name, self.world.loop.now))
            else:
                self.run(self.core.on_continued(worker.name))
            self.report()

        self.frozen.do(take)

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
                killed = ExitFacts(code=None, signal=9)
                self.world.loop.after(delay_s, lambda w=worker, k=killed: self.world.exit_worker(w, k))  # type: ignore[misc]
            elif isinstance(effect, agent_core.GiveOrder):
                self.give(self.processes[effect.worker], effect.order)
            elif isinstance(effect, agent_core.Leave):
                self.done = True
                if effect.outcome is None:
                    self.world.on_left(self)

    def give(self, worker: SimWorker, order: Order) -> None:
        def take() -> None:
            if worker.alive:
                worker.core.on_order(order)
                worker.on_order()

        self.world.loop.after(self.world.rng.uniform(0.0001, 0.01), lambda: worker.frozen.do(take))
