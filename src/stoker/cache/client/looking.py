"""What is known of single objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from stoker.cache.client.transport import Transport
from stoker.wire.cache_api import ObjectInfo, ObjectStat
from stoker.wire.http import check_key, object_target, version_of
from stoker.wire.http_dates import parse_http_date

T = TypeVar("T")
_MODIFIED = "Last-Modified: "


class LookingClient(ABC):
    """Every method may raise CacheUnavailable, AccessDenied and WireError, ObjectNotFound for the bucket, and
    OriginError."""

    _transport: Transport

    @abstractmethod
    def call(self, method: str, target: str, kind: type[T], body: bytes | None = None) -> T: ...

    def _of_key(self, bucket: str, key: str, question: Callable[[LookingClient], T]) -> T:
        """What the server says that knows most of a key; where there is one, that one."""
        return question(self)

    def stat(self, bucket: str, key: str) -> ObjectInfo:
        """Size in bytes and version of an object. Raises ObjectNotFound."""
        return self._of_key(bucket, key, lambda client: client._stat(bucket, key))

    def known(self, bucket: str, key: str) -> ObjectStat:
        """What the server knows of a key, and since when; a key that is not there is answered as well."""
        target = f"/-/stat{object_target(bucket, check_key(key))}"
        return self._of_key(bucket, key, lambda client: client.call("GET", target, ObjectStat))

    def look_up(self, bucket: str, key: str) -> ObjectInfo | None:
        """Size in bytes, version and time (0: it is not known here) of an object; None: there is none. Of what the
        server knows for sure the front tells it, which is cheaper than `known`."""
        return self._of_key(bucket, key, lambda client: client._look_up(bucket, key))

    def _stat(self, bucket: str, key: str) -> ObjectInfo:
        # A HEAD answer has no body to name the error in, so the first byte is asked for instead.
        head, _ = self._transport.request(
            "GET", object_target(bucket, check_key(key)), b"Range: bytes=0-0\r\n", accept=(416,)
        )
        if head.status == 416:
            head, _ = self._transport.request("GET", object_target(bucket, key))
            return ObjectInfo(key, 0, version_of(head.headers.get("etag", "")))
        total = head.headers.get("content-range", "").rpartition("/")[2] or head.headers.get(
            "content-length", "0"
        )
        return ObjectInfo(key, int(total), version_of(head.headers.get("etag", "")))

    def _look_up(self, bucket: str, key: str) -> ObjectInfo | None:
        head = self._transport.head(object_target(bucket, check_key(key)))
        if head.status == 200 and "etag" in head.headers:
            modified_s = parse_http_date(head.headers.get("last-modified", ""))
            version = version_of(head.headers.get("etag", ""))
            return ObjectInfo(key, head.content_length or 0, version, float(modified_s or 0))
        known = self.known(bucket, key)
        if known.is_absent:
            return None
        said = known.attributes.partition("\r\n")[0]
        modified_s = parse_http_date(said.removeprefix(_MODIFIED)) if said.startswith(_MODIFIED) else 0
        return ObjectInfo(key, known.size_bytes, known.version, float(modified_s or 0))
