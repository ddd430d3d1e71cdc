"""How a server does, as it tells each who asks: with what that one may know."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from stoker.cache.auth.principals import Principal
from stoker.cache.origin.open import without_query
from stoker.cache.server.blobs.part import Blobs
from stoker.cache.server.buckets import Bucket
from stoker.cache.server.engine import Engine
from stoker.cache.server.front_hits import FrontHits
from stoker.cache.server.observing import Observed
from stoker.wire.cache_api import BucketStatus, CacheStatus, PrefixStatus, TenantStatus


class Statuses:
    """Of one engine. `uptime_s` and `notes` are asked for each time."""

    def __init__(
        self,
        engine: Engine,
        blobs: Blobs,
        hits: FrontHits,
        observed: Observed,
        version: str,
        uptime_s: Callable[[], float],
        notes: Callable[[], list[str]],
    ) -> None:
        self._engine = engine
        self._blobs = blobs
        self._hits = hits
        self._observed = observed
        self.version = version
        self._uptime_s = uptime_s
        self._notes = notes

    def told(self, who: Principal) -> CacheStatus:
        """Figures of the buckets that the asker may read."""
        engine, store = self._engine, self._engine.store
        figures = store.index.figures()
        rows = []
        for name, bucket in sorted(engine.buckets.items()):
            if who.knows(name):
                held = figures.get(bucket.number)
                size = (0, 0) if held is None else (held.size_bytes, held.pieces)
                rows.append(_as_seen_by(who, self._row(bucket, *size)))
        for name, blobs in self._blobs.buckets.items():
            if who.knows(name):
                held = figures.get(blobs.number)
                size = (0, 0) if held is None else (held.size_bytes, held.pieces)
                rows.append(self._blobs.keeping.row(blobs, size, self._hits.of(blobs.number)[:2]))
        rows.sort(key=lambda row: row.name)
        problem = store.problem
        # They tell of other buckets, their origins and folders.
        notes = [*self._notes(), *([] if problem is None else [problem])]
        return CacheStatus(
            version=self.version,
            state="ok" if problem is None else "pass-through",
            uptime_s=round(self._uptime_s(), 3),
            capacity_bytes=store.room.limit_bytes,
            held_bytes=store.room.used_bytes,
            held_blocks=sum(held.pieces for held in figures.values()),
            hits=sum(row.hits for row in rows),
            misses=sum(row.misses for row in rows),
            hit_bytes=sum(row.hit_bytes for row in rows),
            origin_bytes=sum(row.origin_bytes for row in rows),
            origin_requests=sum(row.origin_requests for row in rows),
            buckets=rows,
            local_hits=sum(row.local_hits for row in rows),
            notes=notes if who.is_unrestricted else [],
            fleet=None if engine.fleet.is_single else engine.fleet.status(),
            tenants=[
                TenantStatus(name, store.room.used_by_tenant(name), quota_bytes)
                for name, quota_bytes in store.room.tenant_quotas.items()
                if who.is_unrestricted or who.name == name
            ],
            balance=self._observed.balance(),
        )

    def _row(self, bucket: Bucket, held_bytes: int, held_blocks: int) -> BucketStatus:
        room, lots = self._engine.store.room, self._engine.store.holdings.lots[bucket.number].lots
        counters, spec, nearer = bucket.origin.counters, bucket.spec, bucket.nearer
        front = self._hits.of(bucket.number)
        prefixes = [
            PrefixStatus(lot.prefix, room.used_by(lot.number), lot.quota_bytes, lot.is_pinned)
            for lot in lots
            if lot.prefix and (lot.quota_bytes or lot.is_pinned)
        ]
        return BucketStatus(
            name=bucket.name, origin=without_query(spec.origin_url), policy=spec.policy,
            held_bytes=held_bytes, held_blocks=held_blocks,
            hits=bucket.hits + front.hits, misses=bucket.misses + front.handed_on,
            hit_bytes=bucket.hit_bytes + front.size_bytes, origin_bytes=counters.bytes_read,
            origin_requests=counters.requests, local_hits=bucket.local_hits,
            origin_state=bucket.origin.state, origin_retries=bucket.origin.retries,
            origin_hedges=bucket.origin.hedges, peer_bytes=bucket.peer_bytes + front.handed_on_bytes,
            used_bytes=room.used_by_bucket(bucket.name), quota_bytes=spec.quota_bytes,
            max_replicas=spec.max_replicas, ttl_s=spec.ttl_s, prefixes=prefixes,
            pins=[prefix.prefix for prefix in prefixes if prefix.pinned],
            nearer=without_query(spec.nearer), nearer_state=nearer.nearer_state if nearer else "",
            nearer_bytes=nearer.nearer.counters.bytes_read if nearer else 0,
        )  # fmt: skip


def _as_seen_by(who: Principal, row: BucketStatus) -> BucketStatus:
    """Without what lies elsewhere in the bucket, and where that comes from, for who may not look at all of it."""
    if who.may_read(row.name) or who.may_list(row.name) or who.may_administer(row.name):
        return row
    prefixes = [one for one in row.prefixes if is_for(who, row.name, one.prefix)]
    return replace(row, origin="", prefixes=prefixes, pins=[one.prefix for one in prefixes if one.pinned])


def is_for(who: Principal, bucket: str, prefix: str) -> bool:
    """Whether somebody may know of what lies below a prefix."""
    return who.may_list(bucket, prefix) or who.may_administer(bucket, prefix) or who.may_read(bucket, prefix)
