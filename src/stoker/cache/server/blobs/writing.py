"""Blobs that are written here: room and length first, then bytes, then the other servers, then the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from weakref import WeakValueDictionary

from stoker.base.clock import Clock
from stoker.cache.blobs.clock import REMOVED
from stoker.cache.server.blobs.buckets import BlobBucket
from stoker.cache.server.blobs.council import Council
from stoker.cache.server.blobs.holding import Holding
from stoker.cache.server.budget import Budget
from stoker.errors import ObjectTooLarge

WRITES_MAX = 256
WRITES_BYTES_MAX = 128 * 1024 * 1024
"""So much of bodies is in memory, and so many are taken, at a time."""


class BlobWriting:
    """Of one server."""

    def __init__(self, holding: Holding, council: Council, clock: Clock) -> None:
        self._holding = holding
        self._council = council
        self._clock = clock
        self._budget = Budget(WRITES_MAX, WRITES_BYTES_MAX)
        self._turns: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()

    def check_size(self, bucket: BlobBucket, size_bytes: int) -> None:
        """Raises ObjectTooLarge."""
        bytes_max = self._holding.bytes_max(bucket)
        if size_bytes > bytes_max:
            raise ObjectTooLarge(f"a blob in {bucket.name!r} has at most {bytes_max} bytes, not {size_bytes}")

    async def put(self, bucket: BlobBucket, key: str, size_bytes: int, parts: AsyncIterable[bytes]) -> None:
        """Raises ObjectTooLarge, NoRoom, CacheUnavailable: then it is not acknowledged."""
        self.check_size(bucket, size_bytes)
        taken_bytes = 2 * min(size_bytes, self._holding.block_bytes)
        await self._budget.take(taken_bytes)
        try:
            if size_bytes <= self._holding.packed_bytes_max:
                # What was there before stays if this does not come to its end.
                data = b"".join([part async for part in parts])
                parts = _one(data)
            async with self._turn(bucket, key):
                await self._put(bucket, key, size_bytes, parts)
        finally:
            self._budget.give(taken_bytes)

    async def remove(self, bucket: BlobBucket, key: str) -> None:
        """Raises CacheUnavailable: then it is not acknowledged."""
        async with self._turn(bucket, key):
            version, _ = await self._council.begin(bucket, key, REMOVED)
            self._holding.remove(bucket, key, version)
            await self._council.tell(bucket, key, version, 0)

    def _turn(self, bucket: BlobBucket, key: str) -> asyncio.Lock:
        """Many push the same at the same time: one after the other, or the first would be told that it came too
        late."""
        return self._turns.setdefault((bucket.number, key), asyncio.Lock())

    async def _put(self, bucket: BlobBucket, key: str, size_bytes: int, parts: AsyncIterable[bytes]) -> None:
        version, term = await self._council.begin(bucket, key)
        try:
            known = await self._holding.write(bucket, key, version, size_bytes, parts)
            await self._council.tell(bucket, key, version, size_bytes)
        except BaseException:
            self._holding.give_up(bucket, key, version, self._clock.wall())
            raise
        self._council.trust(bucket, known, term)


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data
