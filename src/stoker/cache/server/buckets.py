"""A bucket as a server has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.cache.origin.guarded import GuardedOrigin
from stoker.wire.cache_api import BucketSpec


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
    peer_bytes: int = 0
    pins: set[str] = field(default_factory=set)
