"""A worker's side of membership: which generation it belongs to, and when it must stop. Pure.

starting ─park()─▶ parked ─world of the acknowledged generation─▶ member ─finish()─▶ finished
                      ▲                                             │                   │
                      └──────────── leave() ────────────────────────┴───────────────────┘
"""

from __future__ import annotations

from typing import Literal

from stoker.wire.job import Order, WorkerPhase, WorkerState, WorldView

Interrupt = Literal["no", "at-commit", "now"]


class MemberCore:
    """Turns the agent's orders and the training loop's progress into a `WorkerState`."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.phase: WorkerPhase = "starting"
        self.acknowledged = 0
        self.left = 0
        self.commits = 0
        self.clean = True
        self.fresh = True
        self.restored = ""
        """While it is fresh: the fingerprint of what its state was loaded from; see `WorkerState`."""
        self.store = ""
        self.progress = 0
        self.busy_s = 0.0
        self.broke = ""
        self.metrics: dict[str, float] = {}
        self.world: WorldView | None = None
        self.order = Order(generation=0)

    def state(self) -> WorkerState:
        """What the agent is told."""
        return WorkerState(
            phase=self.phase,
            generation=self.acknowledged,
            left=self.left,
            commits=self.commits,
            clean=self.clean,
            fresh=self.fresh,
            restored=self.restored,
            store=self.store,
            elastic=True,
            progress=self.progress,
            busy_s=self.busy_s,
            metrics=self.metrics,
            broke=self.broke,
        )

    # -- orders -------------------------------------------------------------------------------------------

    def on_order(self, order: Order) -> None:
        """Take the newest order; one of an older generation is refused."""
        if order.generation < self.order.generation:
            return
        self.order = order
        if self.phase == "parked":
            self.acknowledged = order.generation

    def interruption(self) -> Interrupt:
        """Whether the world that this worker is in must be left."""
        if self.world is None or self.order.generation <= self.world.generation:
            return "no"
        stop_at = self.order.stop_at_commit
        if stop_at < 0 or self.phase == "finished":
            return "now"
        return "now" if self.commits >= stop_at else "at-commit"

    def offered_world(self) -> WorldView | None:
        """The world that a parked worker may enter now."""
        world = self.order.world
        if self.phase != "parked" or world is None or world.generation != self.acknowledged:
            return None
        if world.generation <= self.left or self.rank_in(world) is None:
            return None
        return world

    def rank_in(self, world: WorldView) -> int | None:
        member = world.member(self.worker)
        return member.rank if member is not None else None

    @property
    def released(self) -> bool:
        return self.order.released

    # -- the training loop's own moves ------------------------------------------------------------------

    def loaded(self, commits: int, fingerprint: str) -> None:
        """The state is that of so many commits, from a checkpoint, or a copy in whose world this worker is not yet."""
        self.commits, self.restored = commits, fingerprint

    def park(self, *, commits: int, clean: bool, store: str) -> None:
        """Ready for a world: at the start, with the state of `commits`."""
        self.phase = "parked"
        self.commits, self.clean, self.store = commits, clean, store
        self.acknowledged = self.order.generation

    def enter(self, world: WorldView) -> None:
        """Become a member."""
        self.world = world
        self.phase = "member"

    def synced(self, commits: int) -> None:
        """The state is now the world's own."""
        self.commits = commits
        self.clean, self.fresh, self.restored = True, False, ""

    def commit(self) -> None:
        self.commits += 1

    def leave(self, *, clean: bool, store: str = "", broke: str = "") -> None:
        """Out of the world, standing at the last commit if `clean`; `broke`: why, unless an order was the reason."""
        if self.world is not None:
            self.left = self.world.generation
        self.world = None
        self.phase = "parked"
        self.clean = clean
        self.store = store or self.store
        self.broke = broke
        self.acknowledged = self.order.generation

    def finish(self) -> None:
        """The script came to its end."""
        self.phase = "finished"
