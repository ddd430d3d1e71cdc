"""The origin that a bucket's settings name, guarded by its limits."""

from __future__ import annotations

from collections.abc import Callable

from stoker.base.clock import Clock
from stoker.base.rng import Rng
from stoker.cache.limits import OriginLimits
from stoker.cache.origin.guarded import GuardedOrigin
from stoker.cache.origin.guarded_writes import GuardedWritableOrigin
from stoker.cache.origin.nearer import NearerOrigin
from stoker.cache.origin.open import open_fleet
from stoker.cache.origin.port import Origin
from stoker.cache.origin.writing_port import WritableOrigin
from stoker.cache.server.buckets import mark_of
from stoker.wire.cache_api import BucketSpec


class BucketOrigins:
    """`open_origin` makes an origin from a URL, `open_writable` one that is written to."""

    def __init__(
        self,
        open_origin: Callable[[str], Origin],
        open_writable: Callable[[str], WritableOrigin],
        clock: Clock,
    ) -> None:
        self._open_origin = open_origin
        self._open_writable = open_writable
        self._clock = clock

    def open(self, spec: BucketSpec, rng: Rng) -> tuple[GuardedOrigin, NearerOrigin | None]:
        """And the nearer fleet in front of it, if there is one. Raises ConfigError."""
        limits = OriginLimits(
            bytes_per_s=spec.origin_bytes_per_s,
            requests_per_s=spec.origin_requests_per_s,
            hedges=spec.hedges,
        )
        if spec.nearer:
            nearer = self._open_nearer(spec)
            return GuardedOrigin(nearer, limits, self._clock, rng), nearer
        if spec.writable:
            writable = self._open_writable(spec.origin_url)
            return GuardedWritableOrigin(writable, limits, self._clock, rng), None
        return GuardedOrigin(self._open_origin(spec.origin_url), limits, self._clock, rng), None

    def _open_nearer(self, spec: BucketSpec) -> NearerOrigin:
        nearer, origin = open_fleet(spec.nearer, is_sure=True), self._open_origin(spec.origin_url)
        # There it must be the same data set.
        nearer.mark = mark_of(spec, origin.url)
        return NearerOrigin(nearer, origin, self._clock)
