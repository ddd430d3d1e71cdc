"""A bucket as a server has it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stoker.cache.origin.guarded import GuardedOrigin
from stoker.wire.cache_api import BucketSpec

_REFRESHES_KEPT = 64


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
    local_hits: int = 0
    peer_bytes: int = 0
    pins: set[str] = field(default_factory=set)
    refreshes: int = 0
    refreshed: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=_REFRESHES_KEPT))
    """The last prefixes that were refreshed, and when, in the index's seconds."""

    def count(self, size_bytes: int, *, is_hit: bool) -> None:
        """An object, or a part of one, was read."""
        if is_hit:
            self.hits += 1
            self.hit_bytes += size_bytes
        else:
            self.misses += 1

    def refreshed_s(self, key: str) -> int:
        """When a key was refreshed last; 0: not lately."""
        return max((at_s for prefix, at_s in self.refreshed if key.startswith(prefix)), default=0)
