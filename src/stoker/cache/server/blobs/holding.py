"""What is held of blobs: as objects of the store, whose versions this server gives, or was told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from contextlib import suppress

from stoker._native import FileProblem
from stoker.base.ranges import ByteRange
from stoker.cache.blobs.clock import REMOVED, HybridClock, Version, parse_version
from stoker.cache.blobs.votes import Said
from stoker.cache.layout import block_count, split
from stoker.cache.server.blobs.buckets import BlobBucket
from stoker.cache.server.port import Answer
from stoker.cache.store.known import Known, is_held
from stoker.cache.store.store import Store, known_of
from stoker.errors import CacheUnavailable, EnvironmentProblem, ObjectNotFound

NOTHING = Said("", False)


class NoRoom(EnvironmentProblem):
    """A blob cannot be stored now."""


class Holding:
    """Of one store. An entry of a key without bytes says that this server has heard of that version; who is asked then
    gives nothing that is older."""

    def __init__(self, store: Store, clock: HybridClock) -> None:
        self._store = store
        self._clock = clock
        self._coming: set[tuple[int, str, str]] = set()
        """Versions that are being written."""

    @property
    def packed_bytes_max(self) -> int:
        """Up to this size a blob is stored at once."""
        return self._store.holdings.packed_bytes_max

    @property
    def block_bytes(self) -> int:
        """Larger ones are stored in parts of this size."""
        return self._store.holdings.block_size_bytes

    def bytes_max(self, bucket: BlobBucket) -> int:
        """How large a blob may be."""
        return min(bucket.spec.capacity_bytes, self._store.room.limit_bytes)

    def known(self, bucket: BlobBucket, key: str) -> Known | None:
        """The newest version that this server has heard of. Raises EnvironmentProblem: the index cannot be read."""
        try:
            found = self._store.index.find(bucket.number, key)
        except FileProblem as problem:
            raise EnvironmentProblem(str(problem)) from problem
        return None if found is None else known_of(bucket.number, key, found)

    def said(self, bucket: BlobBucket, key: str) -> Said:
        """What to tell others of a key. Raises EnvironmentProblem: nothing can be told of it."""
        known = self.known(bucket, key)
        return NOTHING if known is None else Said(known.version, self.is_whole(known), known.size_bytes)

    def is_whole(self, known: Known) -> bool:
        """Whether all of that version is here."""
        if parse_version(known.version).is_removed or self._is_coming(known):
            return False
        if not known.size_bytes:
            return True
        found = self._store.index.find(known.bucket, known.key, True)
        if found is None or found.tag != known.tag:
            return False
        if not found.is_large:
            return is_held(found, 0)
        return all(is_held(found, block) for block in range(block_count(known.size_bytes, self.block_bytes)))

    def hear(self, bucket: BlobBucket, key: str, version: Version, size_bytes: int) -> Version:
        """Another server has that version. Older bytes are given up; what is the newest that is known now."""
        self._clock.observe(version)
        known = self.known(bucket, key)
        if known is not None and known.version >= str(version):
            return parse_version(known.version)
        self._learn(bucket, key, version, size_bytes)
        return version

    def trust(self, known: Known) -> None:
        """It is the newest as of now, if it still is that here."""
        now = self._store.find(known.bucket, known.key)
        if now is not None and now.version == known.version:
            self._store.learn(known.bucket, known.key, known.version, known.size_bytes)

    async def write(
        self, bucket: BlobBucket, key: str, version: Version, size_bytes: int, parts: AsyncIterable[bytes]
    ) -> Known:
        """Store a version as it comes; what was there before is given up. Raises CacheUnavailable where a newer one has
        been heard of meanwhile; NoRoom, after all has come."""
        before = self.known(bucket, key)
        if before is not None and before.version > str(version):
            raise CacheUnavailable(f"a newer version of {key!r} has come meanwhile")
        known = self._learn(bucket, key, version, size_bytes)
        coming = known.bucket, known.key, known.version
        self._coming.add(coming)
        try:
            if not await self._store_parts(known, parts):
                raise NoRoom(
                    self._store.problem or f"there is no room for {size_bytes} bytes in {bucket.name!r} now"
                )
        finally:
            self._coming.discard(coming)
        return known

    def remove(self, bucket: BlobBucket, key: str, version: Version) -> None:
        """From that version on there is none."""
        self._learn(bucket, key, version, 0)

    def give_up(self, bucket: BlobBucket, key: str, version: Version, now_s: float) -> None:
        """A version that did not come to its end; that there was one is still known. Where that cannot be written down,
        it may be served: nobody was told that it was not written."""
        with suppress(EnvironmentProblem):
            known = self.known(bucket, key)
            if known is not None and known.version == str(version):
                self._learn(bucket, key, self._clock.next(now_s, REMOVED), 0)

    def drop_rest(self, known: Known) -> None:
        """A part of it has left: what is left of it is of no use."""
        if not self._is_coming(known):
            self._store.give_up(known.bucket, known.key)

    def evict(self, bucket: BlobBucket, key: str) -> tuple[int, int]:
        """Give up what is held of a key; how many blocks, and bytes, that were."""
        known = self.known(bucket, key)
        if known is None or self._is_coming(known):
            return 0, 0
        return self._store.give_up(bucket.number, key)

    async def send(
        self, known: Known, part: ByteRange | None, answer: Answer, start: Callable[[], None]
    ) -> None:
        """Write the body; `start` writes the head, once it is sure that there are bytes. Raises ObjectNotFound where
        they are gone before, and ConnectionAbortedError after."""
        first, stop = part or (0, known.size_bytes)
        for span in split(first, stop, self.block_bytes):
            piece = await self._store.verified(known, span.index)
            if piece is None and not answer.has_started:
                self.drop_rest(known)
                raise ObjectNotFound(f"no blob {known.key!r}")
            if not answer.has_started:
                start()
            if piece is None or not answer.piece(piece, span.start, span.stop):
                raise ConnectionAbortedError(f"{known.key!r} has left while it was sent")
            await answer.drain()
        if not answer.has_started:
            start()

    def _learn(self, bucket: BlobBucket, key: str, version: Version, size_bytes: int) -> Known:
        """Raises NoRoom if it cannot be written down."""
        known = self._store.learn(bucket.number, key, str(version), size_bytes, checked_s=0, stays_true=True)
        if not known.tag:
            raise NoRoom(self._store.problem or f"the index does not take {key!r}")
        return known

    def _is_coming(self, known: Known) -> bool:
        return (known.bucket, known.key, known.version) in self._coming

    async def _store_parts(self, known: Known, parts: AsyncIterable[bytes]) -> bool:
        """Whether all is stored, or is no longer to be, for a newer version has come."""
        step = self.block_bytes
        buffer, index, is_stored = bytearray(), 0, True
        async for part in parts:
            buffer += part
            while len(buffer) >= step:
                is_stored = is_stored and await self._put(known, index, bytes(buffer[:step]))
                del buffer[:step]
                index += 1
        if buffer:
            is_stored = is_stored and await self._put(known, index, bytes(buffer))
        now = self._store.find(known.bucket, known.key)
        return is_stored or (now is not None and now.version != known.version)

    async def _put(self, known: Known, index: int, data: bytes) -> bool:
        # What is begun is written to its end, also where the body ends early meanwhile.
        return await asyncio.shield(self._store.put(known, index, data))
