"""Buckets, pointers and blocks: what a server knows and how it gets what it does not."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.layout import DEFAULT_BLOCK_SIZE_BYTES, BlockId, block_bounds, block_count
from stoker.cache.limits import OriginLimits
from stoker.cache.origin.guarded import GuardedOrigin
from stoker.cache.origin.port import Origin
from stoker.cache.server.budget import Budget
from stoker.cache.server.flights import Flights
from stoker.cache.store.port import Store, StoredPointer
from stoker.cache.store.shelf import Held, Shelf
from stoker.errors import ConfigError, CorruptBlock, ObjectChanged, ObjectNotFound, OriginError
from stoker.wire.cache_api import BucketSpec, ObjectInfo

FETCHES_MAX = 128
FETCH_BYTES_MAX = 128 * 1024 * 1024
HOT_BYTES_MAX = 96 * 1024 * 1024


class Pointer:
    """What version a key points to, and when the origin last said so."""

    __slots__ = ("bucket", "checked_at", "first_block", "head", "key", "size_bytes", "version")

    def __init__(self, bucket: str, key: str, version: str, size_bytes: int, checked_at: float) -> None:
        self.bucket = bucket
        self.key = key
        self.version = version
        self.size_bytes = size_bytes
        self.checked_at = checked_at
        self.first_block = BlockId(bucket, key, version, 0)
        self.head: bytes | None = None

    def block(self, index: int) -> BlockId:
        return self.first_block if index == 0 else BlockId(self.bucket, self.key, self.version, index)


@dataclass(slots=True)
class Bucket:
    """A bucket with its origin, its pointers and its figures."""

    name: str
    spec: BucketSpec
    origin: GuardedOrigin
    pointers: dict[str, Pointer] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    path_hits: int = 0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of one server, in bytes."""

    capacity_bytes: int
    block_size_bytes: int = DEFAULT_BLOCK_SIZE_BYTES
    hot_bytes_max: int = HOT_BYTES_MAX


class Engine:
    """Lives on one event loop. `open_origin` makes an origin from a URL."""

    def __init__(
        self, store: Store, settings: EngineSettings, open_origin: Callable[[str], Origin], clock: Clock
    ) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.block_size_bytes = settings.block_size_bytes
        self._store = store
        self._clock = clock
        self._rng = Rng(int(clock.wall() * 1e6))
        self._open_origin = open_origin
        self.shelf = Shelf(store, settings.capacity_bytes, settings.hot_bytes_max, self._policy_of, clock)
        self._stats: Flights[tuple[str, str], Pointer] = Flights(self._stat)
        self._fetches: Flights[BlockId, bytes] = Flights(self._fetch)
        self._budget = Budget(FETCHES_MAX, FETCH_BYTES_MAX)
        # Of buckets that nobody has named yet since the start.
        self._waiting_pointers: dict[str, dict[str, Pointer]] = {}
        self._known_origins: dict[str, str] = {}

    def load(self, specs: dict[str, BucketSpec]) -> list[str]:
        """Open the buckets and take in what the store holds; returns notes for the operator."""
        loaded = self._store.load()
        self._known_origins = dict(loaded.origins)
        offset_s = self._clock.now() - self._clock.wall()
        for stored in loaded.pointers:
            pointer = Pointer(
                stored.bucket, stored.key, stored.version, stored.size_bytes, stored.checked_wall_s + offset_s
            )
            self._waiting_pointers.setdefault(stored.bucket, {})[stored.key] = pointer
        for name, spec in specs.items():
            self.add_bucket(name, spec)
        moved = set(loaded.origins) - set(self._known_origins)
        for block, size_bytes, crc in loaded.blocks:
            if block.bucket in moved:
                self._store.delete(block)
            else:
                self.shelf.adopt(block, size_bytes, crc)
        return loaded.notes

    def add_bucket(self, name: str, spec: BucketSpec) -> bool:
        """Add a bucket; False if the very same is there. Raises ConfigError if another of that name is."""
        known = self.buckets.get(name)
        if known is not None:
            if known.spec == spec:
                return False
            raise ConfigError(f"there is a bucket {name!r} already, with another origin or other settings")
        limits = OriginLimits(
            bytes_per_s=spec.origin_bytes_per_s,
            requests_per_s=spec.origin_requests_per_s,
            hedges=spec.hedges,
        )
        origin = GuardedOrigin(
            self._open_origin(spec.origin_url), limits, self._clock, self._rng.fork(len(self.buckets))
        )
        pointers = self._waiting_pointers.pop(name, {})
        if self._known_origins.get(name, origin.url) != origin.url:
            # Another origin's content must never be served under this name.
            for pointer in pointers.values():
                self._forget_blocks(pointer)
                self._store.drop_pointer(name, pointer.key)
            pointers = {}
            del self._known_origins[name]
        self._store.save_origin(name, origin.url)
        self.buckets[name] = Bucket(name, spec, origin, pointers)
        return True

    def bucket(self, name: str) -> Bucket:
        """Raises ObjectNotFound if there is no such bucket."""
        found = self.buckets.get(name)
        if found is None:
            known = ", ".join(sorted(self.buckets)) or "none yet"
            raise ObjectNotFound(f"no bucket {name!r}; there are: {known}")
        return found

    def fresh(self, bucket: Bucket, key: str) -> Pointer | None:
        """The pointer of a key if it need not be checked with the origin."""
        pointer = bucket.pointers.get(key)
        if pointer is None or self._clock.now() - pointer.checked_at > bucket.spec.ttl_s:
            return None
        return pointer

    async def locate(self, bucket: Bucket, key: str) -> Pointer:
        """The pointer of a key; asks the origin if it is unknown or old.

        Raises ObjectNotFound; OriginError if the origin fails and nothing recent enough is known.
        """
        pointer = self.fresh(bucket, key)
        if pointer is not None:
            return pointer
        try:
            return await self._stats.get((bucket.name, key))
        except OriginError:
            stale = bucket.pointers.get(key)
            allowed_s = bucket.spec.ttl_s + bucket.spec.stale_if_error_s
            if stale is not None and self._clock.now() - stale.checked_at <= allowed_s:
                return stale
            raise

    async def block(self, pointer: Pointer, index: int) -> Held | bytes:
        """A block: held and verified, or its bytes as they came from the origin.

        Raises ObjectChanged (the pointer is dropped), ObjectNotFound, OriginError.
        """
        block = pointer.block(index)
        held = self.shelf.find(block)
        if held is not None:
            try:
                await self.shelf.verify(held)
            except CorruptBlock:
                held = None
        if held is not None:
            return held
        return await self.fetch(pointer, index)

    async def fetch(self, pointer: Pointer, index: int) -> bytes:
        """A block's bytes from the origin, together with all who want them now."""
        try:
            return await self._fetches.get(pointer.block(index))
        except (ObjectChanged, ObjectNotFound):
            bucket = self.buckets[pointer.bucket]
            known = bucket.pointers.get(pointer.key)
            if known is not None and known.version == pointer.version:
                self._drop(bucket, known)
            raise

    def learn(self, bucket: Bucket, info: ObjectInfo) -> Pointer:
        """Take in what the origin says about an object."""
        now = self._clock.now()
        known = bucket.pointers.get(info.key)
        if known is not None and known.version == info.version and known.size_bytes == info.size_bytes:
            known.checked_at = now
            pointer = known
        else:
            if known is not None:
                self._forget_blocks(known)
            pointer = Pointer(bucket.name, info.key, info.version, info.size_bytes, now)
            bucket.pointers[info.key] = pointer
        self._store.save_pointer(
            StoredPointer(bucket.name, info.key, info.version, info.size_bytes, self._clock.wall())
        )
        return pointer

    async def list(
        self, bucket: Bucket, prefix: str, after: str | None, limit: int
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        """Pages as the origin gives them; each fills the pointers."""
        async with aclosing(bucket.origin.list(prefix, after, limit)) as pages:
            async for page in pages:
                for info in page:
                    self.learn(bucket, info)
                yield page

    def refresh(self, bucket: Bucket, prefix: str) -> int:
        """Drop the pointers under a prefix, so that the next reader asks the origin. Returns how many."""
        dropped = [pointer for key, pointer in bucket.pointers.items() if key.startswith(prefix)]
        for pointer in dropped:
            # It stays as too old for any use, so that the blocks of a version that is no more can be found.
            pointer.checked_at = -math.inf
            self._store.drop_pointer(bucket.name, pointer.key)
        return len(dropped)

    async def close(self) -> None:
        """Stop fetching and make the index durable."""
        await self._fetches.close()
        await self._stats.close()
        for bucket in self.buckets.values():
            await bucket.origin.close()
        self._store.close()

    def _policy_of(self, name: str) -> str:
        bucket = self.buckets.get(name)
        return "lru" if bucket is None else bucket.spec.policy

    def _drop(self, bucket: Bucket, pointer: Pointer) -> None:
        self._forget_blocks(pointer)
        del bucket.pointers[pointer.key]
        self._store.drop_pointer(bucket.name, pointer.key)

    def _forget_blocks(self, pointer: Pointer) -> None:
        for index in range(block_count(pointer.size_bytes, self.block_size_bytes)):
            self.shelf.discard(pointer.block(index))

    async def _stat(self, name: tuple[str, str]) -> Pointer:
        bucket = self.buckets[name[0]]
        try:
            info = await bucket.origin.stat(name[1])
        except ObjectNotFound:
            known = bucket.pointers.get(name[1])
            if known is not None:
                self._drop(bucket, known)
            raise
        return self.learn(bucket, info)

    async def _fetch(self, block: BlockId) -> bytes:
        bucket = self.buckets[block.bucket]
        pointer = bucket.pointers.get(block.key)
        if pointer is None or pointer.version != block.version:
            raise ObjectChanged(f"{block.key!r} in {block.bucket!r} changed while it was read")
        held = self.shelf.find(block)
        if held is not None:
            # A fetch that was aborted had already handed its bytes to the disk.
            with suppress(CorruptBlock):
                return self.shelf.bytes_of(held)
        start, stop = block_bounds(pointer.size_bytes, self.block_size_bytes, block.index)
        await self._budget.take(stop - start)
        try:
            data = await bucket.origin.read(block.key, start, stop, block.version)
            await self.shelf.put(block, data)
        finally:
            self._budget.give(stop - start)
        return data
