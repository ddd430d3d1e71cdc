"""What operators see and do of blobs: figures, lists, giving up; and forgetting what nobody holds."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import AsyncIterator, Mapping

from stoker._native import Name
from stoker.base.clock import Clock
from stoker.cache.blobs.clock import parse_version
from stoker.cache.blobs.votes import REMEMBERED_S
from stoker.cache.server.blobs.buckets import BlobBucket
from stoker.cache.server.blobs.holding import Holding
from stoker.cache.server.fleet import Fleet
from stoker.cache.store.store import Store
from stoker.errors import EnvironmentProblem
from stoker.wire.cache_api import BucketStatus, Evicted, ObjectInfo, ObjectPage

log = logging.getLogger("stoker.cache")
FORGET_EVERY_S = 3600.0


class BlobKeeping:
    """Of one server."""

    def __init__(
        self, store: Store, fleet: Fleet, buckets: Mapping[str, BlobBucket], holding: Holding, clock: Clock
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._buckets = buckets
        self._holding = holding
        self._clock = clock

    def row(self, bucket: BlobBucket, held: tuple[int, int], front: tuple[int, int]) -> BucketStatus:
        """Figures. `held`: bytes and blocks; `front`: hits that it answered, and their bytes."""
        return BucketStatus(
            name=bucket.name, origin="", policy="lru", held_bytes=held[0], held_blocks=held[1],
            hits=bucket.hits + front[0], misses=bucket.misses, hit_bytes=bucket.hit_bytes + front[1],
            origin_bytes=0, origin_requests=0, peer_bytes=bucket.peer_bytes,
            used_bytes=self._store.room.used_by_bucket(bucket.name),
            quota_bytes=bucket.spec.capacity_bytes, kind="blobs",
        )  # fmt: skip

    async def page(
        self, bucket: BlobBucket, prefix: str, after: str | None, limit: int, hops: int
    ) -> ObjectPage:
        """The blobs that are here, and, unless another server asks, at the others that can be reached, in the order of
        their names: the first that come after `after`."""
        found = {info.key: info for info in await self._first(bucket, prefix, after, limit)}
        if not hops:
            peers = self._fleet.peers
            pages, _ = await self._fleet.ask_all(
                lambda url: peers.list_page(url, bucket.name, prefix, after, limit, 1)
            )
            for info in (info for page in pages for info in page.objects):
                if info.key not in found or info.version > found[info.key].version:
                    found[info.key] = info
        first = [found[key] for key in sorted(found)[:limit]]
        return ObjectPage(first, first[-1].key if len(first) == limit else None)

    async def evict(self, bucket: BlobBucket, prefix: str) -> Evicted:
        """Give up what is held here under a prefix."""
        blocks = size_bytes = 0
        async for names in self._names(bucket, prefix):
            for name in names:
                given = self._holding.evict(bucket, name.key)
                blocks, size_bytes = blocks + given[0], size_bytes + given[1]
        return Evicted(blocks, size_bytes)

    async def _first(
        self, bucket: BlobBucket, prefix: str, after: str | None, limit: int
    ) -> list[ObjectInfo]:
        found: list[tuple[str, Name]] = []
        async for names in self._names(bucket, prefix):
            fitting = [(name.key, name) for name in names if after is None or name.key > after]
            found = heapq.nsmallest(limit, [*found, *fitting], key=lambda one: one[0])
        return [
            ObjectInfo(key, name.size_bytes, name.version, _written_s(name.version)) for key, name in found
        ]

    async def forget_old(self) -> None:
        """Know no more, some day, of versions whose bytes are not here: there is no end of them."""
        while True:
            try:
                await self._forget_once()
            except EnvironmentProblem as error:
                log.warning("old versions of blobs are not forgotten now: %s", error)
            await asyncio.sleep(FORGET_EVERY_S)

    async def _forget_once(self) -> None:
        before_s = self._clock.wall() - REMEMBERED_S
        for bucket in self._buckets.values():
            async for names in self._store.names(bucket.number, ""):
                for name in names:
                    if not name.container and _written_s(name.version) < before_s:
                        # It may have been written anew since it was listed.
                        now = self._store.find(bucket.number, name.key)
                        if now is not None and now.version == name.version:
                            self._store.forget(bucket.number, name.key)

    async def _names(self, bucket: BlobBucket, prefix: str) -> AsyncIterator[list[Name]]:
        async for names in self._store.names(bucket.number, prefix):
            yield [name for name in names if self._is_there(name)]

    def _is_there(self, name: Name) -> bool:
        return name.container != 0 or (not name.size_bytes and not parse_version(name.version).is_removed)


def _written_s(version: str) -> float:
    return parse_version(version).ms / 1000
