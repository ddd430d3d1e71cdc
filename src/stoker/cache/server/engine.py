"""Buckets, pointers and blocks: what a server knows and how it gets what it does not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import NamedTuple

from stoker._native import Piece
from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.layout import block_bounds
from stoker.cache.limits import OriginLimits
from stoker.cache.origin.guarded import GuardedOrigin
from stoker.cache.origin.port import Origin
from stoker.cache.server.budget import Budget
from stoker.cache.server.fetches import Fetches, Ticket
from stoker.cache.server.flights import Flights
from stoker.cache.server.landing import Landing
from stoker.cache.store.known import Known
from stoker.cache.store.store import Store
from stoker.errors import ConfigError, CorruptBlock, ObjectChanged, ObjectNotFound, OriginError
from stoker.wire.cache_api import BucketSpec, ObjectInfo

FETCHES_MAX = 128
FETCH_BYTES_MAX = 128 * 1024 * 1024


@dataclass(slots=True)
class Bucket:
    """A bucket with its origin and its figures; `number` is the index's. What the front answers is not in them."""

    name: str
    number: int
    spec: BucketSpec
    origin: GuardedOrigin
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    path_hits: int = 0


class _Wanted(NamedTuple):
    """A block of a version: what fetches are told apart by. `tag`: see Known."""

    bucket: int
    key: str
    version: str
    size_bytes: int
    tag: int
    block: int

    @property
    def known(self) -> Known:
        return Known(self.bucket, self.key, self.version, self.size_bytes, self.tag, 0)


class Engine:
    """Lives on one event loop. `open_origin` makes an origin from a URL."""

    def __init__(self, store: Store, open_origin: Callable[[str], Origin], clock: Clock, rng: Rng) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.store = store
        self.block_size_bytes = store.holdings.block_size_bytes
        self._by_number: dict[int, Bucket] = {}
        self._clock = clock
        self._rng = rng
        self._open_origin = open_origin
        self._stats: Flights[tuple[str, str], Known] = Flights(self._stat)
        self._fetches: Fetches[_Wanted] = Fetches(self._fetch, self._keep)
        self._budget = Budget(FETCHES_MAX, FETCH_BYTES_MAX)
        self._budgeted: set[_Wanted] = set()

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
        rng = self._rng.fork(len(self.buckets))
        origin = GuardedOrigin(self._open_origin(spec.origin_url), limits, self._clock, rng)
        kept = self.store.open_bucket(name, origin.url, policy=spec.policy)
        bucket = Bucket(name, kept.number, spec, origin)
        self.buckets[name] = self._by_number[kept.number] = bucket
        return True

    def bucket(self, name: str) -> Bucket:
        """Raises ObjectNotFound if there is no such bucket."""
        found = self.buckets.get(name)
        if found is None:
            known = ", ".join(sorted(self.buckets)) or "none yet"
            raise ObjectNotFound(f"no bucket {name!r}; there are: {known}")
        return found

    def fresh(self, bucket: Bucket, key: str) -> Known | None:
        """What is known of a key, if its origin need not be asked."""
        known = self.store.find(bucket.number, key)
        return known if known is not None and self._is_within(known, bucket.spec.ttl_s) else None

    async def locate(self, bucket: Bucket, key: str) -> Known:
        """The version of a key; asks the origin if it is unknown or old.

        Raises ObjectNotFound; OriginError if the origin fails and nothing recent enough is known.
        """
        known = self.fresh(bucket, key)
        if known is None:
            try:
                known = await self._stats.get((bucket.name, key))
            except OriginError:
                known = self.store.find(bucket.number, key)
                if known is None or not self._is_within(
                    known, bucket.spec.ttl_s + bucket.spec.stale_if_error_s
                ):
                    raise
        if known.is_absent:
            raise ObjectNotFound(f"no object {key!r} in {bucket.name!r}")
        return known

    async def block(self, known: Known, index: int) -> Piece | Ticket:
        """A block: where it is held, verified; or a part in its fetch, which the caller leaves in the end."""
        piece = await self.store.verified(known, index)
        return self.fetch(known, index) if piece is None else piece

    def fetch(self, known: Known, index: int) -> Ticket:
        """A part in fetching a block from the origin, together with all who want it now."""
        start, stop = block_bounds(known.size_bytes, self.block_size_bytes, index)
        wanted = _Wanted(known.bucket, known.key, known.version, known.size_bytes, known.tag, index)
        return self._fetches.join(wanted, stop - start)

    @property
    def is_storing(self) -> bool:
        """Whether anything that was fetched is still to be stored."""
        return bool(self._fetches.storing)

    def learn(self, bucket: Bucket, info: ObjectInfo) -> Known:
        """Take in what the origin says about an object."""
        return self.store.learn(bucket.number, info.key, info.version, info.size_bytes)

    async def list(
        self, bucket: Bucket, prefix: str, after: str | None, limit: int
    ) -> AsyncGenerator[list[ObjectInfo], None]:
        """Pages as the origin gives them; each is learnt."""
        async with aclosing(bucket.origin.list(prefix, after, limit)) as pages:
            async for page in pages:
                for info in page:
                    self.learn(bucket, info)
                yield page

    def refresh(self, bucket: Bucket, prefix: str) -> int:
        """Have the origin asked before anything under the prefix is served again. Returns how many keys that are."""
        return self.store.refresh(bucket.number, prefix)

    async def close(self) -> None:
        """Stop fetching and make all durable."""
        await self._fetches.close()
        await self._stats.close()
        for bucket in self.buckets.values():
            await bucket.origin.close()
        await self.store.close()

    def _is_within(self, known: Known, age_s: float) -> bool:
        now_s = self.store.now_s()
        return known.checked_s != 0 and known.checked_s <= now_s and now_s + 1 - known.checked_s <= age_s

    async def _stat(self, name: tuple[str, str]) -> Known:
        bucket = self.buckets[name[0]]
        try:
            info = await bucket.origin.stat(name[1])
        except ObjectNotFound:
            return self.store.learn(bucket.number, name[1], "", 0, is_absent=True)
        return self.learn(bucket, info)

    async def _fetch(self, wanted: _Wanted, landing: Landing) -> None:
        known, bucket = wanted.known, self._by_number[wanted.bucket]
        now = self.store.find(known.bucket, known.key)
        if now is not None and now.version != known.version:
            raise ObjectChanged(f"{known.key!r} in {bucket.name!r} changed while it was read")
        piece = self.store.held(known, wanted.block)
        if piece is not None:
            # A fetch that was given up had already handed its bytes to the disk.
            with suppress(CorruptBlock):
                landing.take(memoryview(await self.store.read(piece))[landing.filled :])
                return
        start, stop = block_bounds(known.size_bytes, self.block_size_bytes, wanted.block)
        await self._budget.take(stop - start)
        self._budgeted.add(wanted)
        try:
            landing.take(await bucket.origin.read(known.key, start + landing.filled, stop, known.version))
        except BaseException as error:
            self._give_budget(wanted, stop - start)
            if isinstance(error, (ObjectChanged, ObjectNotFound)):
                self._forget(known)
            raise

    async def _keep(self, wanted: _Wanted, landing: Landing) -> None:
        try:
            await self.store.put(wanted.known, wanted.block, landing.data)
        finally:
            self._give_budget(wanted, len(landing.data))

    def _give_budget(self, wanted: _Wanted, size_bytes: int) -> None:
        if wanted in self._budgeted:
            self._budgeted.remove(wanted)
            self._budget.give(size_bytes)

    def _forget(self, known: Known) -> None:
        now = self.store.find(known.bucket, known.key)
        if now is not None and now.version == known.version:
            self.store.forget(known.bucket, known.key)
