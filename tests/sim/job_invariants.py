"""What must hold in every decision of a seeded job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.job.events import Effect, Record

if TYPE_CHECKING:
    from tests.sim.job_world import JobWorld

SLACK_S = 3.0
"""Ticks, and what is under way."""


class Invariants:
    """Looks at what the machine decides, before it is carried out."""

    def __init__(self, world: JobWorld) -> None:
        self.world = world
        self._waiting_since = 0.0

    def check(self, effects: list[Effect]) -> None:
        """Raises AssertionError, with the story, for a decision that must not be."""
        for effect in effects:
            if isinstance(effect, Record):
                self.world.check(bool(effect.why), f"{effect.kind} without a reason")
                if effect.kind == "world":
                    self._check_world()
                elif effect.kind == "node-lost" and "no sign of life" in effect.why:
                    self._check_loss(effect.details["node"])
                elif effect.kind == "waiting":
                    self._waiting_since = self.world.loop.now
                elif effect.kind == "ended" and "nodes with workers" in effect.why:
                    self._check_patience()
                elif effect.kind == "ended" and "worlds in a row broke" in effect.why:
                    self._check_despair()

    def _check_world(self) -> None:
        """Whole units of at least MIN and at most the wanted number of nodes, the oldest first, all of them sound."""
        world = self.world
        machine = world.machine
        assert machine is not None
        assert machine.world is not None
        roster, config = machine.roster, world.config
        names = list(dict.fromkeys(member.node for member in machine.world.members))
        ages = [roster.nodes[name].age for name in names]
        world.check(ages == sorted(ages), f"ranks go to {names}, not to the oldest first")
        if roster.elastic and not roster.through_nodes():
            world.check(len(names) % config.node_unit == 0, f"{names} are no whole units")
        handing_over = any(roster.nodes[name].going for name in names)
        target = machine.state.target_nodes + handing_over
        world.check(len(names) <= target, f"{names} are more than {target} nodes")
        here = set(names) | roster.through_nodes()
        world.check(len(here) >= config.min_nodes, f"{names} are fewer than {config.min_nodes} nodes")
        newest = machine.world
        ahead = [
            worker.worker
            for worker in roster.live()
            if worker.has_parked(newest.generation) and worker.state.clean and not worker.state.fresh
            if worker.state.commits > newest.commits + 1
        ]
        world.check(not ahead, f"{ahead} stand at later commits than {newest.commits}, with which it goes on")
        broken = world.broken.intersection(names)
        world.check(not broken, f"{broken} failed the node check and are in the world")

    def _check_patience(self) -> None:
        """A master gives up after the user's timeout, and not before; one that was away or stopped began anew."""
        world = self.world
        waited_s = world.loop.now - self._waiting_since
        most_s = world.config.timeout_s + SLACK_S
        if world.master_losses == 0:
            world.check(world.config.timeout_s <= waited_s <= most_s, f"it gives up after {waited_s:.1f} s")

    def _check_despair(self) -> None:
        """World after world breaks only where nodes cannot hear each other."""
        world = self.world
        assert world.machine is not None
        assert world.machine.world is not None
        nodes = {member.node for member in world.machine.world.members}
        deaf = [pair for pair, until in world.deaf.items() if pair <= nodes and until > world.loop.now - 20.0]
        world.check(bool(deaf), f"it gives up, and {sorted(nodes)} hear each other")

    def _check_loss(self, name: str) -> None:
        """Nobody is given up who alone has the state, while it may still train."""
        world, node = self.world, self.world.by_name[name]
        machine = world.machine
        assert machine is not None
        if machine.phase == "ended" or machine.world is None or world.has_forgotten:
            return
        if not node.is_up or node.frozen.is_frozen:
            return
        members = {member.worker for member in machine.world.members}
        live = [w for w in machine.roster.live() if w.worker in members]
        others = [w for w in live if not w.state.fresh]
        most = max((w.state.commits for w in live), default=-1)
        held = [
            worker.name
            for worker in node.processes.values()
            if worker.alive
            and not worker.core.fresh
            and worker.core.commits > most
            and worker.name in members
            if worker.group is not None and worker.group.world.generation == machine.world.generation
        ]
        world.check(bool(others) or not held, f"{held} alone have the state and are given up")
