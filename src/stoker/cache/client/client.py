"""The blocking client: what a cache server can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from stoker.cache.client.batch import split_frames
from stoker.cache.client.local_files import LocalFiles
from stoker.cache.client.transport import Transport
from stoker.errors import OriginError, WireError
from stoker.wire.cache_api import (
    LIST_LIMIT_MAX,
    READ_KEYS_MAX,
    BucketSpec,
    CacheStatus,
    ObjectInfo,
    ObjectPage,
    ReadRequest,
    Refreshed,
)
from stoker.wire.http import check_key, etag_of, object_target, version_of

T = TypeVar("T")
_FIRST_KEYS = 16
_PIPELINED_KEYS_MAX = 512


class CacheClient:
    """Talks to one cache server at `http://host:port` or `unix:///path`; connects when first used.

    `timeout_s` is the longest silence of the server, in seconds, before CacheUnavailable. Every method may
    raise CacheUnavailable, AccessDenied and WireError.

    `short_circuit`: at a Unix socket, let the server name the files of long records (`read_many` only, objects
    of one block only) and read them here. The server does so for its own user; others get the bytes.
    """

    def __init__(
        self,
        endpoint: str,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        short_circuit: bool = True,
    ) -> None:
        self._transport = Transport(endpoint, token, timeout_s)
        is_near = short_circuit and self._transport.endpoint.path is not None
        self._files = LocalFiles() if is_near else None

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

    def read_many(self, bucket: str, keys: Sequence[str]) -> list[bytes]:
        """Whole objects, in the order of `keys`, by one request.

        Raises the error of the first that failed, which names its key: ObjectNotFound, ObjectChanged,
        OriginError.
        """
        items: list[bytes] = []
        for first in range(0, len(keys), READ_KEYS_MAX):
            part = list(keys[first : first + READ_KEYS_MAX])
            found = self._read_batch(bucket, part, self._files)
            gone = [position for position, item in enumerate(found) if item is None]
            if gone:
                again = self._read_batch(bucket, [part[position] for position in gone], None)
                for position, item in zip(gone, again, strict=True):
                    found[position] = item
            items += [item for item in found if item is not None]
        return items

    def _read_batch(self, bucket: str, keys: list[str], files: LocalFiles | None) -> list[bytes | None]:
        """None stands for what the server has in a file that is not there; only with `files`."""
        had_bad_places = files is None and self._files is not None and self._files.is_used
        parts = [keys]
        if files is not None and files.is_used and _FIRST_KEYS < len(keys) <= _PIPELINED_KEYS_MAX:
            # While the files of the first part are read, the server looks up the others.
            parts = [keys[:_FIRST_KEYS], keys[_FIRST_KEYS:]]
        from_bytes = None if files is None else files.from_bytes
        bodies = [
            msgspec.msgpack.encode(ReadRequest(bucket, part, from_bytes, had_bad_places)) for part in parts
        ]
        items: list[bytes | None] = []
        with closing(self._transport.post_all("/-/read", bodies)) as answers:
            for part, body in zip(parts, answers, strict=True):
                items += split_frames(body, bucket, part, files)
        return items

    def stat(self, bucket: str, key: str) -> ObjectInfo:
        """Size in bytes and version of an object. Raises ObjectNotFound, OriginError."""
        # A HEAD answer has no body to name the error in, so the first byte is asked for instead.
        head, _ = self._transport.request(
            "GET", object_target(bucket, check_key(key)), b"Range: bytes=0-0\r\n", accept=(416,)
        )
        if head.status == 416:
            return ObjectInfo(key, 0, self._empty_version(bucket, key))
        total = head.headers.get("content-range", "").rpartition("/")[2] or head.headers.get(
            "content-length", "0"
        )
        return ObjectInfo(key, int(total), version_of(head.headers.get("etag", "")))

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

    def list_page(self, bucket: str, prefix: str, after: str | None, limit: int) -> ObjectPage:
        """At most `limit` objects that come after the key `after`."""
        query = {"prefix": prefix, "limit": str(limit)} | ({} if after is None else {"after": after})
        return self._call("GET", f"/-/list/{quote(bucket, safe='')}?{urlencode(query)}", ObjectPage)

    def add_bucket(
        self,
        name: str,
        origin_url: str,
        *,
        policy: str = "lru",
        ttl_s: float = 3600.0,
        stale_if_error_s: float = 86400.0,
    ) -> None:
        """Add a bucket; nothing happens if the very same is there. Raises ConfigError if another one is."""
        spec = BucketSpec(origin_url, policy, ttl_s, stale_if_error_s)
        self._call("PUT", f"/-/buckets/{quote(name, safe='')}", BucketSpec, msgspec.json.encode(spec))

    def status(self) -> CacheStatus:
        """The server's figures."""
        return self._call("GET", "/-/status", CacheStatus)

    def refresh(self, bucket: str, prefix: str = "") -> int:
        """Make the next reader of each key under `prefix` ask the origin. Returns how many keys."""
        target = f"/-/refresh/{quote(bucket, safe='')}?{urlencode({'prefix': prefix})}"
        return self._call("POST", target, Refreshed, b"").dropped

    def close(self) -> None:
        """Close the pooled connections. The client may be used again."""
        self._transport.close()

    def __enter__(self) -> CacheClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _empty_version(self, bucket: str, key: str) -> str:
        head, _ = self._transport.request("GET", object_target(bucket, key))
        return version_of(head.headers.get("etag", ""))

    def _call(self, method: str, target: str, kind: type[T], body: bytes | None = None) -> T:
        _, answer = self._transport.request(method, target, body=body)
        try:
            return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise WireError(f"the server's answer to {method} {target} is not understood: {error}") from error
