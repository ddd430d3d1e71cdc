"""Buckets and blocks: what a server holds and how it gets what it does not."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from stoker._native import Piece
from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.ahead import Limits
from stoker.cache.layout import block_bounds
from stoker.cache.maglev import block_owner_name
from stoker.cache.origin.guarded import GuardedOrigin
from stoker.cache.origin.open import open_writable_origin
from stoker.cache.origin.port import Origin
from stoker.cache.origin.writing_port import WritableOrigin
from stoker.cache.server.beginnings import Beginnings
from stoker.cache.server.bucket_origins import BucketOrigins
from stoker.cache.server.buckets import Bucket, is_known, mark_of
from stoker.cache.server.budget import Budget
from stoker.cache.server.fetches import Fetches, Ticket
from stoker.cache.server.fleet import Fleet
from stoker.cache.server.landing import Landing
from stoker.cache.server.metadata import Metadata
from stoker.cache.server.reading_ahead import ReadingAhead
from stoker.cache.server.sources import Sources, Wanted
from stoker.cache.store.known import Known
from stoker.cache.store.lots import PrefixRule
from stoker.cache.store.store import Store
from stoker.errors import (
    ConfigError,
    CorruptBlock,
    EnvironmentProblem,
    ObjectChanged,
    ObjectNotFound,
)
from stoker.wire.cache_api import HOPS_MAX, BucketSpec

FETCHES_MAX = 128
FETCH_BYTES_MAX = 128 * 1024 * 1024
UNSTORED_BYTES_MAX = 512 * 1024 * 1024
"""Beyond so much in memory that could not be stored, each reader has one block at a time."""
ROOM_PARTS_AHEAD = 8
"""What is read ahead of one place takes no more than such a part of the room."""
SETTLE_S = 1.0
REMOVED = "removed"
CLOSE_S = 60.0


class Engine:
    """Lives on one event loop. `open_origin` makes an origin from a URL, `open_writable` one that is written to."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        open_origin: Callable[[str], Origin],
        clock: Clock,
        rng: Rng,
        open_writable: Callable[[str], WritableOrigin] = open_writable_origin,
    ) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.reserved: set[str] = set()
        """Names that no bucket of objects may have: there are such buckets of blobs."""
        self.store = store
        self.fleet = fleet
        self.block_size_bytes = store.holdings.block_size_bytes
        self._by_number: dict[int, Bucket] = {}
        self._clock = clock
        self._rng = rng
        self._origins = BucketOrigins(open_origin, open_writable, clock)
        self._fetches: Fetches[Wanted] = Fetches(self._fetch, self._keep)
        self._loading: set[Wanted] = set()
        self._foreseen: set[Wanted] = set()
        self._sources = Sources(fleet, clock, self.block_size_bytes)
        self._beginnings = Beginnings(
            store, self._sources, self._fetches, self._wanted, lambda: self._budgets[HOPS_MAX].is_half_free
        )
        self.metadata = Metadata(store, fleet, clock, self.buckets, self._beginnings)
        self._ahead = ReadingAhead(
            self._limits_ahead,
            lambda known, index: self._join(known, index, HOPS_MAX)[0],
            self._is_to_come,
            store.has,
            self.block_size_bytes,
            clock,
        )
        self._closing: set[asyncio.Task[None]] = set()
        """Origins of buckets that could not be added, or were removed."""
        self._unstored_bytes = 0
        # One for each time that a request may have been handed on: what waits for another server must not keep that
        # server's own requests waiting, or both wait for ever.
        self._budgets = [Budget(FETCHES_MAX, FETCH_BYTES_MAX) for _ in range(HOPS_MAX + 1)]

    def add_bucket(self, name: str, spec: BucketSpec) -> bool:
        """Add a bucket; False if the very same is there. Raises ConfigError if another of that name is."""
        if is_known(self.buckets, name, spec):
            return False
        if name in self.reserved:
            raise ConfigError(f"there is a bucket {name!r} for blobs already")
        origin, nearer = self._origins.open(spec, self._rng.fork(len(self.buckets)))
        try:
            number = self._open_bucket(name, spec, origin.url, ())
        except BaseException:
            self._close_soon(origin)
            raise
        bucket = Bucket(name, number, spec, origin, mark=mark_of(spec, origin.url), nearer=nearer)
        self.fleet.peers.marks.of[name] = bucket.mark
        self.buckets[name] = self._by_number[number] = bucket
        return True

    def remove_bucket(self, bucket: Bucket) -> None:
        """Have it no more; what is held of it is given up. Raises EnvironmentProblem."""
        # A name that comes again finds nothing that was known under it.
        self.store.open_bucket(bucket.name, REMOVED)
        del self.buckets[bucket.name]
        self.fleet.peers.marks.of.pop(bucket.name, None)
        self.metadata.removed(bucket)
        # Who reads from it now may come to an end.
        asyncio.get_running_loop().call_later(CLOSE_S, self._close_soon, bucket.origin)

    def _close_soon(self, origin: GuardedOrigin) -> None:
        closing = asyncio.get_running_loop().create_task(origin.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def apply_rules(self, bucket: Bucket) -> None:
        """Keep a bucket by its rules and pins. Raises ConfigError, EnvironmentProblem."""
        self._open_bucket(bucket.name, bucket.spec, bucket.origin.url, sorted(bucket.pins))

    def _open_bucket(self, name: str, spec: BucketSpec, origin: str, pins: Sequence[str]) -> int:
        rules = {
            rule.prefix: PrefixRule(rule.prefix, rule.quota_bytes, rule.pinned) for rule in spec.prefixes
        }
        rules |= {prefix: PrefixRule(prefix, 0, True) for prefix in pins}
        try:
            kept = self.store.open_bucket(
                name,
                origin,
                policy=spec.policy,
                quota_bytes=spec.quota_bytes,
                evict_after_s=spec.evict_after_s,
                rules=list(rules.values()),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.store.room.set_tenant(name, spec.tenant)
        return kept.number

    def bucket(self, name: str) -> Bucket:
        """Raises ObjectNotFound if there is no such bucket."""
        found = self.buckets.get(name)
        if found is None:
            known = ", ".join(sorted(self.buckets)) or "none yet"
            raise ObjectNotFound(f"no bucket {name!r}; there are: {known}")
        return found

    async def locate(
        self, bucket: Bucket, key: str, hops: int = 0, *, is_refreshing: bool = False, begins: bool = False
    ) -> Known:
        """The version of an object; if it `begins`, its first block is wanted next. Raises ObjectNotFound; OriginError
        if the origin fails and nothing recent enough is known."""
        known = await self.metadata.locate(bucket, key, hops, is_refreshing=is_refreshing, begins=begins)
        if known.is_absent:
            raise ObjectNotFound(f"no object {key!r} in {bucket.name!r}")
        return known

    async def block(self, known: Known, index: int, hops: int = 0) -> Piece | Ticket:
        """A block: where it is held, verified; or a part in its fetch, which the caller leaves in the end."""
        piece = await self.store.verified(known, index)
        return self.fetch(known, index, hops) if piece is None else piece

    def fetch(self, known: Known, index: int, hops: int = 0) -> Ticket:
        """A part in fetching a block from where it is, together with all who want it now."""
        ticket = self._join(known, index, hops)[0]
        self._ahead.asked(known, index)
        return ticket

    def _join(self, known: Known, index: int, hops: int) -> tuple[Ticket, Wanted]:
        wanted, size_bytes = self._wanted(known, index, hops)
        return self._fetches.join(wanted, size_bytes), wanted

    def _wanted(self, known: Known, index: int, hops: int) -> tuple[Wanted, int]:
        """What names a block among fetches, and its size."""
        start, stop = block_bounds(known.size_bytes, self.block_size_bytes, index)
        bucket = self._by_number[known.bucket]
        name = block_owner_name(bucket.name, known.key, index)
        # All who make this server go to the origin are one, however often they were handed on.
        hops = self.fleet.hops(name, bucket.spec.max_replicas, hops)
        size_bytes = known.size_bytes
        wanted = Wanted(known.bucket, known.key, known.version, size_bytes, known.tag, index, hops)
        return wanted, stop - start

    def _limits_ahead(self, known: Known) -> Limits:
        """What may be fetched ahead of a file's readers now: nothing that another reader would have to wait for."""
        bucket = self._by_number[known.bucket]
        origin, room = bucket.origin, self.store.room
        is_free = self._budgets[HOPS_MAX].is_half_free and not origin.is_busy and self.store.problem is None
        lot = room.lot(self.store.holdings.lot_of(known.bucket, known.key))
        streams = bucket.spec.read_ahead_streams
        if not is_free or room.ask(lot.number, self.block_size_bytes).is_refused:
            streams = 0
        quotas = [quota for quota in (lot.quota_bytes, bucket.spec.quota_bytes) if quota]
        share_bytes = min([room.limit_bytes, *quotas]) // ROOM_PARTS_AHEAD
        distance_bytes = min(bucket.spec.read_ahead_bytes, share_bytes)
        # Where who comes later has to wait, one at a time: `is_busy` says when the next may be.
        starts = 1 if origin.is_limited else streams
        stride = max(1, len(self.fleet.view.members))
        return Limits(streams, distance_bytes // self.block_size_bytes, stride, starts)

    def owns(self, known: Known, index: int) -> bool:
        """Whether a block is this server's to fetch from the origin, and to keep."""
        bucket = self._by_number[known.bucket]
        route = self.fleet.route(block_owner_name(bucket.name, known.key, index), bucket.spec.max_replicas, 0)
        return route.keeps and not route.peers

    def _is_to_come(self, known: Known, index: int) -> bool:
        """Whether a block is this server's to fetch and to keep, and is still to come."""
        return (
            known.tag != 0
            and self.owns(known, index)
            and not self.store.has(known, index)
            and self._wanted(known, index, 0)[0] not in self._fetches
        )

    async def ensure(self, known: Known, index: int) -> bool:
        """Hold a block here, fetched if it must be; nothing of another bucket leaves for it. Whether it is held. Raises
        what the fetch fails with."""
        if self.store.has(known, index):
            return True
        return await self._held_for(self._loading, known, index, 1)

    async def foresee(self, known: Known, index: int) -> bool:
        """Hold a block here because it is read here soon, whoever owns it. Whether it is held. Raises what the fetch
        fails with."""
        return await self._held_for(self._foreseen, known, index, 0)

    async def _held_for(self, why: set[Wanted], known: Known, index: int, hops: int) -> bool:
        """Fetch a block and see it stored, which `why` tells the storing of."""
        ticket, wanted = self._join(known, index, hops)
        why.add(wanted)
        try:
            await ticket.whole()
            await ticket.landing.settled()
        finally:
            why.discard(wanted)
            ticket.leave()
        return self.store.has(known, index)

    async def settle(self) -> None:
        """Wait until what was fetched by now is stored, but not for long: so that figures tell of all that was read."""
        if self._fetches.storing:
            await asyncio.wait(set(self._fetches.storing), timeout=SETTLE_S)

    @property
    def is_storing(self) -> bool:
        """Whether anything that was fetched is still to be stored."""
        return bool(self._fetches.storing)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether readers hold much that could not be stored."""
        return self._unstored_bytes > UNSTORED_BYTES_MAX

    def _forget_unstored(self, size_bytes: int) -> None:
        self._unstored_bytes -= size_bytes

    async def close(self) -> None:
        """Stop fetching and make all durable."""
        await self._ahead.close()
        await self.metadata.close()
        await self._fetches.close()
        await self._beginnings.close()
        for bucket in self.buckets.values():
            await bucket.origin.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self.fleet.close()
        await self.store.close()

    async def _fetch(self, wanted: Wanted, landing: Landing) -> None:
        known, bucket = wanted.known, self._by_number[wanted.bucket]
        now = self.store.find(known.bucket, known.key)
        if now is not None and now.version != known.version:
            raise ObjectChanged(f"{known.key!r} in {bucket.name!r} changed while it was read")
        piece = self.store.held(known, wanted.block)
        if piece is not None:
            # A fetch that was given up had already handed its bytes to the disk.
            with suppress(CorruptBlock, EnvironmentProblem):
                landing.take(memoryview(await self.store.read(piece))[landing.filled :])
                return
        await self._budgets[wanted.hops].take(landing.size_bytes)
        landing.granted_bytes = landing.size_bytes
        try:
            await self._sources.fill(wanted, bucket, landing)
        except BaseException as error:
            self._give_budget(wanted, landing)
            if isinstance(error, (ObjectChanged, ObjectNotFound)):
                self.metadata.forget(known)
            raise

    async def _keep(self, wanted: Wanted, landing: Landing) -> None:
        bucket = self._by_number[wanted.bucket]
        name = block_owner_name(bucket.name, wanted.key, wanted.block)
        try:
            is_loading, is_foreseen = wanted in self._loading, wanted in self._foreseen
            keeps = (
                is_loading
                or is_foreseen
                or self.fleet.route(name, bucket.spec.max_replicas, wanted.hops).keeps
            )
            if keeps and await self.store.put(
                wanted.known, wanted.block, landing.data, is_loading=is_loading, is_foreseen=is_foreseen
            ):
                piece = self.store.held(wanted.known, wanted.block)
                if piece is not None:
                    landing.stored(self.store.files.sending, piece)
            if not landing.is_stored:
                # Who is slow to take it keeps it in memory, beyond what the budget counts.
                self._unstored_bytes += landing.size_bytes
                weakref.finalize(landing, self._forget_unstored, landing.size_bytes)
        finally:
            landing.settle()
            self._give_budget(wanted, landing)

    def _give_budget(self, wanted: Wanted, landing: Landing) -> None:
        granted_bytes, landing.granted_bytes = landing.granted_bytes, 0
        if granted_bytes:
            self._budgets[wanted.hops].give(granted_bytes)
