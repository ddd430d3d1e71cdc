"""First blocks that come together with what is known of their object: one request to the origin where two would be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from stoker.cache.maglev import block_owner_name
from stoker.cache.origin.port import Part
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.fetches import Fetches
from stoker.cache.server.sources import Sources, Wanted
from stoker.cache.store.known import Known
from stoker.cache.store.store import Store

BEGINNINGS_MAX = 128
"""So many objects may be asked for together with their version at the same time."""


class Beginnings:
    """Lives on one event loop. `wanted` names a block of a version for who was handed on so often, with its size;
    `is_free` says whether what is fetched now has to wait for nothing."""

    def __init__(
        self,
        store: Store,
        sources: Sources,
        fetches: Fetches[Wanted],
        wanted: Callable[[Known, int, int], tuple[Wanted, int]],
        is_free: Callable[[], bool],
    ) -> None:
        self._store = store
        self._sources = sources
        self._fetches = fetches
        self._wanted = wanted
        self._is_free = is_free
        self._reserved = 0
        self._coming = 0
        self._closing: set[asyncio.Task[None]] = set()

    def is_wanted(self, bucket: Bucket, key: str, hops: int) -> bool:
        """Whether the first block of an object is not here, nor coming."""
        known = self._store.find(bucket.number, key)
        if known is None or known.is_absent or known.size_bytes == 0:
            return True
        return not self._store.has(known, 0) and self._wanted(known, 0, hops)[0] not in self._fetches

    def reserve(self, bucket: Bucket, key: str, hops: int) -> bool:
        """Whether the first block of an object is to be asked for together with its version: it is wanted, nobody else
        may hold it, and not too many others are coming. Followed by `begin` or `release`."""
        if self._reserved + self._coming + len(self._closing) >= BEGINNINGS_MAX or not self._is_free():
            return False
        if self._sources.owner_before(block_owner_name(bucket.name, key, 0)) is not None:
            return False
        if not self.is_wanted(bucket, key, hops):
            return False
        self._reserved += 1
        return True

    def release(self) -> None:
        """Nothing comes of what was reserved."""
        self._reserved -= 1

    def begin(self, known: Known, parts: AsyncGenerator[Part, None], hops: int) -> None:
        """Fetch the first block of an object with these bytes."""
        self._reserved -= 1
        if known.size_bytes == 0:
            self._close_soon(parts)
            return
        wanted, size_bytes = self._wanted(known, 0, hops)
        if wanted in self._fetches:
            self._close_soon(parts)
            return

        def over() -> None:
            self._coming -= 1
            if self._sources.begun.get(wanted) is parts:
                del self._sources.begun[wanted]
                self._close_soon(parts)

        self._sources.begun[wanted] = parts
        self._coming += 1
        # One who wants it to its end: the readers, who are told of the version only now, find it coming.
        self._fetches.join(wanted, size_bytes).on_over = over

    async def close(self) -> None:
        """After all fetches were ended."""
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _close_soon(self, parts: AsyncGenerator[Part, None]) -> None:
        task = asyncio.get_running_loop().create_task(_close(parts))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _close(parts: AsyncGenerator[Part, None]) -> None:
    await parts.aclose()
