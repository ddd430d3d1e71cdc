"""What a cache server tells those who watch it, beside its figures."""

from __future__ import annotations

import msgspec


class Health(msgspec.Struct, frozen=True):
    """The process lives, and answers."""

    status: str = "ok"


class Readiness(msgspec.Struct, frozen=True):
    """Whether a server is to be sent requests. `why` not; `details` only for who may administer it."""

    is_ready: bool
    why: list[str] = []
    details: list[str] = []


class Balance(msgspec.Struct, frozen=True):
    """How a server stands beside the others of its fleet, and whether it is large enough."""

    owned_ratio: float = 1.0
    """The part of all blocks that it owns now."""
    fair_ratio: float = 1.0
    """The part that it owns by its weight while all members are there."""
    shortest_unused_s: int | None = None
    """The shortest time since its last use of all that left for room in the last hour; None: nothing did."""
    unready: list[str] = []
    """Why it wants no requests."""
