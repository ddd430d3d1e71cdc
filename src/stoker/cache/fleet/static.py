"""A fleet whose members are written down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from stoker.wire.cache_api import FleetMember


class StaticMembership:
    """Always the same members; who cannot be reached is found out by asking."""

    def __init__(self, members: Sequence[FleetMember]) -> None:
        self._members = tuple(members)
        self._changed = asyncio.Event()

    async def members(self) -> AsyncGenerator[Sequence[FleetMember], None]:
        while True:
            self._changed.clear()
            yield self._members
            await self._changed.wait()

    async def announce(self, me: FleetMember) -> None:
        others = tuple(member for member in self._members if member.name != me.name)
        self._members = (*others, me)
        self._changed.set()

    async def leave(self) -> None:
        self._changed.set()
