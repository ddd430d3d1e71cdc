"""How one generation gives way to the next: who is awaited, and what is to be done. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from stoker.job.membership import NoSource, form_world
from stoker.job.roster import Roster, Worker
from stoker.wire.job import World

FRUITLESS_LIMIT = 20
"""Worlds in a row that may break before their first commit."""

Step = Literal["wait", "again", "drop", "empty", "roll-back", "fruitless", "run"]


class Verdict(NamedTuple):
    """What a forming generation needs next, and why."""

    step: Step
    why: str = ""
    workers: tuple[Worker, ...] = ()
    world: World | None = None


@dataclass
class Generations:
    """The generation being formed or run, and the world that is left or live."""

    number: int = 0
    world: World | None = None
    """The newest world; while a generation forms, the one that is being left."""
    stop_at_commit: int = -1
    awaited: set[str] = field(default_factory=set)
    since: float = 0.0
    why: str = ""
    _fruitless: int = 0
    _last_start: int = -1

    def begin(self, why: str, now: float, stop_at_commit: int = -1) -> None:
        """Name the next generation; every member of the old world has to acknowledge it."""
        self.number += 1
        self.why, self.since, self.stop_at_commit = why, now, stop_at_commit
        self.awaited = {m.worker for m in self.world.members} if self.world is not None else set()

    def judge(self, roster: Roster, now: float, *, min_nodes: int, park_s: float) -> Verdict:
        """Whether the world can be fixed now, and what to do if not."""
        live = roster.live()
        gone = self.awaited - {w.worker for w in live}
        if self.stop_at_commit >= 0 and gone:
            return Verdict("again", f"{', '.join(sorted(gone))} ended before the agreed commit")
        awaited = [w for w in live if w.worker in self.awaited and not w.has_parked(self.number)]
        if awaited:
            return self._press(awaited, now - self.since, park_s)
        staying = [w for w in live if roster.is_staying(w)]
        ready = [w for w in staying if w.has_parked(self.number)]
        if not ready:
            self.awaited |= {w.worker for w in staying}
            return Verdict("wait" if staying else "empty", "no worker is left")
        if len({w.node for w in ready}) < min_nodes:
            return Verdict("wait", "too few nodes")
        world = form_world(self.number, [roster.candidate(w) for w in ready])
        if isinstance(world, NoSource):
            return Verdict("roll-back", world.why, tuple(ready))
        if self._last_start == world.commits and self._fruitless >= FRUITLESS_LIMIT:
            return Verdict("fruitless", self.why)
        return Verdict("run", world=world)

    def settle(self, world: World) -> None:
        """The world is fixed."""
        self._fruitless = self._fruitless + 1 if self._last_start == world.commits else 0
        self._last_start = world.commits
        self.world = world
        self.stop_at_commit = -1

    def _press(self, awaited: list[Worker], waited_s: float, park_s: float) -> Verdict:
        """Somebody keeps the others waiting: first stop at once instead of at a commit, then do without it."""
        if self.stop_at_commit >= 0 and waited_s > park_s / 2:
            return Verdict("again", "the agreed commit did not come")
        stuck = tuple(w for w in awaited if w.state.phase != "starting")
        if waited_s <= park_s or not stuck:
            return Verdict("wait", f"{', '.join(w.worker for w in awaited)} still in a step or starting")
        return Verdict("drop", f"it did not leave its step within {park_s:.0f} s", stuck)
