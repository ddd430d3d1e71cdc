"""A bucket as a server has it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from urllib.parse import parse_qsl

from msgspec.structs import replace

from stoker.base.ids import check_name
from stoker.cache.auth.principals import Principal
from stoker.cache.evict import POLICIES
from stoker.cache.origin.fleet_url import is_fleet
from stoker.cache.origin.guarded import GuardedOrigin
from stoker.cache.origin.guarded_writes import GuardedWritableOrigin, GuardedWrites
from stoker.cache.origin.nearer import NearerOrigin
from stoker.cache.origin.open import without_query
from stoker.cache.server.inquiry import has_missed
from stoker.errors import AnotherOrigin, ConfigError, OriginReadOnly, WriteDenied
from stoker.wire.cache_api import RESERVED_BUCKETS, BucketSpec

MARK_BYTES = 8
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
    prefetched_reads: int = 0
    prefetched_bytes: int = 0
    mark: str = ""
    """Stands for the origin among the servers of a fleet; empty: not known."""
    pins: set[str] = field(default_factory=set)
    nearer: NearerOrigin | None = None
    """What is behind `origin`, if it is read through a nearer fleet."""
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
            has_missed()

    @property
    def writable_origin(self) -> GuardedWritableOrigin:
        """Its origin, to be written to. Raises OriginReadOnly."""
        if not isinstance(self.origin, GuardedWritableOrigin):
            raise OriginReadOnly(
                f"the bucket {self.name!r} is read only here: its settings must say `writable = true`"
            )
        return self.origin

    def refreshed_s(self, key: str) -> int:
        """When a key was refreshed last; 0: not lately."""
        return max((at_s for prefix, at_s in self.refreshed if key.startswith(prefix)), default=0)


def writes_of(bucket: Bucket, principal: Principal, *, needs_user: bool) -> GuardedWrites:
    """What writes there as whom who asks is at its origin, or as the server itself; not, if it `needs_user`. Raises
    OriginReadOnly, WriteDenied."""
    user = principal.user_at(bucket.name)
    if user is None and needs_user:
        raise WriteDenied(
            f"{principal.name} is nobody at the origin of the bucket {bucket.name!r}, and only who is somebody may "
            "write there: the file of access says who is (origin_users)"
        )
    return bucket.writable_origin.written_as(user)


def mark_of(spec: BucketSpec, url: str) -> str:
    """What stands for a bucket's origin, which is at `url`, among the servers of a fleet. No secret is in it."""
    endpoint = dict(parse_qsl(spec.origin_url.partition("?")[2])).get("endpoint", "")
    what = f"identity {spec.identity}" if spec.identity else f"{without_query(url).rstrip('/')} {endpoint}"
    return blake2b(what.encode(), digest_size=MARK_BYTES).hexdigest()


def check_origin(bucket: Bucket, mark: str | None) -> None:
    """Another server, which has the bucket from the origin with that mark, may be given what is held of it here. Raises
    AnotherOrigin."""
    if mark and bucket.mark and mark != bucket.mark:
        raise AnotherOrigin(
            f"the bucket {bucket.name!r} is from another origin here: {without_query(bucket.origin.url)}"
        )


def is_known(buckets: Mapping[str, Bucket], name: str, spec: BucketSpec) -> bool:
    """Whether the very same bucket is there; that it was made at another time makes it no other. Raises ConfigError if
    another of that name is."""
    known = buckets.get(name)
    if known is not None and replace(known.spec, made_ms=0) != replace(spec, made_ms=0):
        raise ConfigError(f"there is a bucket {name!r} already, with another origin or other settings")
    return known is not None


def check_bucket(name: str, spec: BucketSpec) -> BucketSpec:
    """Return `spec` if a bucket of that name and kind can be. Raises ConfigError."""
    if name in RESERVED_BUCKETS:
        raise ConfigError(f"{name!r} is a reserved bucket name")
    try:
        check_name("bucket", name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if spec.policy not in POLICIES:
        raise ConfigError(f"{spec.policy!r} is not an eviction policy; there are {', '.join(POLICIES)}")
    if spec.ttl_s < 0 or spec.stale_if_error_s < 0:
        raise ConfigError("ttl_s and stale_if_error_s must not be negative")
    if min(spec.negative_ttl_s, spec.evict_after_s, spec.quota_bytes, spec.max_replicas) < 0:
        raise ConfigError("negative_ttl_s, evict_after_s, quota_bytes and max_replicas must not be negative")
    if min(spec.read_ahead_streams, spec.read_ahead_bytes) < 0:
        raise ConfigError("read_ahead_streams and read_ahead_bytes must not be negative; 0 is none")
    if spec.nearer and not is_fleet(spec.nearer):
        shown = without_query(spec.nearer)
        raise ConfigError(
            f"nearer is a bucket of another fleet, stoker+http://HOST:PORT/BUCKET, not {shown!r}"
        )
    if spec.nearer and spec.writable:
        raise ConfigError(
            "a bucket that is written to here is not read through a nearer fleet, which does not hear of what is "
            "written: leave out `nearer` or `writable`"
        )
    if any(not rule.prefix or rule.quota_bytes < 0 for rule in spec.prefixes):
        raise ConfigError("a prefix with rules must not be empty, and its quota_bytes not negative")
    if spec.origin_bytes_per_s < 0 or spec.origin_requests_per_s < 0:
        raise ConfigError("origin_bytes_per_s and origin_requests_per_s must not be negative; 0 is no limit")
    return spec
