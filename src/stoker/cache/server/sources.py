"""Where a block comes from: from other servers of the fleet, or from the origin."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from stoker.base.clock import Clock
from stoker.cache.layout import block_bounds
from stoker.cache.maglev import block_owner_name
from stoker.cache.origin.port import Part
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.inquiry import part_of_request
from stoker.cache.server.landing import Landing
from stoker.cache.store.known import Known
from stoker.errors import CacheUnavailable, ShortBody, StokerError
from stoker.wire.cache_api import HOPS_MAX

log = logging.getLogger("stoker.cache")
HANDOVER_S = 600.0
"""So long after the fleet has changed, who owned a block before is asked whether it holds it."""


class Wanted(NamedTuple):
    """A block of a version: what fetches are told apart by. `tag`: see Known. One that was handed on often enough is
    never the same as one that may be handed on: two servers would wait for each other."""

    bucket: int
    key: str
    version: str
    size_bytes: int
    tag: int
    block: int
    hops: int

    @property
    def known(self) -> Known:
        return Known(self.bucket, self.key, self.version, self.size_bytes, self.tag, 0)


class Sources:
    """Lives on one event loop. `begun`: first bytes that came together with what is known of their object, and are
    still to be taken."""

    def __init__(self, fleet: Fleet, clock: Clock, block_size_bytes: int) -> None:
        self._fleet = fleet
        self._clock = clock
        self._block_size_bytes = block_size_bytes
        self.begun: dict[Wanted, AsyncGenerator[Part, None]] = {}

    async def fill(self, wanted: Wanted, bucket: Bucket, landing: Landing) -> None:
        """Fill a landing from where it stands. Raises what the last of those who were asked fails with."""
        is_ours = wanted in self.begun or self._fleet.is_alone
        if is_ours or not await self._from_peers(wanted, bucket, landing):
            await self._from_origin(wanted, bucket, landing)
        if not landing.is_whole:
            raise ShortBody(f"{landing.filled} of {landing.size_bytes} bytes came of {wanted.key!r}")

    def owner_before(self, name: str) -> tuple[str, str] | None:
        """Who owned a block until the fleet changed, and may hold it still, with its URL; only if this server owns it
        now."""
        if self._clock.now() - self._fleet.changed_at > HANDOVER_S:
            return None
        owner = self._fleet.view.placement().owner(name)
        before = self._fleet.view.owner_before(name)
        url = None if before is None else self._fleet.url(before)
        if before is None or url is None or owner is None or owner.name != self._fleet.me.name:
            return None
        return before, url

    async def _from_origin(self, wanted: Wanted, bucket: Bucket, landing: Landing) -> None:
        parts = self.begun.pop(wanted, None)
        if parts is None:
            start, stop = block_bounds(wanted.size_bytes, self._block_size_bytes, wanted.block)
            parts = bucket.origin.stream(wanted.key, start + landing.filled, stop, wanted.version)
        log.debug("block %d of %s/%s comes from the origin", wanted.block, bucket.name, wanted.key)
        with part_of_request("origin fetch", **_told_of(wanted, bucket)):
            async with aclosing(parts):
                async for part in parts:
                    landing.take(part)

    async def _from_peers(self, wanted: Wanted, bucket: Bucket, landing: Landing) -> bool:
        """Whether a peer had it all. What one cannot give, the next goes on with, and then the origin."""
        name = block_owner_name(bucket.name, wanted.key, wanted.block)
        for peer, url in self._fleet.candidates(name, bucket.spec.max_replicas, wanted.hops):
            if await self._from_peer(peer, url, wanted, bucket, landing, wanted.hops + 1):
                return True
        before = await self._holder_before(name, wanted, bucket)
        return before is not None and await self._from_peer(*before, wanted, bucket, landing, HOPS_MAX)

    async def _from_peer(
        self, peer: str, url: str, wanted: Wanted, bucket: Bucket, landing: Landing, hops: int
    ) -> bool:
        start, stop = block_bounds(wanted.size_bytes, self._block_size_bytes, wanted.block)
        at = start + landing.filled
        parts = self._fleet.peers.stream(url, bucket.name, wanted.key, at, stop, wanted.version, hops)
        log.debug("block %d of %s/%s comes from %s", wanted.block, bucket.name, wanted.key, peer)
        try:
            with part_of_request("peer fetch", peer=peer, **_told_of(wanted, bucket)):
                await self._take(parts, bucket, landing)
        except CacheUnavailable as error:
            self._fleet.lost(peer, error)
        except StokerError:
            return False  # it knows another version, or its origin fails: the origin has the last word
        return landing.is_whole

    async def _take(self, parts: AsyncGenerator[Part, None], bucket: Bucket, landing: Landing) -> None:
        async with aclosing(parts):
            async for part in parts:
                landing.take(part)
                bucket.peer_bytes += len(part)

    async def _holder_before(self, name: str, wanted: Wanted, bucket: Bucket) -> tuple[str, str] | None:
        """The owner before, if it says that it holds the block."""
        found = self.owner_before(name)
        if found is None:
            return None
        before, url = found
        try:
            question = [(wanted.key, wanted.version, wanted.block)]
            held = (await self._fleet.peers.held(url, bucket.name, question)).held
        except CacheUnavailable as error:
            self._fleet.lost(before, error)
            return None
        except StokerError:
            return None
        return found if held[0] else None


def _told_of(wanted: Wanted, bucket: Bucket) -> dict[str, str]:
    """What traces tell of a fetch."""
    return {"bucket": bucket.name, "key": wanted.key, "block": str(wanted.block)}
