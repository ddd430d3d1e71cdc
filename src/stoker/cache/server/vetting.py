"""Which members of the fleet this server uses, and why not the others.

A member counts once it has answered: what the membership says may be left from a server that is gone. It must be who it
is said to be, take this server's token, and keep blocks of the same size.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.route import FleetView
from stoker.cache.server.peers import PeerRefused, Peers
from stoker.errors import ConfigError, StokerError
from stoker.wire.cache_api import PROTOCOL, FleetMember, FleetStatus, MemberTrouble

log = logging.getLogger("stoker.cache")


class _Outage(NamedTuple):
    since: float
    why: str


class Vetting:
    """For one fleet. Who fails is left out of `view`, and said so once."""

    def __init__(self, view: FleetView, peers: Peers, clock: Clock, rng: Rng, block_size_bytes: int) -> None:
        self._view = view
        self._peers = peers
        self._clock = clock
        self._rng = rng
        self._block_size_bytes = block_size_bytes
        self.instance = uuid.uuid4().hex
        """This server's; another one after each start."""
        self._outages: dict[str, _Outage] = {}
        self.on_meeting: Callable[[FleetMember, FleetStatus], Awaitable[None]] = _nothing

    def troubles(self) -> list[MemberTrouble]:
        """Members that are not used."""
        now = self._clock.now()
        return [
            MemberTrouble(name, outage.why, round(now - outage.since, 3))
            for name, outage in sorted(self._outages.items())
        ]

    def keep(self, names: Iterable[str]) -> None:
        """Only these are members now."""
        self.forget((self._outages.keys() | self._view.down()) - set(names))

    def forget(self, names: Iterable[str]) -> None:
        """These are no members any more."""
        for name in names:
            self._outages.pop(name, None)
            self._view.answered(name)

    def lost(self, name: str, why: str) -> None:
        """A member cannot be used."""
        now = self._clock.now()
        self._view.failed(name, now, self._rng)
        before = self._outages.get(name)
        if before is None:
            log.warning("%s is left out until it can be used: %s", name, why)
        elif before.why != why:
            log.info("%s is still left out: %s", name, why)
        self._outages[name] = _Outage(now if before is None else before.since, why)

    async def vet(self, member: FleetMember) -> FleetStatus | None:
        """Ask a member who it is; what it says, if it is to be used."""
        try:
            said = await self._peers.fleet(member.url)
        except StokerError as error:
            self.lost(member.name, str(error))
            return None
        why = refusal(said, member.name, self._block_size_bytes)
        if why:
            self.lost(member.name, f"{member.url} cannot be used: {why}")
            return None
        if self._outages.pop(member.name, None) is not None:
            log.info("%s is back", member.name)
        self._view.answered(member.name)
        await self.on_meeting(member, said)
        return said

    async def is_twin(self, member: FleetMember) -> bool | None:
        """Whether another server than this one answers where a member is said to be, under its name. None: one answers
        that does not say who it is."""
        try:
            said = await self._peers.fleet(member.url)
        except PeerRefused:
            return None
        except StokerError:
            return False
        return said.name == member.name and said.instance != self.instance


async def _nothing(member: FleetMember, said: FleetStatus) -> None:
    pass


def refusal(said: FleetStatus, name: str, block_size_bytes: int) -> str:
    """Why a member that says this of itself is not to be used; empty if it is. Pure."""
    if said.protocol != PROTOCOL:
        return f"it speaks version {said.protocol} of the protocol, and this server {PROTOCOL}"
    if said.name != name:
        return f"the server there calls itself {said.name!r}"
    if said.block_size_bytes != block_size_bytes:
        return f"its blocks have {said.block_size_bytes} bytes, and this server's {block_size_bytes}"
    if not said.is_trusting:
        return "it does not let our token open everything: give all servers the same first token"
    return ""


def twin_error(member: FleetMember) -> ConfigError:
    """Why a server cannot be in a fleet where another one has its name."""
    return ConfigError(
        f"there is another server named {member.name!r} at {member.url}: give this one a --name of its own"
    )
