"""What goes wrong in a seeded job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.job.events import NodeAsked, NodeLost, ScaleRequested
from stoker.wire.exits import ExitFacts, Sign

if TYPE_CHECKING:
    from tests.sim.job_actors import SimNode, SimWorker
    from tests.sim.job_world import JobWorld

KILLED = ExitFacts(code=None, signal=9)


class Faults:
    """Faults of one world, planned from its seed."""

    def __init__(self, world: JobWorld) -> None:
        self.world = world

    def plan(self, count: int, until_s: float) -> None:
        rng = self.world.rng
        weighted = (
            self.kill_worker, self.kill_worker, self.kill_burst, self.kill_freshest, self.kill_all, self.kill_node,
            self.cut_node, self.leave_node, self.ask_node, self.fail_script, self.stop_worker, self.stop_node,
            self.lose_master, self.lose_master, self.reset_stream, self.scale, self.hang_worker, self.cut_peers,
            self.stop_master, self.kill_on_node, self.run_out_of_memory, self.fill_disk, self.break_device,
            self.slow_down, self.lose_master_with_full_disk,
        )  # fmt: skip
        for _ in range(count):
            fault = rng.choice(weighted)
            if fault == self.fail_script and rng.chance(0.8):
                fault = self.kill_worker
            self.world.loop.after(rng.uniform(0.5, until_s), fault)

    # -- workers ------------------------------------------------------------------------------------------

    def kill(self, worker: SimWorker) -> None:
        self.world.note(f"kill {worker.name}")
        self.world.exit_worker(worker, KILLED)

    def kill_worker(self) -> None:
        living = self.world.living()
        if living:
            self.kill(self.world.rng.choice(living))

    def kill_burst(self) -> None:
        """Two or three failures within one regroup."""
        for _ in range(2 + self.world.rng.below(2)):
            self.world.loop.after(self.world.rng.uniform(0.0, 0.4), self.kill_worker)

    def kill_freshest(self) -> None:
        """One dies; while the others recover, the one whose state they would take dies too."""
        self.kill_worker()

        def then() -> None:
            living = self.world.living()
            if living:
                self.kill(max(living, key=lambda w: (w.core.commits, w.name)))

        self.world.loop.after(self.world.rng.uniform(0.0, 0.5), then)

    def kill_all(self) -> None:
        if self.world.rng.chance(0.3):
            for worker in self.world.living():
                self.kill(worker)

    def kill_on_node(self) -> None:
        """All workers of a node; its agent lives."""
        nodes = self.nodes()
        if nodes:
            for worker in list(self.world.rng.choice(nodes).processes.values()):
                if worker.alive:
                    self.kill(worker)

    def end_badly(self, what: str, facts: ExitFacts) -> None:
        living = self.world.living()
        if living:
            worker = self.world.rng.choice(living)
            self.world.note(f"{what} of {worker.name}")
            self.world.exit_worker(worker, facts)

    def run_out_of_memory(self) -> None:
        self.end_badly("out of memory", ExitFacts(code=None, signal=9, oom_killed=True))

    def fill_disk(self) -> None:
        facts = ExitFacts(code=1, signal=None, message="No space left", sign="disk-full", full_disk="/data")
        self.end_badly("full disk", facts)

    def break_device(self) -> None:
        sign: Sign = "hardware" if self.world.rng.chance(0.4) else "device-error"
        self.end_badly(sign, ExitFacts(code=1, signal=None, message="CUDA error", sign=sign))

    def slow_down(self) -> None:
        """One worker takes several times as long as the others from now on."""
        living = self.world.living()
        if living:
            worker = self.world.rng.choice(living)
            self.world.note(f"{worker.name} is slow from now on")
            worker.slowness = 4.0

    def fail_script(self) -> None:
        living = self.world.living()
        if living:
            worker = self.world.rng.choice(living)
            self.world.note(f"exception in {worker.name}")
            self.world.exit_worker(worker, ExitFacts(code=1, signal=None, message="ValueError"))

    def stop_worker(self) -> None:
        """SIGSTOP, and for some SIGCONT later."""
        world = self.world
        running = [w for w in world.living() if not w.frozen.is_frozen]
        if not running:
            return
        worker = world.rng.choice(running)
        world.note(f"stop {worker.name}")
        worker.frozen.is_frozen = True
        worker.node.on_stopped(worker, is_stopped=True)

        def go_on() -> None:
            if worker.alive:
                world.note(f"continue {worker.name}")
                worker.node.on_stopped(worker, is_stopped=False)
                worker.frozen.thaw()

        if world.rng.chance(0.7):
            world.loop.after(world.rng.uniform(0.2, 12.0), go_on)

    def hang_worker(self) -> None:
        """A script waits for something that never comes, in a step or before it is ready; but not before anything is
        known of it: it might be one that never says anything."""
        machine = self.world.machine
        living = [
            w
            for w in self.world.living()
            if not w.is_hung
            and w.core.phase != "finished"
            and (w.core.phase != "starting" or (machine is not None and machine.roster.elastic))
        ]
        if living:
            worker = self.world.rng.choice(living)
            self.world.note(f"hang {worker.name}")
            worker.is_hung = True

    # -- nodes --------------------------------------------------------------------------------------------

    def nodes(self) -> list[SimNode]:
        return [n for n in self.world.nodes if n.is_up]

    def kill_node(self) -> None:
        world = self.world
        nodes = self.nodes()
        if not nodes:
            return
        node = world.rng.choice(nodes)
        world.note(f"kill node {node.name}")
        node.alive = False
        for worker in list(node.processes.values()):
            world.exit_worker(worker, KILLED)
        if node.stream and not node.is_cut:
            stream = node.stream
            world.loop.after(
                world.rng.uniform(0.001, 0.05),
                lambda: world.from_stream(stream, NodeLost(node.name, "it ended")),
            )
        world.replace_node(node)

    def stop_node(self) -> None:
        """SIGSTOP of an agent: its workers go on."""
        self.world.was_cut = True
        world = self.world
        nodes = [n for n in self.nodes() if not n.frozen.is_frozen]
        if not nodes:
            return
        node = world.rng.choice(nodes)
        world.note(f"stop node {node.name}")
        node.frozen.is_frozen = True

        def go_on() -> None:
            world.note(f"continue node {node.name}")
            node.frozen.thaw()

        world.loop.after(world.rng.uniform(0.2, 15.0), go_on)

    def cut_node(self) -> None:
        self.world.was_cut = True
        world = self.world
        nodes = self.nodes()
        if nodes:
            node = world.rng.choice(nodes)
            node.cut_until = world.loop.now + world.rng.uniform(0.5, 70.0 if world.rng.chance(0.2) else 20.0)
            world.note(f"cut {node.name} until {node.cut_until:.1f}")

    def cut_peers(self) -> None:
        """Two nodes cannot hear each other; both hear the master."""
        world = self.world
        nodes = self.nodes()
        if len(nodes) > 1:
            rng = world.rng
            first = rng.choice(nodes)
            second = rng.choice([n for n in nodes if n is not first])
            pair = frozenset((first.name, second.name))
            world.deaf[pair] = world.loop.now + rng.uniform(1.0, 90.0)
            world.note(f"{first.name} and {second.name} cannot hear each other until {world.deaf[pair]:.1f}")
            world.break_groups(pair)

    def reset_stream(self) -> None:
        """Something between agent and master resets the connection; both live."""
        nodes = [n for n in self.nodes() if n.stream]
        if nodes:
            node = self.world.rng.choice(nodes)
            self.world.note(f"reset {node.name}")
            self.world.break_stream(node)

    def leave_node(self) -> None:
        nodes = self.nodes()
        if nodes:
            node = self.world.rng.choice(nodes)
            self.world.note(f"{node.name} asks to leave")
            node.core.leaving = "preempted"
            node.report()

    def ask_node(self) -> None:
        nodes = self.nodes()
        if nodes:
            self.world.feed(NodeAsked(self.world.rng.choice(nodes).name, "drained"))

    def scale(self) -> None:
        config = self.world.config
        nodes = config.min_nodes + self.world.rng.below(config.max_nodes - config.min_nodes + 1)
        self.world.feed(ScaleRequested(nodes, "somebody wants it"))

    # -- the master ---------------------------------------------------------------------------------------

    def stop_master(self) -> None:
        self.world.stop_master()

    def lose_master_with_full_disk(self) -> None:
        """What it has decided for a while is not in its journal when it dies."""
        self.world.fill_journal()
        self.world.loop.after(self.world.rng.uniform(0.5, 10.0), self.world.lose_master)

    def lose_master(self) -> None:
        self.world.lose_master()
