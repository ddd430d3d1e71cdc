"""Where a block, or what is known of a key, comes from in a fleet, and who keeps it. Pure.

Every server may be asked for everything. It gets what it does not own from the owner, and does not wait for one that
cannot be reached: the next one is asked, which owns it while the other is away, and then the origin. Views of the fleet
may differ for a while; a request that was handed on HOPS_MAX times is answered from the origin by whoever has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stoker.base.backoff import backoff_s
from stoker.base.rng import Rng
from stoker.cache.maglev import Member, Placement

DOWN_FIRST_S = 1.0
DOWN_LIMIT_S = 15.0
PEERS_MAX = 2
_PLACEMENTS_KEPT = 8


class Route(NamedTuple):
    """Whom to ask, one after the other, before the origin is; whether to keep what comes; and why."""

    peers: tuple[str, ...]
    keeps: bool
    why: str


@dataclass(slots=True)
class _Trouble:
    failures: int
    until: float


class FleetView:
    """One server's view of its fleet. `me` is its own name; members are known by theirs."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.members: tuple[Member, ...] = ()
        self._troubles: dict[str, _Trouble] = {}
        self._placements: OrderedDict[frozenset[str], Placement] = OrderedDict()
        self._before: Placement | None = None

    def set_members(self, members: Iterable[Member]) -> bool:
        """Who is in the fleet now; whether that is another than before."""
        found = tuple(sorted(members, key=lambda member: member.name))
        if found == self.members:
            return False
        self._before = self._whole() if self.members else None
        self.members = found
        names = {member.name for member in found}
        self._troubles = {name: t for name, t in self._troubles.items() if name in names}
        self._placements.clear()
        return True

    def failed(self, name: str, now: float, rng: Rng) -> None:
        """A member could not be reached: others are asked in its place until it answers again."""
        trouble = self._troubles.setdefault(name, _Trouble(0, 0.0))
        if now < trouble.until:
            return  # the same outage, found out by another request
        trouble.failures += 1
        trouble.until = now + backoff_s(trouble.failures, rng, first_s=DOWN_FIRST_S, limit_s=DOWN_LIMIT_S)

    def answered(self, name: str) -> None:
        """A member was reached."""
        self._troubles.pop(name, None)

    def down(self) -> frozenset[str]:
        """Members that are not asked, but for whether they are back."""
        return frozenset(self._troubles)

    def due(self, now: float) -> list[str]:
        """Members that are to be asked whether they are back."""
        return [name for name, trouble in self._troubles.items() if trouble.until <= now]

    def placement(self) -> Placement:
        """Who owns what, without those that cannot be reached."""
        down = self.down()
        known = self._placements.get(down)
        if known is None:
            whole = self._whole()
            known = self._placements[down] = whole.without(down) if down else whole
            while len(self._placements) > _PLACEMENTS_KEPT:
                self._placements.popitem(last=False)
        return known

    def assigned(self, name: str) -> str:
        """Who owns it, whether it can be reached or not; empty: nobody does."""
        owner = self._whole().owner(name)
        return "" if owner is None else owner.name

    def owner_before(self, name: str) -> str | None:
        """Who owned it before the members changed, if that is another than this server, and can be reached."""
        owner = None if self._before is None else self._before.owner(name)
        reachable = {member.name for member in self.members} - self.down()
        return owner.name if owner is not None and owner.name in reachable - {self.me} else None

    def route(self, name: str, max_replicas: int, hops: int, hops_max: int, rng: Rng) -> Route:
        """Where what is placed by that name comes from. `max_replicas` 0: whoever is asked may keep it."""
        if len(self.members) < 2:
            return Route((), True, "there is no other server")
        owners = [member.name for member in self.placement().owners(name, max(PEERS_MAX, max_replicas))]
        keeping = owners[: max_replicas or len(owners)]
        keeps = max_replicas == 0 or self.me in keeping or self.me not in {m.name for m in self.members}
        if hops >= hops_max:
            return Route((), keeps, "it was handed on often enough")
        if not owners or owners[0] == self.me:
            return Route((), keeps, "this server owns it")
        if self.me in keeping:
            return Route((owners[0],), True, f"a copy for {owners[0]}, who owns it")
        others = [owner for owner in owners if owner != self.me]
        if max_replicas > 1:
            # Those who keep it share the readers; each gets its copy from the owner.
            first = rng.below(min(max_replicas, len(others)))
            others = others[first:] + others[:first]
        return Route(tuple(others[:PEERS_MAX]), keeps, f"{others[0]} keeps it")

    def _whole(self) -> Placement:
        """With all members."""
        whole = self._placements.get(frozenset())
        if whole is None:
            whole = self._placements[frozenset()] = Placement(self.members)
        return whole
