"""The blocking client: what a cache server can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from stoker.cache.client.asked import Asked, Item, raise_first
from stoker.cache.client.asked import ByteRange as ByteRange
from stoker.cache.client.batch import split_frames
from stoker.cache.client.descriptors import Descriptors, Places
from stoker.cache.client.holding import HoldingClient
from stoker.cache.client.looking import LookingClient
from stoker.cache.client.records import RecordReader
from stoker.cache.client.transport import Transport
from stoker.cache.client.writing import WritingClient
from stoker.errors import OriginError, WireError
from stoker.settings import ClientTlsFiles
from stoker.wire.cache_api import (
    LIST_LIMIT_MAX,
    BucketAdded,
    BucketSpec,
    CacheStatus,
    Evicted,
    FleetStatus,
    LoadAnswer,
    LoadItem,
    LoadRequest,
    ObjectInfo,
    ObjectPage,
    Pins,
    Refreshed,
    target_below,
)
from stoker.wire.cache_batch import READ_KEYS_MAX
from stoker.wire.http import check_key, etag_of, object_target, version_of

T = TypeVar("T")
_FIRST_KEYS = 16
_PIPELINED_KEYS_MAX = 512


class Part(NamedTuple):
    """A part of an object, and what the object is."""

    data: bytes
    version: str
    size_bytes: int


class CacheClient(RecordReader, LookingClient, HoldingClient, WritingClient):
    """Talks to one cache server at `http://host:port`, `https://host:port` or `unix:///path`; connects when first used.

    `timeout_s` is the longest silence of the server, in seconds, before CacheUnavailable. Every method may
    raise CacheUnavailable, AccessDenied and WireError.

    `short_circuit`: at a Unix socket, let the server pass descriptors of what holds long records (`read_many` and
    `read_ranges` only) and read them here. `tls`: whom to trust, of `https://`; None: what the settings say.
    """

    def __init__(
        self,
        endpoint: str,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        short_circuit: bool = True,
        tls: ClientTlsFiles | None = None,
    ) -> None:
        self._transport = Transport(endpoint, token, timeout_s, takes_descriptors=short_circuit, tls=tls)
        self._descriptors = Descriptors() if self._transport.takes_descriptors else None

    @property
    def endpoint(self) -> str:
        """Where the server is."""
        return self._transport.endpoint.url

    def read(
        self, bucket: str, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> bytes:
        """Bytes `[start, stop)` of an object; to its end without `stop`; fewer where the object ends before.

        With `version`, exactly that version's bytes. Raises ObjectNotFound, ObjectChanged, OriginError.
        """
        headers = b"" if version is None else f"If-Match: {etag_of(version)}\r\n".encode("latin-1")
        if start < 0 or (stop is not None and stop < start):
            raise ValueError(f"bytes [{start}, {stop}) are not a range")
        if stop is not None and stop == start:
            return b""
        if start or stop is not None:
            headers += b"Range: bytes=%d-%b\r\n" % (start, b"" if stop is None else b"%d" % (stop - 1))
        head, body = self._transport.request(
            "GET", object_target(bucket, check_key(key)), headers, accept=(416,)
        )
        return b"" if head.status == 416 else bytes(body)

    def part(self, bucket: str, key: str, start: int, stop: int, *, version: str | None = None) -> Part:
        """Bytes `[start, stop)` of an object, or to its end, with its version and size. Raises as `read`."""
        headers = b"" if version is None else f"If-Match: {etag_of(version)}\r\n".encode("latin-1")
        headers += b"Range: bytes=%d-%d\r\n" % (start, stop - 1)
        head, body = self._transport.request(
            "GET", object_target(bucket, check_key(key)), headers, accept=(416,)
        )
        if head.status == 416:
            info = self.known(bucket, key)
            return Part(b"", info.version, info.size_bytes)
        total = head.headers.get("content-range", "").rpartition("/")[2] or str(len(body))
        return Part(bytes(body), version_of(head.headers.get("etag", "")), int(total))

    def _items(self, bucket: str, asked: Asked, *, is_raising: bool, views: bool) -> list[Item]:
        items: list[Item] = []
        for first in range(0, len(asked), READ_KEYS_MAX):
            part = asked
            if len(asked) > READ_KEYS_MAX:
                part = asked.some(range(first, min(first + READ_KEYS_MAX, len(asked))))
            found = self._read_batch(bucket, part, self._descriptors, views=views)
            gone = [position for position, item in enumerate(found) if item is None]
            if gone:
                again = self._read_batch(bucket, part.some(gone), None, views=views)
                for position, item in zip(gone, again, strict=True):
                    found[position] = item
            if is_raising:
                raise_first(found)
            items += [item for item in found if item is not None]
        return items

    def _read_batch(
        self, bucket: str, asked: Asked, descriptors: Descriptors | None, *, views: bool
    ) -> list[Item | None]:
        """None stands for what cannot be read here; only with `descriptors`."""
        held = None if descriptors is None else descriptors.held()
        parts = [asked]
        count = len(asked)
        if held is not None and held.files and _FIRST_KEYS < count <= _PIPELINED_KEYS_MAX:
            # While the first part is read here, the server looks up the others.
            parts = [asked.some(range(_FIRST_KEYS)), asked.some(range(_FIRST_KEYS, count))]
        wanted = None if held is None else held.wanted
        bodies = [msgspec.msgpack.encode(part.request(bucket, wanted)) for part in parts]
        items: list[Item | None] = []
        with closing(self._transport.post_all("/-/read", bodies)) as answers:
            for part, (body, arrived) in zip(parts, answers, strict=True):
                places = None
                if descriptors is not None and held is not None:
                    places = Places(descriptors, held, arrived)
                items += split_frames(body, bucket, part, places, views=views)
        return items

    def list_objects(self, bucket: str, prefix: str = "") -> list[ObjectInfo]:
        """All objects whose keys start with `prefix`, sorted by key. Raises ObjectNotFound for the bucket."""
        try:
            return self._list_once(bucket, prefix)
        except OriginError:
            # Among others: an origin that lists out of order is only noticed on the way.
            return self._list_once(bucket, prefix)

    def _list_once(self, bucket: str, prefix: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        after: str | None = None
        while True:
            page = self.list_page(bucket, prefix, after, LIST_LIMIT_MAX)
            found += page.objects
            if page.after is None:
                return found
            after = page.after

    def list_page(
        self, bucket: str, prefix: str, after: str | None, limit: int, delimiter: str = ""
    ) -> ObjectPage:
        """At most `limit` objects that come after the key `after`; with a delimiter, objects and folders right below
        the prefix, if the server knows that: see `entries.folder_page`."""
        query = {"prefix": prefix, "limit": str(limit)} | ({} if after is None else {"after": after})
        query |= {"delimiter": delimiter} if delimiter else {}
        return self._call("GET", f"/-/list/{quote(bucket, safe='')}?{urlencode(query)}", ObjectPage)

    def add_bucket(
        self,
        name: str,
        origin_url: str,
        *,
        policy: str = "lru",
        ttl_s: float = 3600.0,
        stale_if_error_s: float = 86400.0,
    ) -> BucketAdded:
        """Add a bucket, at all servers of the fleet; nothing happens if the very same is there. Raises ConfigError if
        another one is, which names the servers. The answer names those that have it later, or cannot open it."""
        spec = BucketSpec(origin_url, policy, ttl_s, stale_if_error_s)
        target = f"/-/buckets/{quote(name, safe='')}"
        return self._call("PUT", target, BucketAdded, msgspec.json.encode(spec))

    def status(self) -> CacheStatus:
        """The server's figures."""
        return self._call("GET", "/-/status", CacheStatus)

    def fleet(self) -> FleetStatus:
        """The fleet as the server sees it; a server that is in none is its own only member."""
        return self._call("GET", "/-/fleet", FleetStatus)

    def refresh(self, bucket: str, prefix: str = "") -> int:
        """Make the next reader of each key under `prefix` ask the origin. Returns how many keys."""
        return self.refresh_fleet(bucket, prefix).dropped

    def refresh_fleet(self, bucket: str, prefix: str = "") -> Refreshed:
        """As `refresh`; says as well which servers of the fleet could not be told."""
        return self._call("POST", target_below("refresh", bucket, prefix), Refreshed, b"")

    def evict(self, bucket: str, prefix: str = "") -> Evicted:
        """Give up what the fleet holds of the keys under `prefix`. Raises ObjectNotFound for the bucket."""
        return self._call("POST", target_below("evict", bucket, prefix), Evicted, b"")

    def pin(self, bucket: str, prefix: str = "") -> Pins:
        """Keep what lies under `prefix` from being evicted. Returns all pins of the bucket."""
        return self._call("PUT", target_below("pin", bucket, prefix), Pins, b"")

    def unpin(self, bucket: str, prefix: str = "") -> Pins:
        """Let what lies under `prefix` be evicted again. Returns the pins that the bucket still has."""
        return self._call("DELETE", target_below("pin", bucket, prefix), Pins)

    def load(self, bucket: str, keys: Sequence[str], *, replicas: int = 0, age_s: int = 0) -> list[LoadItem]:
        """Have at most LOAD_KEYS_MAX objects held, without their bytes being sent. Returns how each went, in order.

        `replicas`: on so many servers of the fleet; 0: on as many as the bucket says. `age_s`: what came in so many
        seconds before does not leave for it. The server answers when all are there.

        Raises ObjectNotFound for the bucket.
        """
        request = msgspec.msgpack.encode(LoadRequest(list(keys), replicas, age_s))
        items = self._call("POST", f"/-/load/{quote(bucket, safe='')}", LoadAnswer, request).items
        if [item.key for item in items] != list(keys):
            raise WireError("the server's answer to a load is not about the objects that it was asked for")
        return items

    def servers(self) -> Sequence[CacheClient]:
        return [self]

    def close(self) -> None:
        """Close the pooled connections and what the server has passed. The client may be used again."""
        self._transport.close()
        if self._descriptors is not None:
            self._descriptors.clear()

    def __enter__(self) -> CacheClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, target: str, kind: type[T], body: bytes | None = None) -> T:
        return self.call(method, target, kind, body)

    def call(self, method: str, target: str, kind: type[T], body: bytes | None = None) -> T:
        """The answer of one of the server's own routes."""
        _, answer = self._transport.request(method, target, body=body)
        try:
            return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise WireError(f"the server's answer to {method} {target} is not understood: {error}") from error
