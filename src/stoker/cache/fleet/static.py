"""A fleet whose members are written down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from math import inf

from msgspec.structs import replace

from stoker.errors import ConfigError
from stoker.wire.cache_api import FleetMember


class StaticMembership:
    """Always the same members; who cannot be reached is found out by asking."""

    def __init__(self, members: Sequence[FleetMember]) -> None:
        self._members = tuple(members)
        self._changed = asyncio.Event()

    @property
    def problem(self) -> str | None:
        return None

    @property
    def confirmed_until(self) -> float:
        return inf

    @property
    def lag_s(self) -> float:
        return 0.0

    def listed(self, name: str) -> FleetMember | None:
        """The member of that name, as the list has it."""
        return next((member for member in self._members if member.name == name), None)

    async def members(self) -> AsyncGenerator[Sequence[FleetMember], None]:
        while True:
            self._changed.clear()
            yield self._members
            await self._changed.wait()

    async def announce(self, me: FleetMember) -> None:
        if all(member.name != me.name for member in self._members):
            known = ", ".join(f"{member.name} at {member.url}" for member in self._members)
            raise ConfigError(
                f"this server is {me.name} at {me.url}, which is none of its fleet's members ({known}): give --name or "
                "--advertise as they are listed"
            )
        others = tuple(member for member in self._members if member.name != me.name)
        self._members = (*others, me)
        self._changed.set()

    async def leave(self) -> None:
        self._changed.set()


def as_listed(me: FleetMember, weight: int | None, listed: FleetMember) -> FleetMember:
    """This server as the others have it in their lists: if it gave itself another share or zone, they and it would
    disagree about who owns what. `weight`: what it was told; None: nothing. Raises ConfigError."""
    if weight not in (None, listed.weight) or me.zone not in ("", listed.zone):
        raise ConfigError(
            f"this server is to have weight {me.weight} and zone {me.zone!r}, and its fleet's list says weight "
            f"{listed.weight} and zone {listed.zone!r} of {me.name}: say it in the list, the same at all servers"
        )
    return replace(me, weight=listed.weight, zone=listed.zone)
