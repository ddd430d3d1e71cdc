"""Follows a fleet's membership for those who ask where its servers are: Envoy's endpoint discovery.

What was known last stays while the place where the fleet meets is away, and while it names nobody: a folder that looks
empty may be a mount that is gone, and Envoy's own health checks find out who is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from stoker.base.clock import Clock
from stoker.cache.fleet.envoy import (
    DiscoveryRequest,
    DiscoveryResponse,
    Endpoint,
    endpoints_of,
    host_of,
    response,
    without_names,
)
from stoker.cache.fleet.port import Membership
from stoker.cache.fleet.reach import Reach
from stoker.wire.cache_api import FleetMember

log = logging.getLogger("stoker.cache")
RESOLVE_AGAIN_S = 30.0
RESOLVE_S = 5.0
WHY_NAMELESS = (
    "%s: Envoy verifies certificates by names, and no addresses; print its bootstrap with --server-name NAME, a name "
    "that all their certificates have, or have the servers --advertise host names"
)
Resolve = Callable[[str], Awaitable[str]]
"""From a host's name to its IP address. Raises OSError."""


async def resolve_host(host: str) -> str:
    """Its address; of several always the same one, whatever order DNS gives them in. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}
    return str(min(addresses, key=lambda address: (address.version, address)))


class Discovery:
    """The endpoints of one fleet; run `follow`, and ask."""

    def __init__(self, membership: Membership, clock: Clock, resolve: Resolve = resolve_host) -> None:
        self._membership = membership
        self._clock = clock
        self._resolve = resolve
        self._reach = Reach()
        self._members: Sequence[FleetMember] = ()
        self._addresses: dict[str, str] = {}
        self._endpoints: tuple[Endpoint, ...] | None = None
        self._nameless: list[str] = []
        self._changed = asyncio.Event()
        self._is_new = asyncio.Event()

    @property
    def problem(self) -> str | None:
        """Why what is known may be old; None: it is not."""
        return self._membership.problem or self._reach.problem

    @property
    def endpoints(self) -> tuple[Endpoint, ...] | None:
        """The servers; None until somebody was found."""
        return self._endpoints

    async def follow(self) -> None:
        """Never ends by itself."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._keep_resolving())

    async def answer(self, request: DiscoveryRequest, hold_s: float) -> DiscoveryResponse | None:
        """What is newer than what the asker has, as soon as there is something; None after `hold_s` without.

        Raises ConfigError for a resource that there is not.
        """
        deadline = self._clock.now() + hold_s
        while True:
            told = response(request.resource_names, self._endpoints or ())
            if self._endpoints is not None and told.version_info != request.version_info:
                return told
            try:
                async with asyncio.timeout(deadline - self._clock.now()):
                    await self._changed.wait()
            except TimeoutError:
                return None

    async def _watch(self) -> None:
        async with contextlib.aclosing(self._membership.members()) as found:
            async for members in found:
                if not members:
                    if self._members:
                        log.warning("the fleet has no members; those that were known last are told on")
                    continue
                self._members = members
                self._is_new.set()

    async def _keep_resolving(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESOLVE_AGAIN_S):
                    await self._is_new.wait()
            self._is_new.clear()
            members = self._members
            if self._endpoints is not None:
                self._publish(members)  # at once; who has no address yet comes after
            await self._find_addresses(members)
            self._publish(members)

    async def _find_addresses(self, members: Sequence[FleetMember]) -> None:
        hosts = {place[0] for member in members if (place := host_of(member)) is not None}
        found = dict(zip(hosts, await asyncio.gather(*map(self._address, hosts)), strict=True))
        self._addresses = {host: address for host, address in found.items() if address is not None}

    async def _address(self, host: str) -> str | None:
        """The host's address; the one it had where that cannot be found out; None where there is none."""
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
        try:
            async with asyncio.timeout(RESOLVE_S):
                address = await self._resolve(host)
        except OSError as error:  # TimeoutError is one
            self._reach.failed(host, f"the address of {host} cannot be found out: {error or 'no answer'}")
            return self._addresses.get(host)
        self._reach.worked(host)
        return address

    def _publish(self, members: Sequence[FleetMember]) -> None:
        endpoints = endpoints_of(members, self._addresses)
        if not endpoints or endpoints == self._endpoints:
            return
        self._endpoints = endpoints
        nameless = without_names([endpoint.member for endpoint in endpoints])
        if nameless and nameless != self._nameless:
            log.warning(
                "%s; Envoys without --server-name do not ask them", WHY_NAMELESS % ", ".join(nameless)
            )
        self._nameless = nameless
        said = ", ".join(
            f"{e.member.name} at {e.address}:{e.port}{'' if e.member.weight else ' (leaving)'}"
            for e in endpoints
        )
        log.info("the fleet: %s", said)
        self._changed.set()
        self._changed = asyncio.Event()
