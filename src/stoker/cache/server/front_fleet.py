"""Tells the front who owns what in the fleet, so that it can ask the owners of small objects itself."""

from __future__ import annotations

import asyncio
import logging
import socket
from urllib.parse import urlsplit

from stoker._native import Fleet, Front
from stoker.base.clock import Clock
from stoker.cache.maglev import Placement
from stoker.cache.server.engine import Engine

log = logging.getLogger("stoker.cache")
LOOK_UP_EVERY_S = 15.0
"""Names of hosts may stand for other addresses by then."""
CONNECT_S = 1.0
"""What one of several addresses of a host may take to answer."""
_UNKNOWN = "", 0
Address = tuple[str, int]


class FrontFleet:
    """Lives on one event loop. `tells_of_reads`: logs do, so that the back has to hear of all that servers ask."""

    def __init__(self, front: Front, engine: Engine, clock: Clock, *, tells_of_reads: bool) -> None:
        self._front = front
        self._fleet = engine.fleet
        self._buckets = engine.buckets
        self._clock = clock
        self._tells_of_reads = tells_of_reads
        self._told: tuple[Placement | None, list[Address]] | None = None
        self._names: list[str] = []
        self._table = b""
        self._addresses: dict[str, Address] = {}
        self._looked_up_at = -LOOK_UP_EVERY_S
        self._looking_up: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Tell the front if others are in the fleet, or can be reached, or are elsewhere than it was told."""
        fleet = self._fleet
        is_in = fleet.me.name in (member.name for member in fleet.view.members)
        placement = fleet.view.placement() if is_in and not fleet.is_alone else None
        if self._told is None or self._told[0] is not placement:
            self._names, self._table = ([], b"") if placement is None else placement.table()
        urls = [fleet.url(name) or "" for name in self._names]
        self._look_up_soon(set(urls) - {""})
        addresses = [self._addresses.get(url, _UNKNOWN) for url in urls]
        if self._told is not None and self._told[0] is placement and self._told[1] == addresses:
            return
        self._told = placement, addresses
        me = self._names.index(fleet.me.name) if fleet.me.name in self._names else -1
        buckets = {
            # Of what several keep, the back draws by chance whom it asks, and keeps what comes.
            name: (bucket.mark, not self._tells_of_reads and bucket.spec.max_replicas == 1)
            for name, bucket in self._buckets.items()
        }
        authorization = fleet.peers.links.authorization
        self._front.set_fleet(Fleet(addresses, self._table, me, authorization, buckets, self._tells_of_reads))

    def tell(self) -> None:
        """The same in any case: there are other buckets."""
        self._told = None
        self.look()

    async def stop(self) -> None:
        """Look up nothing any more."""
        if self._looking_up is not None:
            self._looking_up.cancel()
            await asyncio.gather(self._looking_up, return_exceptions=True)

    def _look_up_soon(self, urls: set[str]) -> None:
        is_due = self._clock.now() - self._looked_up_at >= LOOK_UP_EVERY_S or urls - self._addresses.keys()
        if not urls or not is_due or not (self._looking_up is None or self._looking_up.done()):
            return
        self._looked_up_at = self._clock.now()
        self._looking_up = asyncio.get_running_loop().create_task(self._look_up(urls))

    async def _look_up(self, urls: set[str]) -> None:
        # Those that are not found stay unknown until all are looked up again: the back asks them.
        told = self._addresses
        found = await asyncio.gather(*(_address_of(url, told.get(url, _UNKNOWN)) for url in urls))
        self._addresses = dict(zip(urls, found, strict=True))


async def _address_of(url: str, told: Address) -> Address:
    """Where a server is that speaks plain HTTP; of one that does not, or cannot be found, nothing is told."""
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            return _UNKNOWN
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        log.debug("%s cannot be found: %s", url, error)
        return _UNKNOWN
    hosts = dict.fromkeys(str(one[4][0]) for one in found)
    # Those with a `%` are of one link only.
    return await first_that_answers([(host, parts.port) for host in hosts if "%" not in host], told)


async def first_that_answers(found: list[Address], told: Address) -> Address:
    """Of the addresses of a host, `told` if it is still one of them: they come in another order each time."""
    ordered = sorted(found, key=lambda address: address != told)
    if len(ordered) > 1:
        for address in ordered:
            if await _answers(address):
                return address
    return ordered[0] if ordered else _UNKNOWN


async def _answers(address: Address) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(*address)
    except OSError:  # a TimeoutError among them
        return False
    writer.close()
    return True
