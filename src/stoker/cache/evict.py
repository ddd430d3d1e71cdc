"""Who leaves when room is needed. Pure: it orders what was drawn and says why, it moves nothing.

`lru` gives up what was used longest ago. `uniform` fills once and never replaces, which is right for shuffled epochs:
replacing would evict what is read as soon as what comes in. `replica-aware` is `lru` weighed by how many copies the
fleet has; the last copy of a block leaves after all that have others (UnionStore). Where a segment leaves, its last
copies are written anew as long as chance finds others to give up, and there is time to.

Recency is drawn, not kept: of SAMPLE_SIZE held pieces that were drawn by chance the stalest leaves. That comes close to
exact LRU (Redis does so) and costs the hit path one store of a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LRU = "lru"
UNIFORM = "uniform"
REPLICA_AWARE = "replica-aware"
POLICIES = (LRU, UNIFORM, REPLICA_AWARE)
SAMPLE_SIZE = 16


class Candidate(NamedTuple):
    """A piece that may leave. `copies` are those in the fleet, this one included, as far as is known; 1 where the
    policy does not ask."""

    used_s: int
    copies: int = 1


class Choice(NamedTuple):
    """Which of the candidates leaves, how stale it is, whether there are copies of it, and why."""

    position: int
    staleness_s: float
    has_copies: bool
    why: str

    @property
    def rank(self) -> tuple[bool, float]:
        """Of choices among different kinds of pieces, the greatest leaves."""
        return self.has_copies, self.staleness_s


def stalest(candidates: Sequence[Candidate], now_s: int) -> Choice | None:
    """The one to give up; None if there is none."""
    if not candidates:
        return None
    best = max(
        range(len(candidates)), key=lambda i: (candidates[i].copies > 1, staleness_s(candidates[i], now_s))
    )
    chosen = candidates[best]
    others = f", with {chosen.copies - 1} copies elsewhere" if chosen.copies > 1 else ""
    return Choice(
        best,
        staleness_s(chosen, now_s),
        chosen.copies > 1,
        f"of {len(candidates)} drawn it was used longest ago: {max(0, now_s - chosen.used_s)} s{others}",
    )


def sifted_s(candidate: Candidate, now_s: int, *, are_copies_left: bool) -> int:
    """When a piece of a segment that leaves counts as used: one with copies elsewhere never was, and a last copy only
    now, as long as there are others to give up."""
    if candidate.copies > 1:
        return 0
    return now_s + candidate.used_s if are_copies_left else candidate.used_s


def staleness_s(candidate: Candidate, now_s: int) -> float:
    """How long ago it was used, times the copies that there are."""
    return float(max(0, now_s - candidate.used_s)) * candidate.copies
