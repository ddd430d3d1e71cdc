"""One server's place in the membership of its fleet: it comes, stays the only one of its name, and goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from stoker.base.backoff import backoff_s
from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.fleet.port import Membership
from stoker.cache.maglev import Member
from stoker.cache.server.vetting import Vetting, twin_error
from stoker.errors import ConfigError, StokerError
from stoker.wire.cache_api import FleetMember

log = logging.getLogger("stoker.cache")
RETRY_FIRST_S = 0.5
RETRY_LIMIT_S = 5.0
RETIRE_S = 1.5
CLAIM_S = 10.0
"""Longer than any membership tells of a server that is gone."""
DOUBLED_S = 60.0
AGAIN_S = 2.0


class Attending:
    """Members are told of once they have been asked who they are."""

    def __init__(
        self, me: FleetMember, membership: Membership, vetting: Vetting, clock: Clock, rng: Rng
    ) -> None:
        self._me = me
        self._membership = membership
        self._vetting = vetting
        self._clock = clock
        self._rng = rng
        self._doubled_at: float | None = None
        self._found = membership.members()
        self._known: dict[str, tuple[str, str]] = {}
        self._is_leaving = False
        self._telling: asyncio.Task[None] | None = None
        self._defect: str | None = None

    @property
    def problem(self) -> str | None:
        """Why the membership cannot be reached, or used; None while it can."""
        return self._membership.problem or self._defect

    @property
    def confirmed_until(self) -> float:
        """As `Membership` has it, of what was told of by now."""
        return self._membership.confirmed_until

    @property
    def notes(self) -> list[str]:
        """What operators should know besides."""
        if self._doubled_at is None or self._clock.now() - self._doubled_at > DOUBLED_S:
            return []
        return [
            f"another server tells the fleet that it is {self._me.name!r} at {self._me.url}, as this one does, so that "
            "neither knows of the other: give each a --name of its own, and an --advertise URL by which all reach it"
        ]

    async def join(self) -> list[FleetMember]:
        """Be a member, however long that takes; the others. Raises ConfigError."""
        found = await self._find()
        others = [member for member in found if member.name != self._me.name]
        await self._vet(others)
        await self._announce()
        return others

    async def _find(self) -> list[FleetMember]:
        """All members, as soon as none of them is another server of this one's name. What the membership says may be
        left from this server before it crashed, and another server answer there by now, which does not say who it is:
        that goes away by itself. Raises ConfigError."""
        found, twin = await anext(self._found), None
        members: list[FleetMember] = []
        try:
            async with asyncio.timeout(CLAIM_S) as limit:
                while True:
                    members = [member for member in found if is_good(member)]
                    twin, is_sure = await self._twin(members)
                    if twin is None:
                        return members
                    if is_sure:
                        raise twin_error(twin)
                    found = await anext(self._found)
        except TimeoutError:
            if not limit.expired():
                raise
            if twin is None:
                return members  # who has not answered by now does not use this server's name
            raise twin_error(twin) from None

    async def changes(self) -> AsyncGenerator[list[FleetMember], None]:
        """All members, whenever they have changed. Raises ConfigError where another server has this one's name."""
        async for found in self._found:
            members = [member for member in found if is_good(member)]
            await self._keep_name(members)
            others = [member for member in members if member.name != self._me.name]
            await self._vet(others)
            yield [*others, self._me]
            self._defect = None

    async def steadily(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do it again, some time after whatever unforeseen ends it: what others write down may be anything, and one
        such record must not end this server's part in its fleet."""
        while True:
            try:
                return await work()
            except StokerError:
                raise
            except Exception as error:
                log.exception("looking after the fleet failed, and is tried again")
                self._defect = f"what it says cannot be used: {error or type(error).__name__}"
            await asyncio.sleep(AGAIN_S)
            await self._found.aclose()
            self._found = self._membership.members()  # which says all that it knows
            self._known = {}

    async def retire(self) -> None:
        """Own nothing any more; returns once the others can know."""
        if self._is_leaving:
            return
        self._is_leaving = True
        self._me = msgspec.structs.replace(self._me, weight=0)
        try:
            async with asyncio.timeout(RETIRE_S):
                await self._membership.announce(self._me)
        except (StokerError, TimeoutError) as error:
            log.warning("the fleet cannot be told that this server leaves: %s", error)
            return
        await asyncio.sleep(RETIRE_S)

    async def leave(self) -> None:
        """Be a member no more; nobody else may be at work with this."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        await self._found.aclose()
        await self._membership.leave()

    async def _announce(self) -> None:
        attempt = 0
        while True:
            try:
                await self._membership.announce(self._me)
            except ConfigError:
                raise
            except StokerError as error:
                attempt += 1
                log.debug("the fleet cannot be joined: %s", error)
                wait_s = backoff_s(attempt, self._rng, first_s=RETRY_FIRST_S, limit_s=RETRY_LIMIT_S)
                await asyncio.sleep(RETRY_FIRST_S + wait_s)
            else:
                return

    async def _vet(self, others: Sequence[FleetMember]) -> None:
        """Ask those who they are who were not asked yet, since they started."""
        before = self._known
        now = {member.name: (member.url, member.instance) for member in others}
        new = [member for member in others if before.get(member.name) != now[member.name]]
        await asyncio.gather(*(self._vetting.vet(member) for member in new))
        self._known = now

    async def _twin(self, members: Iterable[FleetMember]) -> tuple[FleetMember | None, bool]:
        """Another server that has this one's name, and whether that is sure."""
        claims = [member for member in members if self._is_claim(member)]
        said = await asyncio.gather(*(self._vetting.is_twin(member) for member in claims))
        for member, is_twin in zip(claims, said, strict=True):
            if is_twin is not False:
                return member, is_twin is True
        return None, True

    def _is_claim(self, member: FleetMember) -> bool:
        """Whether another server is said to be the one of this name. One that is leaving is it no more."""
        return member.name == self._me.name and member.url != self._me.url and member.weight > 0

    def _is_double(self, member: FleetMember) -> bool:
        """Whether another start of a server is said to be this very one."""
        is_me = (member.name, member.url) == (self._me.name, self._me.url)
        return is_me and member.weight > 0 and member.instance not in ("", self._me.instance)

    async def _keep_name(self, members: list[FleetMember]) -> None:
        """Stay a member, and the one of this name, or leave: two that came at the same time did not see each other, and
        the one with the smaller URL stays. Two with the same URL are only told of: what this server announced has
        replaced what was left from its last start, so another one is at work. Raises ConfigError."""
        if any(map(self._is_double, members)):
            was_told, self._doubled_at = bool(self.notes), self._clock.now()
            if not was_told:
                log.warning("%s", self.notes[0])
        is_there = any(member.name == self._me.name for member in members)
        if self._is_leaving or (is_there and not any(map(self._is_claim, members))):
            return
        twin, _ = await self._twin(members)
        if twin is not None and twin.url < self._me.url:
            self._is_leaving = True
            raise twin_error(twin)
        log.warning("the membership does not say that this server is %s: it is told again", self._me.name)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.get_running_loop().create_task(self._tell_again())

    async def _tell_again(self) -> None:
        """However long it takes: nobody else may remind it."""
        await asyncio.sleep(RETRY_FIRST_S)
        with suppress(StokerError):
            await self._announce()


def is_good(member: FleetMember) -> bool:
    """Whether a member can be asked, and placed; what others wrote down may be anything."""
    try:
        parts = urlsplit(member.url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port:
            Member(member.name, member.weight, member.zone)
            return True
    except ValueError:
        pass
    log.warning("%r at %r is no member of a fleet, and left out", member.name, member.url)
    return False
