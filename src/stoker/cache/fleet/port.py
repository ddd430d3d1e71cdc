"""The membership port."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from stoker.wire.cache_api import FleetMember


class Membership(Protocol):
    """Tells who is in the fleet, and tells the others of this server."""

    @property
    def problem(self) -> str | None:
        """Why the place where the fleet meets cannot be reached now; None while it can, or nobody has tried."""
        ...

    @property
    def confirmed_until(self) -> float:
        """Until then, by `BootClock`, nobody can have it that this server is not in the fleet, and whoever `members`
        has not told of yet has come less than `lag_s` ago."""
        ...

    @property
    def lag_s(self) -> float:
        """So long after a server has come it may be that others neither know it, nor that they do not know all."""
        ...

    def members(self) -> AsyncGenerator[Sequence[FleetMember], None]:
        """The members now, then whenever they change. It outlives whatever it asks; ends only by `aclose`."""
        ...

    async def announce(self, me: FleetMember) -> None:
        """Be in the fleet from now on, as this; again, to change how. Raises ConfigError where that can never be;
        EnvironmentProblem, AccessDenied where it may be later."""
        ...

    async def leave(self) -> None:
        """Be in it no more. Never raises."""
        ...
