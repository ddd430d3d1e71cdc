"""What cache clients and servers say to each other.

Routes (all else under `/BUCKET/KEY` is an object):

    GET, HEAD /BUCKET/KEY                          the object or a range of it; ETag is its version
    GET  /-/health                                 200 while the server serves
    GET  /-/status                                 CacheStatus as JSON
    GET  /-/list/BUCKET?prefix=&after=&limit=      ObjectPage
    POST /-/read                                   ReadRequest -> frames
    PUT  /-/buckets/NAME                           BucketSpec; adds a bucket
    POST /-/refresh/BUCKET?prefix=                 drops pointers; Refreshed
    POST /-/evict/BUCKET?prefix=                   gives up what is held; Evicted
    PUT, DELETE /-/pin/BUCKET?prefix=              keeps what lies under a prefix from being evicted, or no longer; Pins
    POST /-/load/BUCKET                            LoadRequest -> LoadAnswer: fetches objects without sending them
    GET  /-/stat/BUCKET/KEY                        ObjectStat, for a key that there is not as well
    GET  /-/fleet                                  FleetStatus
    POST /-/held/BUCKET                            HeldQuery -> HeldAnswer: what this server has, without fetching it
    POST /-/fetch/BUCKET                           HeldQuery -> HeldAnswer: the same, after fetching what it had not

Servers of a fleet ask each other the same way. `Stoker-Hops: N` says how often a request was handed on; with
HOPS_MAX it is answered from what is here or from the origin.

A frame is a kind (u8), a length (u32, big endian) and that many bytes. The frames of one key are DATA*
then LAST or ERROR; keys come in the order of the request. An ERROR frame holds an ErrorBody in msgpack and
voids the DATA frames of its key.

The short circuit: a reader at a Unix socket may ask for descriptors in place of long records (DescriptorsWanted). A
PLACE frame may then stand for a key: the record's length (u32, big endian), the number of a container (u32), and where
in it the record begins (u64). The reader has a descriptor of that container from before, or is passed one, for reading
only (SCM_RIGHTS, with any byte of the answer up to the DESCRIPTORS frame that announces it). A DESCRIPTORS frame has 8
bytes that tell this run of the server from others, and for each container its number (u32), and its device (u64) and
inode (u64), by which the reader knows which of the descriptors that came is which. Numbers hold for one run, in which
none is used twice. What a PLACE frame points to never changes, though the server may have given it up. A reader that
lacks a descriptor (it had too many open, or something in between lost it) asks again without. Kinds 3 and 4 named files
by their paths once.
"""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple
from urllib.parse import quote, urlencode

import msgspec

from stoker import errors

OWN_PREFIX = "/-/"
HOPS = "Stoker-Hops"
HOPS_MAX = 2
RESERVED_BUCKETS = frozenset({"-", "blob"})
MSGPACK = "application/msgpack"
JSON = "application/json"

FRAME = struct.Struct("!BI")
FRAME_DATA = 0
FRAME_LAST = 1
FRAME_ERROR = 2
FRAME_DESCRIPTORS = 5
FRAME_PLACE = 6
INSTANCE_BYTES = 8
DESCRIPTOR = struct.Struct("!IQQ")
PLACE = struct.Struct("!IIQ")

READ_KEYS_MAX = 65536
LOAD_KEYS_MAX = 1024
HELD_BLOCKS_MAX = 4096
LIST_LIMIT_MAX = 10_000


Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class ObjectInfo(msgspec.Struct, frozen=True):
    """One object as the origin describes it. `version` names its content."""

    key: str
    size_bytes: int
    version: str


class ObjectPage(msgspec.Struct, frozen=True):
    """Objects sorted by key. `after` is what to ask the next page with; None after the last."""

    objects: list[ObjectInfo]
    after: str | None = None


class ObjectStat(msgspec.Struct, frozen=True):
    """What is known of a key, and how many seconds ago the origin said so. An absent one has no version."""

    key: str
    size_bytes: int
    version: str
    age_s: int
    is_absent: bool = False


class FleetMember(msgspec.Struct, frozen=True):
    """One cache server of a fleet: where others reach it, its share beside theirs, and where it stands.

    A weight of 0: it is leaving, and owns nothing any more.
    """

    name: str
    url: str
    weight: int = 1
    zone: str = ""


class FleetStatus(msgspec.Struct, frozen=True):
    """The fleet as this server sees it. `down`: members that it could not reach lately."""

    name: str
    members: list[FleetMember]
    down: list[str] = []
    block_size_bytes: int = 4 * 1024 * 1024


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
    another bucket leaves for them."""

    keys: list[str]
    replicas: int = 0


LOADED, HELD, PASSED, FAILED = "loaded", "held", "passed", "failed"


class LoadItem(msgspec.Struct, frozen=True):
    """One object: `held` already, `loaded` now, `passed` (there is no room for all of it), or `failed`, and why."""

    key: str
    state: str
    size_bytes: int = 0
    error: str = ""


class LoadAnswer(msgspec.Struct, frozen=True):
    """In the order of the request."""

    items: list[LoadItem]


class HeldQuery(msgspec.Struct, frozen=True):
    """Blocks of one bucket: key, version and number of each."""

    blocks: list[tuple[str, str, int]]


class HeldAnswer(msgspec.Struct, frozen=True):
    """Whether each is held, in the order of the question; and why one could not be fetched, by its place there."""

    held: list[bool]
    why: dict[int, str] = {}


class DescriptorsWanted(msgspec.Struct, frozen=True):
    """A reader takes places of objects of `from_bytes` and more, and `count_max` descriptors beside those it has.

    `held`: the 8 bytes of the run that passed them, and the numbers of their containers (u32, big endian), ascending;
    or nothing.
    """

    from_bytes: Count
    count_max: Count
    held: bytes = b""


class ReadRequest(msgspec.Struct, frozen=True):
    """Whole objects of one bucket, to be answered in this order; with `descriptors`, by PLACE frames where possible."""

    bucket: str
    keys: list[str]
    descriptors: DescriptorsWanted | None = None


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
    prefixes: tuple[PrefixSpec, ...] = ()
    """Parts of the bucket with rules of their own; the longest prefix counts."""


class Refreshed(msgspec.Struct, frozen=True):
    """How many pointers were dropped. `missed`: servers of the fleet that could not be told; what they know is good for
    no longer than the bucket's ttl."""

    dropped: int
    missed: list[str] = []


class BucketStatus(msgspec.Struct, frozen=True):
    """Figures of one bucket since the server started."""

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


class ErrorBody(msgspec.Struct, frozen=True):
    """Why a request failed. `code` is one of ERROR_CODES."""

    code: str
    message: str


class ErrorCode(NamedTuple):
    """How an error travels: its HTTP status and the class that the client raises."""

    status: int
    error: type[errors.StokerError]


# Most derived classes first: the first that an error is an instance of is its code.
ERROR_CODES: dict[str, ErrorCode] = {
    "not_found": ErrorCode(404, errors.ObjectNotFound),
    "changed": ErrorCode(412, errors.ObjectChanged),
    "corrupt": ErrorCode(502, errors.CorruptBlock),
    "unavailable": ErrorCode(503, errors.CacheUnavailable),
    "short_body": ErrorCode(502, errors.ShortBody),
    "origin": ErrorCode(502, errors.OriginError),
    "denied": ErrorCode(403, errors.AccessDenied),
    "no_token": ErrorCode(401, errors.AccessDenied),
    "environment": ErrorCode(503, errors.EnvironmentProblem),
    "bad_request": ErrorCode(400, errors.ConfigError),
    "method": ErrorCode(405, errors.WireError),
    "range": ErrorCode(416, errors.WireError),
    "timeout": ErrorCode(504, errors.OriginError),
    "too_large": ErrorCode(413, errors.WireError),
    "header_too_large": ErrorCode(431, errors.WireError),
    "conflict": ErrorCode(409, errors.ConfigError),
    "protocol": ErrorCode(400, errors.WireError),
    "failed": ErrorCode(500, errors.CacheError),
}


def code_of(error: errors.StokerError) -> str:
    """The code under which this error travels."""
    for code, entry in ERROR_CODES.items():
        if isinstance(error, entry.error):
            return code
    return "failed"


def error_of(body: ErrorBody) -> errors.StokerError:
    """The typed error that a client raises for an error body; an unknown code is a CacheError."""
    entry = ERROR_CODES.get(body.code)
    return errors.CacheError(body.message) if entry is None else entry.error(body.message)


def failure_of(status: int, body: bytes | bytearray) -> errors.StokerError:
    """The typed error for an answer that is one; WireError where its body is no ErrorBody."""
    try:
        return error_of(msgspec.json.decode(bytes(body), type=ErrorBody))
    except msgspec.DecodeError:
        return errors.WireError(f"the server answered {status}: {bytes(body[:200])!r}")


def target_below(route: str, bucket: str, prefix: str) -> str:
    """The request target of something that is done to all keys under a prefix."""
    return f"{OWN_PREFIX}{route}/{quote(bucket, safe='')}?{urlencode({'prefix': prefix})}"
