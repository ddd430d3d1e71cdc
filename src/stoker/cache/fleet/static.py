"""A fleet whose members are written down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

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
