"""What is asked of a cache server below `/-/`, but for what only the servers of a fleet ask each other about blobs: the
table that the server looks routes up in, and of which, with the routes of blobs, its OpenAPI document is made. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stoker.wire.cache_api import (
    JSON,
    LIST_LIMIT_MAX,
    MSGPACK,
    OWN_PREFIX,
    BucketAdded,
    BucketRemoved,
    BucketSpec,
    CacheStatus,
    Evicted,
    FleetStatus,
    HeldAnswer,
    HeldObject,
    HeldQuery,
    LoadAnswer,
    LoadRequest,
    ObjectPage,
    ObjectStat,
    Pins,
    Refreshed,
    Sites,
)
from stoker.wire.cache_batch import ReadRequest
from stoker.wire.cache_orders import Announced, Announcement, OrdersStatus
from stoker.wire.cache_watch import Health, Readiness
from stoker.wire.cache_writes import Written

OCTETS = "application/octet-stream"
TEXT = "text/plain"
BUCKET, OBJECT = "{bucket}", "{bucket}/{key}"
AT_MS_MAX = 10**15 - 1


class Field(NamedTuple):
    """A field of a query. `schema`: as JSON Schema has it."""

    name: str
    text: str
    schema: Mapping[str, Any]
    is_required: bool = False


class Route(NamedTuple):
    """What may be asked. `below`: what its path goes on with, behind the route's name. `answer`: a message, or the type
    of some other content; `body` is one message, in any of the types of `takes`, or the type of some other content.
    `statuses`: of answers that are not refused; `refusals`: of those that may be, beside a wrong token."""

    method: str
    name: str
    below: str
    operation: str
    summary: str
    answer: Any
    refusals: tuple[int, ...] = ()
    query: tuple[Field, ...] = ()
    body: Any = None
    takes: tuple[str, ...] = (JSON, MSGPACK)
    statuses: tuple[int, ...] = (200,)
    is_open: bool = False
    start: str = OWN_PREFIX

    @property
    def path(self) -> str:
        return f"{self.start}{self.name}" + (f"/{self.below}" if self.below else "")


_STRING: Mapping[str, Any] = {"type": "string"}
_PREFIX = (Field("prefix", "Of the keys that it is about; without one, all.", _STRING),)
_OF_BUCKET = (400, 403, 404)
_OF_ORIGIN = (*_OF_BUCKET, 409, 502, 503)
_ORDERS = (400, 403, 404, 413)

ROUTES: tuple[Route, ...] = (
    Route("GET", "health", "", "health", "Whether the process serves.", Health, is_open=True),
    Route("HEAD", "health", "", "health_head", "The same without a body.", None, is_open=True),
    Route(
        "GET", "ready", "", "ready", "Whether it wants requests.", Readiness, statuses=(200, 503), is_open=True
    ),
    Route(
        "HEAD", "ready", "", "ready_head", "The same without a body.", None, statuses=(200, 503), is_open=True
    ),
    Route("GET", "openapi.json", "", "openapi", "This document.", JSON),
    Route("GET", "metrics", "", "metrics", "Figures, as Prometheus reads them.", TEXT),
    Route("GET", "status", "", "status", "How the server does, and its buckets.", CacheStatus),
    Route("GET", "fleet", "", "fleet", "The fleet as this server sees it.", FleetStatus),
    Route("GET", "summary", "", "summary", "What it holds, for other servers of its fleet.", OCTETS, (403, 404)),
    Route(
        "GET", "list", BUCKET, "list_objects", "Objects of a bucket, by key.", ObjectPage, _OF_ORIGIN,
        (
            *_PREFIX,
            Field("after", "The key after which to go on.", _STRING),
            Field(
                "limit", "At most so many.", {"type": "integer", "minimum": 1, "maximum": LIST_LIMIT_MAX}
            ),
            Field("delimiter", "With it: keys that have it behind the prefix are one entry up to it.", _STRING),
        ),
    ),
    Route(
        "GET", "stat", OBJECT, "stat", "What is known of a key, also of one that there is not.", ObjectStat, _OF_ORIGIN,
        (Field("begins", "With it, whatever it says: its first bytes are wanted next.", _STRING),),
    ),
    Route(
        "GET", "sites", BUCKET, "sites", "Through how many other fleets the bucket is read.", Sites, _OF_ORIGIN
    ),
    Route(
        "POST", "read", "", "read", "Many objects, or parts of them, in frames.", OCTETS, (*_OF_ORIGIN, 413),
        body=ReadRequest, takes=(MSGPACK,),
    ),
    Route(
        "POST", "held", BUCKET, "held", "Which blocks are here.", HeldAnswer, (*_OF_ORIGIN, 413), body=HeldQuery
    ),
    Route(
        "POST", "fetch", BUCKET, "fetch", "Have these blocks here, and say which are.", HeldAnswer,
        (*_OF_ORIGIN, 413), body=HeldQuery,
    ),
    Route(
        "POST", "load", BUCKET, "load", "Have these objects in the fleet, without sending them.", LoadAnswer,
        (*_OF_ORIGIN, 413), (Field("begin", "With it: answer at once, and do it afterwards.", _STRING),),
        body=LoadRequest,
    ),
    Route(
        "GET", "loaded", OBJECT, "loaded", "How much of an object the fleet holds.", HeldObject, _OF_ORIGIN
    ),
    Route(
        "GET", "whole", OBJECT, "whole", "Be passed a descriptor of a file that is this object.",
        OCTETS, (*_OF_ORIGIN, 412), (Field("version", "Of the object.", _STRING),),
    ),
    Route(
        "POST", "evict", BUCKET, "evict", "Give up what is held below a prefix, at all servers.", Evicted,
        (*_OF_BUCKET, 503), _PREFIX,
    ),
    Route(
        "PUT", "pin", BUCKET, "pin", "Never evict what lies below a prefix, at all servers.", Pins,
        (*_OF_BUCKET, 503), _PREFIX,
    ),
    Route(
        "DELETE", "pin", BUCKET, "unpin", "Evict it as all else again.", Pins, (*_OF_BUCKET, 503), _PREFIX
    ),
    Route(
        "POST", "refresh", BUCKET, "refresh", "Ask the origin anew about what lies below a prefix.", Refreshed,
        (*_OF_BUCKET, 503), _PREFIX,
    ),
    Route(
        "POST", "orders", BUCKET, "announce", "Say what is read next.", Announced, _ORDERS, body=Announcement
    ),
    Route("GET", "orders", BUCKET, "orders", "What was announced.", OrdersStatus, _OF_BUCKET),
    Route(
        "DELETE", "orders", BUCKET, "withdraw", "A stream goes on no more.", Announced, _OF_BUCKET,
        (
            Field("stream", "Which.", _STRING),
            Field("owned", "With it: what another server has handed on of it.", _STRING),
        ),
    ),
    Route(
        "PUT", "buckets", BUCKET, "add_bucket", "Add a bucket, at all servers.", BucketAdded,
        (400, 403, 409, 413, 503), (Field("check", "With it: only say whether it could be added.", _STRING),),
        BucketSpec, (JSON,), (200, 201),
    ),
    Route(
        "DELETE", "buckets", BUCKET, "remove_bucket", "Another server says that an S3 client removed it.",
        BucketRemoved,
        (400, 403, 503),
        (
            Field(
                "at_ms", "When, in milliseconds since 1970.",
                {"type": "integer", "minimum": 0, "maximum": AT_MS_MAX}, True,
            ),
        ),
    ),
)  # fmt: skip

_READ_STATUSES = (200, 206, 304)
OBJECT_ROUTES: tuple[Route, ...] = (
    Route(
        "GET", "", OBJECT, "read_object", "An object, or a part of it.", OCTETS, (*_OF_ORIGIN, 412, 416),
        statuses=_READ_STATUSES, start="",
    ),
    Route(
        "HEAD", "", OBJECT, "read_object_head", "What is known of it.", None, (*_OF_ORIGIN, 412, 416),
        statuses=_READ_STATUSES, start="",
    ),
    Route(
        "PUT", "", OBJECT, "write_object", "Write it, through to the origin, or copy another one.", Written,
        (*_OF_ORIGIN, 411, 412, 413, 507), takes=(OCTETS,), body=OCTETS, start="",
    ),
    Route(
        "DELETE", "", OBJECT, "remove_object", "Remove it, at the origin.", None, (*_OF_ORIGIN, 507),
        statuses=(204,), start="",
    ),
)  # fmt: skip
"""Of objects; those that S3 clients ask for are not among them."""

METHODS: Mapping[str, tuple[str, ...]] = {
    name: tuple(route.method for route in ROUTES if route.name == name)
    for name in dict.fromkeys(route.name for route in ROUTES)
}
"""What each route may be asked with."""

_OF_BLOB = (400, 403, 404, 405, 503)
BLOB_ROUTES: tuple[Route, ...] = (
    Route(
        "GET", "blob", OBJECT, "get_blob", "What was pushed, or a range of it.", OCTETS,
        (*_OF_BLOB, 412, 416, 502), statuses=(200, 206, 304), start="/",
    ),
    Route(
        "HEAD", "blob", OBJECT, "head_blob", "The same without a body.", None, (*_OF_BLOB, 412, 416, 502),
        statuses=(200, 206, 304), start="/",
    ),
    Route(
        "PUT", "blob", OBJECT, "put_blob", "Push content under a key, also over what is there.", None,
        (*_OF_BLOB, 413, 507), body=OCTETS, takes=(OCTETS,), statuses=(201, 411), start="/",
    ),
    Route(
        "DELETE", "blob", OBJECT, "delete_blob", "Have it no more, also where there is nothing.", None, _OF_BLOB,
        statuses=(204,), start="/",
    ),
)  # fmt: skip
