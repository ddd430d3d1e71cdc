"""What cache clients and servers say to each other.

Routes (all else under `/BUCKET/KEY` is an object):

    GET, HEAD /BUCKET/KEY                          the object or a range of it; ETag is its version
    GET  /-/health                                 200 while the server serves; needs no token
    GET  /-/ready                                  Readiness: 200, or 503 while it wants no requests; needs no token
    GET  /-/metrics                                Prometheus text
    GET  /-/status                                 CacheStatus as JSON
    GET  /-/openapi.json                           all of these, as OpenAPI describes them (`cache_routes.py`)
    GET  /-/list/BUCKET?prefix=&after=&limit=&delimiter=
                                                   ObjectPage; with a delimiter, of what is right below the prefix
    POST /-/read                                   ReadRequest -> frames (`cache_batch.py`)
    PUT  /-/buckets/NAME                           BucketSpec -> BucketAdded; adds a bucket, at all servers of the
                                                   fleet; with ?check=1 it is only said whether it could be added
    DELETE /-/buckets/NAME?at_ms=                  BucketRemoved; one server tells another that an S3 client removed it
    POST /-/refresh/BUCKET?prefix=                 drops pointers; Refreshed
    POST /-/evict/BUCKET?prefix=                   gives up what is held; Evicted
    PUT, DELETE /-/pin/BUCKET?prefix=              keeps what lies under a prefix from being evicted, or no longer; Pins
    POST /-/load/BUCKET?begin                      LoadRequest -> LoadAnswer: fetches objects without sending them;
                                                   `begin`: answers at once
    GET  /-/loaded/BUCKET/KEY                      HeldObject: how much of an object the fleet holds
    GET  /-/whole/BUCKET/KEY?version=              a DESCRIPTORS frame (`cache_batch.py`) of a file that holds exactly
                                                   this object, all of it; nothing, if there is none to pass
    GET  /-/stat/BUCKET/KEY?begins                 ObjectStat, for a key that there is not as well; `begins`: its first
                                                   bytes are wanted next, and may be fetched together with it
    GET  /-/fleet                                  FleetStatus
    GET  /-/sites/BUCKET                           Sites: through how many other fleets the bucket is read
    POST /-/held/BUCKET                            HeldQuery -> HeldAnswer: what this server has, without fetching it
    POST /-/fetch/BUCKET                           HeldQuery -> HeldAnswer: the same, after fetching what it had not
    GET  /-/summary                                what it holds, as `cache/summary.py` encodes it; for its fleet only
    GET, HEAD /-/link/PROOF/BUCKET/KEY             the object, for anybody (`cache/auth/links.py`)

Servers of a fleet ask each other the same way. `Stoker-Hops: N` says how often a request was handed on; with
HOPS_MAX it is answered from what is here or from the origin. `Stoker-Origin: MARK` stands for the origin that they
have the bucket from (`Bucket.mark`): who has a bucket of that name from another one answers 409. GETs of objects say it
together with If-Match. `Stoker-Sites: N` goes with /-/sites from fleet to fleet: so many were asked; after SITES_MAX it
may be a circle.
"""

from __future__ import annotations

from urllib.parse import quote, urlencode

import msgspec

from stoker.wire.cache_watch import Balance

OWN_PREFIX = "/-/"
LINK_PREFIX = "/-/link/"
HOPS = "Stoker-Hops"
HOPS_MAX = 2
ORIGIN = "Stoker-Origin"
SITES = "Stoker-Sites"
SITES_MAX = 4
PROTOCOL = 1
"""Of what servers of a fleet say to each other; those of another one do not use each other."""
RESERVED_BUCKETS = frozenset({"-", "blob"})
MSGPACK = "application/msgpack"
JSON = "application/json"

ONLY = "\0"
"""A prefix that ends with it stands for one key alone: no key has it."""
LOAD_KEYS_MAX = 1024
HELD_BLOCKS_MAX = 4096
LIST_LIMIT_MAX = 10_000


class ObjectInfo(msgspec.Struct, frozen=True, eq=False):
    """One object as the origin describes it. `version` names its content. `modified_s`: when it was written, seconds
    since 1970; 0: nobody knows. `headers`: what the origin says of its content (its type, the user's own `x-amz-meta-`
    fields); None: it was not asked, and would tell."""

    key: str
    size_bytes: int
    version: str
    modified_s: float = 0.0
    headers: tuple[tuple[str, str], ...] | None = ()

    def __eq__(self, other: object) -> bool:
        """Whether it is the same content; not every answer of an origin tells the rest."""
        if not isinstance(other, ObjectInfo):
            return NotImplemented
        return (self.key, self.size_bytes, self.version) == (other.key, other.size_bytes, other.version)

    def __hash__(self) -> int:
        return hash((self.key, self.size_bytes, self.version))


class ObjectPage(msgspec.Struct, frozen=True):
    """Objects sorted by key. `after` is what to ask the next page with; None after the last. `age_s`: how many seconds
    ago the origin said so. `folders`: in place of all keys that are the same up to the first delimiter behind the
    prefix, what they begin with; sorted. None: no delimiter was asked for, or the server knows none."""

    objects: list[ObjectInfo]
    after: str | None = None
    age_s: float = 0.0
    folders: list[str] | None = None


class ObjectStat(msgspec.Struct, frozen=True):
    """What is known of a key, and how many seconds ago the origin said so. An absent one has no version. `attributes`:
    as Known has them."""

    key: str
    size_bytes: int
    version: str
    age_s: int
    is_absent: bool = False
    attributes: str = ""


class FleetMember(msgspec.Struct, frozen=True):
    """One cache server of a fleet: where others reach it, its share beside theirs, and where it stands.

    A weight of 0: it is leaving, and owns nothing any more. `instance`: see FleetStatus; empty in lists that are
    written by hand.
    """

    name: str
    url: str
    weight: int = 1
    zone: str = ""
    instance: str = ""


def host_of_url(url: str) -> str:
    """What a member is called that has no name: its URL without the scheme."""
    return url.partition("://")[2]


class Sites(msgspec.Struct, frozen=True):
    """How many fleets a bucket is read through, one behind the other, before its origin is reached."""

    fleets: int


class SummaryStatus(msgspec.Struct, frozen=True):
    """The summary of what a member of the fleet held so long ago."""

    name: str
    blocks: int
    size_bytes: int
    age_s: float


class MemberTrouble(msgspec.Struct, frozen=True):
    """A member that a server does not use: why, and for how long already."""

    name: str
    why: str
    since_s: float


class FleetStatus(msgspec.Struct, frozen=True):
    """The fleet as this server sees it. `down`: members that it does not use now; `troubles` says why.

    `instance` is another one for each start of a server. `is_trusting`: whether it lets who asks do everything.
    `summaries`: by what it counts the copies of blocks, its own summary among them.
    """

    name: str
    members: list[FleetMember]
    down: list[str] = []
    block_size_bytes: int = 4 * 1024 * 1024
    troubles: list[MemberTrouble] = []
    instance: str = ""
    protocol: int = 1
    is_trusting: bool = True
    added: dict[str, BucketSpec] = {}
    """Buckets that were added while servers ran; told to other servers only, as those `removed` are, and when."""
    removed: dict[str, int] = {}
    summaries: list[SummaryStatus] = []


class Evicted(msgspec.Struct, frozen=True):
    """What was given up, over all servers of the fleet. `missed`: servers that could not be told."""

    blocks: int
    size_bytes: int
    missed: list[str] = []


class Pins(msgspec.Struct, frozen=True):
    """Prefixes of a bucket that are pinned. `missed`: servers that could not be told."""

    prefixes: list[str]
    missed: list[str] = []


class LoadRequest(msgspec.Struct, frozen=True):
    """Objects of one bucket to be held, on so many servers of the fleet (0: on as many as the bucket says). Nothing of
    another bucket leaves for them, nor what came or was used in the last `age_s` seconds: since the load began that
    this is a part of."""

    keys: list[str]
    replicas: int = 0
    age_s: int = 0


LOADED, HELD, PASSED, FAILED, BEGUN = "loaded", "held", "passed", "failed", "begun"


class LoadItem(msgspec.Struct, frozen=True):
    """One object: `held` already, `loaded` now, `passed` (there is no room for all of it), or `failed`, and why;
    `begun`, where nobody waits."""

    key: str
    state: str
    size_bytes: int = 0
    error: str = ""


class LoadAnswer(msgspec.Struct, frozen=True):
    """In the order of the request."""

    items: list[LoadItem]


class HeldObject(msgspec.Struct, frozen=True):
    """How much of an object is held, in the whole fleet: nothing counts twice."""

    version: str
    size_bytes: int
    held_bytes: int


class HeldQuery(msgspec.Struct, frozen=True):
    """Blocks of one bucket: key, version and number of each. `age_s`: see LoadRequest."""

    blocks: list[tuple[str, str, int]]
    age_s: int = 0


class HeldAnswer(msgspec.Struct, frozen=True):
    """Whether each is held, in the order of the question; and why one could not be fetched, by its place there."""

    held: list[bool]
    why: dict[int, str] = {}


class PrefixSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies under a prefix of a bucket: a share of the disk (0: none of its own), or pinned: never evicted."""

    prefix: str
    quota_bytes: int = 0
    pinned: bool = False


class BucketSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bucket: where its objects come from and how they are kept."""

    origin_url: str
    policy: str = "lru"
    ttl_s: float = 3600.0
    stale_if_error_s: float = 86400.0
    origin_bytes_per_s: float = 0.0
    """How fast content may be read from the origin; 0: no limit."""
    origin_requests_per_s: float = 0.0
    """How often the origin may be asked; 0: no limit."""
    hedges: bool = False
    """Ask the origin a second time beside a read that takes longer than 99 of 100 of its reads did."""
    max_replicas: int = 1
    """On how many servers of the fleet a block may be held; 0: on every one that is asked for it."""
    negative_ttl_s: float = 5.0
    """How long it is believed that there is no such object, where `ttl_s` is not shorter."""
    quota_bytes: int = 0
    """What the bucket may take of a server's disk; 0: as much as there is."""
    evict_after_s: float = 0.0
    """How long blocks are kept at most; 0: as long as there is room."""
    read_ahead_streams: int = 4
    """How many blocks of a file each server fetches at a time ahead of those who read on in it; 0: none."""
    read_ahead_bytes: int = 268_435_456
    """How far ahead of what was asked for last, at most."""
    prefixes: tuple[PrefixSpec, ...] = ()
    """Parts of the bucket with rules of their own; the longest prefix counts."""
    identity: str = ""
    """The same at all servers of a fleet that may give each other what they hold of it, where they reach one data set
    by different URLs; empty: the origin's URL."""
    writable: bool = False
    """S3 clients may write: through, to the origin."""
    nearer: str = ""
    """The same bucket of a fleet that is nearer than the origin, `stoker+http://HOST:PORT/BUCKET`, to be read through
    while that answers."""
    tenant: str = ""
    """The principal whose quota it counts for; empty: nobody's."""
    made_ms: int = 0
    """When an S3 client made it, milliseconds since 1970; 0: it was not made so."""


class BucketAdded(msgspec.Struct, frozen=True):
    """A bucket that is there now. `missed`: servers of the fleet that could not be told, and will be; `refused`: why
    others do not have it, by their names."""

    spec: BucketSpec
    missed: list[str] = []
    refused: dict[str, str] = {}


class BucketRemoved(msgspec.Struct, frozen=True):
    """A bucket is no more. `missed`: servers of the fleet that are only told when they are met again."""

    missed: list[str] = []


class Refreshed(msgspec.Struct, frozen=True):
    """How many pointers were dropped. `missed`: servers of the fleet that could not be told; what they know is good for
    no longer than the bucket's ttl."""

    dropped: int
    missed: list[str] = []


class PrefixStatus(msgspec.Struct, frozen=True):
    """A part of a bucket with rules of its own: what it takes of the disk, of which share (0: none of its own)."""

    prefix: str
    used_bytes: int
    quota_bytes: int = 0
    pinned: bool = False


class BucketStatus(msgspec.Struct, frozen=True):
    """Figures of one bucket since the server started, and how it is kept there."""

    name: str
    origin: str
    policy: str
    held_bytes: int
    held_blocks: int
    hits: int
    misses: int
    hit_bytes: int
    origin_bytes: int
    origin_requests: int
    local_hits: int = 0
    origin_state: str = "closed"
    """`open`: the origin failed again and again and is left alone for a while; `probing`: one request goes to see."""
    origin_retries: int = 0
    peer_bytes: int = 0
    """Read from other servers of the fleet."""
    origin_hedges: int = 0
    """Second requests beside slow ones; they count as requests as well."""
    used_bytes: int = 0
    """What it takes of the disk, in whole pages: what quotas count."""
    quota_bytes: int = 0
    max_replicas: int = 1
    ttl_s: float = 3600.0
    prefixes: list[PrefixStatus] = []
    """Those with a quota of their own, and those that are pinned."""
    pins: list[str] = []
    kind: str = "objects"
    """`blobs`: what was pushed is kept, within its quota, and there is no origin."""
    nearer: str = ""
    """The nearer fleet that it is read through, if there is one."""
    nearer_state: str = ""
    """As `origin_state`: while `open` or `probing`, it is read from the origin itself."""
    nearer_bytes: int = 0


class TenantStatus(msgspec.Struct, frozen=True):
    """What all buckets of a tenant take of the disk, of which quota."""

    name: str
    used_bytes: int
    quota_bytes: int


class CacheStatus(msgspec.Struct, frozen=True):
    """Figures of one server since it started. `hits` and `misses` count objects asked for, not blocks.

    `local_hits` are those of the hits whose bytes the reader reads itself, from a descriptor that it was passed.
    """

    version: str
    state: str
    uptime_s: float
    capacity_bytes: int
    held_bytes: int
    held_blocks: int
    hits: int
    misses: int
    hit_bytes: int
    origin_bytes: int
    origin_requests: int
    buckets: list[BucketStatus]
    notes: list[str] = []
    local_hits: int = 0
    fleet: FleetStatus | None = None
    """None: it is in none."""
    tenants: list[TenantStatus] = []
    balance: Balance = Balance()


def target_below(route: str, bucket: str, prefix: str) -> str:
    """The request target of something that is done to all keys under a prefix."""
    return f"{OWN_PREFIX}{route}/{quote(bucket, safe='')}?{urlencode({'prefix': prefix})}"
