"""Whether a server of a fleet may serve and write blobs without asking the others each time. Pure.

Every acknowledged version is known to two servers, beside those that had given up older bytes by then. Each server
promises the others, for LEASE_S at a time, that it will neither write nor vote for what is theirs: who holds the
promises of all others but one at most knows that nobody writes its keys meanwhile. Who was without them for a moment,
or sees another fleet than before, begins a new *term*: what it holds from earlier terms counts once the others were
asked.

One of the others may be silent only while the membership *confirms* that this fleet is the fleet: a server that it has
lost, with another that it has lost too, would otherwise go on beside those who are the fleet by then. Who is not sure
of that needs the promises of all. Of two servers each knows all that either acknowledges: one that is confirmed, and
had the promise of the other once, needs no more of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf

from stoker.cache.maglev import Member

LEASE_S = 4.0
RENEW_EVERY_S = 1.0
MARGIN_S = 0.5
"""So much earlier than it is promised its holder takes it for over: clocks do not go equally fast."""


def view_of(members: Iterable[Member]) -> str:
    """What is the same at all servers that see the same fleet."""
    names = sorted(f"{member.name}={member.weight}" for member in members)
    return blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


def missing_max(others: int) -> int:
    """How many of so many other servers need not answer: any two of the others include one that does."""
    return 1 if others >= 2 else 0


@dataclass(slots=True)
class _Promise:
    view: str
    until: float


class Standing:
    """Of one server. It has promised who knows what before it was started, and others may not have heard yet that it is
    there: for `quiet_s` it takes part in nothing."""

    def __init__(self, me: str, now: float, quiet_s: float = LEASE_S) -> None:
        self._me = me
        self._view = ""
        self._others: frozenset[str] = frozenset()
        self._quiet_until = now + quiet_s
        self._given: dict[str, _Promise] = {}
        self._held: dict[str, float] = {}
        self._confirmed_until = 0.0
        self._until = 0.0
        self.term = 0

    @property
    def view(self) -> str:
        """As `view_of` has it."""
        return self._view

    def see(self, view: str, others: Collection[str], now: float) -> None:
        """Who is in the fleet now. Promises that were made in another one are none to this one. Who stays alone of two
        goes on: there was nobody else who could have written."""
        if view == self._view:
            return
        stays_alone = len(self._others) == 1 and not others and now < self._until
        self._view, self._others = view, frozenset(others)
        self._held = {}
        self._until = 0.0
        if stays_alone:
            self._until = self._lead_until()
        else:
            self.term += 1

    def promise(self, holder: str, view: str, now: float) -> bool:
        """Another server wants the promise, in the fleet as it sees it; whether it has it. Nobody has it as long as
        somebody may rely on one from before: who has the promises needs not ask who else has some."""
        if view != self._view or holder not in self._others or now < self._quiet_until:
            return False
        if any(name != holder and given.view != view for name, given in self._promises(now)):
            return False
        self._given[holder] = _Promise(view, now + LEASE_S)
        return True

    def promised(self, by: str, view: str, asked_at: float, now: float) -> None:
        """Another server has promised it, which was asked at that time."""
        if view == self._view and by in self._others:
            self._held[by] = max(self._held.get(by, 0.0), asked_at + LEASE_S - MARGIN_S)
            self._extend(now)

    def confirm(self, until: float, now: float) -> None:
        """Until then the membership cannot say anything else of the fleet than what was seen."""
        if until > self._confirmed_until:
            self._confirmed_until = until
            self._extend(now)

    def is_confirmed(self, now: float) -> bool:
        """Whether the fleet is sure to be the one that was seen."""
        return now < self._confirmed_until

    def leads_until(self) -> float:
        """Until then nobody else writes what is this server's."""
        return self._until

    def objection(self, writer: str, owner: str, now: float) -> str | None:
        """Why a key must not be written by `writer` now, by what this server has promised; None if it may. `owner`:
        whose it is in this server's fleet, whether that can be reached or not."""
        if now < self._quiet_until:
            return f"{self._me} has only just started"
        for holder, given in self._promises(now):
            if holder != writer and (given.view != self._view or holder == owner):
                return f"{holder} may be serving it still"
        return None

    def _promises(self, now: float) -> list[tuple[str, _Promise]]:
        self._given = {holder: given for holder, given in self._given.items() if given.until > now}
        return list(self._given.items())

    def _extend(self, now: float) -> None:
        until = self._lead_until()
        if until > self._until:
            is_gap = now > self._until
            self._until = until
            if is_gap and until > now:
                self.term += 1

    def _lead_until(self) -> float:
        if not self._others:
            return self._confirmed_until
        ends = sorted(self._held.get(name, 0.0) for name in self._others)
        most = ends[missing_max(len(ends))]
        if len(ends) == 1 and self._held:
            most = inf
        return max(ends[0], min(most, self._confirmed_until))
